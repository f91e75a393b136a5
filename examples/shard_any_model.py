"""Shard a Hugging Face model over the ranks (ZeRO-3), train it, save it and load it again.

    torchrun --standalone --nproc-per-node 2 examples/shard_any_model.py

Needs neither the trainer nor a configuration file. Every rank keeps a part of each parameter,
gradient and moment; each decoder layer is gathered only while it runs. The checkpoint loads on any
number of ranks, with any strategy.
"""

import os
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from nanotrain import ParallelContext, ShardedModule, Topology
from nanotrain.comm.collectives import all_gather_object
from nanotrain.config.config import OptimConfig
from nanotrain.config.parallel import ParallelConfig

PARALLEL = ParallelConfig(data_parallel_sharding_strategy="optim_grads_params")


def build(context: ParallelContext) -> ShardedModule:
    """A small Llama, sharded; the same initial weights on every rank."""
    torch.manual_seed(0)
    sizes = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=64,
    )
    model = LlamaForCausalLM(sizes)
    return ShardedModule(
        model,
        context,
        parallel=PARALLEL,
        unit_classes=(LlamaDecoderLayer,),
        optim=OptimConfig(lr=3e-3),
    )


def loss_of(sharded: ShardedModule, seed: int) -> torch.Tensor:
    """The loss on a batch of this seed: each sequence counts upwards from a random token."""
    starts = torch.randint(0, 64, (8, 1), generator=torch.Generator().manual_seed(seed))
    tokens = (starts + torch.arange(16)) % 64
    return sharded.module(input_ids=tokens, labels=tokens).loss


def main(context: ParallelContext, folder: Path) -> None:
    """Train, save, load into a new model and compare."""
    sharded = build(context)
    for step in range(30):
        loss = loss_of(sharded, seed=step * context.topology.world_size + context.rank)
        sharded.backward(loss)
        update = sharded.step()
        if context.rank == 0 and step % 10 == 9:
            print(f"step {step + 1}  loss {loss.item():.3f}  gradient norm {update.grad_norm:.3f}")
    checkpoint = sharded.save(folder, step=30)
    again = build(context)
    again.load(checkpoint)
    with torch.no_grad():
        same = torch.equal(loss_of(sharded, seed=-1), loss_of(again, seed=-1))
    dp, world_size = sharded.data_parallel, context.topology.world_size
    if context.rank == 0:
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        print(f"{ranks}, each keeps {dp.param_buffer.numel():,} of {dp.layout.numel:,} elements")
        print("same loss after loading:", same)


if __name__ == "__main__":
    with ParallelContext.start(
        Topology.of(PARALLEL, int(os.environ.get("WORLD_SIZE", "1"))), device="cpu"
    ) as ctx:
        paths = all_gather_object(tempfile.mkdtemp() if ctx.rank == 0 else "", ctx.control)
        main(ctx, Path(paths[0]))
