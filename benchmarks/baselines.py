"""Baselines: a Llama and training loops in plain PyTorch.

    python benchmarks/baselines.py --strategy single --model 25m torchrun --standalone
    --nproc-per-node 2 benchmarks/baselines.py --strategy fsdp2 --model 25m --dtype bf16

Contains the sizes, the model, one function per strategy that wraps it, and the loop. Rank 0 prints
one JSON object: `step_time_s` and `cpu_time_s` (lists, warmup left out; CPU time is summed over
ranks and threads), `tokens_per_step`, `loss` and, on a GPU, `peak_memory_bytes`. bf16 is as users
of each strategy run it: autocast around fp32 weights for one process and for DDP, FSDP2's
mixed-precision policy (bf16 parameters, fp32 reduction) for FSDP2.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Shapes: B batch  S sequence  H hidden  N heads  D head width  V vocabulary


@dataclass(frozen=True)
class Shape:
    """A workload: sizes of the model and of one rank's microbatch."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    micro_batch: int
    tied: bool = False


SHAPES = {
    "smoke": Shape(
        hidden=64, layers=4, heads=4, kv_heads=2, ffn=128, vocab=256, seq=32, micro_batch=2
    ),
    "10m": Shape(
        hidden=256, layers=8, heads=8, kv_heads=4, ffn=768, vocab=4096, seq=256, micro_batch=4
    ),
    "25m": Shape(
        hidden=384, layers=8, heads=6, kv_heads=6, ffn=1024, vocab=8192, seq=512, micro_batch=4
    ),
    "110m": Shape(
        hidden=768, layers=12, heads=12, kv_heads=12, ffn=2048, vocab=16384, seq=256, micro_batch=1
    ),
    "124m": Shape(
        hidden=768,
        layers=12,
        heads=12,
        kv_heads=12,
        ffn=2048,
        vocab=50304,
        seq=1024,
        micro_batch=16,
        tied=True,
    ),
    "llama1b": Shape(
        hidden=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        ffn=8192,
        vocab=128256,
        seq=2048,
        micro_batch=4,
        tied=True,
    ),
}
# nanotrain's defaults, so that both sides do the same work.
LR, BETAS, EPS, WEIGHT_DECAY, MAX_NORM = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0


class SelfAttention(nn.Module):
    """Causal attention with rotary positions and grouped key/value heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.hidden // shape.heads
        self.q_proj = nn.Linear(shape.hidden, shape.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * self.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        q = rotate(self.q_proj(x).view(heads).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(heads).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a gated MLP, each with an RMSNorm before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.attention = SelfAttention(shape)
        self.mlp_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        normed = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))


class Llama(nn.Module):
    """Token ids [B, S] to logits [B, S, V]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight
        half = shape.hidden // shape.heads // 2
        angles = torch.outer(
            torch.arange(shape.seq), 10000.0 ** (-torch.arange(half) / half)
        ).repeat(1, 2)
        # not buffers: DDP would broadcast them every step
        self.cos, self.sin = angles.cos(), angles.sin()
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + D/2) of a head [B, N, S, D] by the angle of its position."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


@dataclass(frozen=True)
class Stack:
    """A model wrapped by one of the strategies.

    Attributes:
        forward_context: entered around the forward pass.
        step_context: entered around forward, loss and backward.
        num_readers: ranks that read different samples.
        loss: function from logits [T, V] and labels [T] to the mean loss.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    forward_context: Callable[[], AbstractContextManager[object]]
    step_context: Callable[[], AbstractContextManager[object]] = nullcontext
    num_readers: int = field(
        default_factory=lambda: dist.get_world_size() if dist.is_initialized() else 1
    )
    loss: Callable[[Tensor, Tensor], Tensor] = field(default_factory=lambda: mean_loss)


def single(model: nn.Module, device: torch.device, bf16: bool) -> Stack:
    """One process."""
    return Stack(model, adamw(model), autocast_on(device, bf16))


def ddp(model: nn.Module, device: torch.device, bf16: bool) -> Stack:
    """torch's DistributedDataParallel."""
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Stack(wrapped, adamw(wrapped), autocast_on(device, bf16))


def zero1(model: nn.Module, device: torch.device, bf16: bool) -> Stack:
    """DistributedDataParallel with torch's ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **adamw_options()
    )
    return Stack(wrapped, optimizer, autocast_on(device, bf16))


def fsdp2(model: nn.Module, device: torch.device, bf16: bool) -> Stack:
    """torch's fully_shard with one unit per block: ZeRO-3, parameters are sharded too."""
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    shard_fully(model, mesh, bf16)
    return Stack(model, adamw(model), nullcontext)


def fsdp2_tp(model: nn.Module, device: torch.device, bf16: bool) -> Stack:
    """torch's tensor and sequence parallelism over pairs of ranks, fully_shard across the pairs."""
    from torch.distributed.tensor.parallel import loss_parallel

    pairs = dist.get_world_size() // 2
    mesh = dist.device_mesh.init_device_mesh(device.type, (pairs, 2), mesh_dim_names=("dp", "tp"))
    shard_matrices(model, mesh["tp"])
    shard_fully(model, mesh["dp"], bf16)
    return Stack(model, adamw(model), nullcontext, loss_parallel, num_readers=pairs)


STRATEGIES = {"single": single, "ddp": ddp, "zero1": zero1, "fsdp2": fsdp2, "fsdp2_tp": fsdp2_tp}


def shard_fully(model: nn.Module, mesh: dist.device_mesh.DeviceMesh, bf16: bool) -> None:
    """Apply fully_shard with one unit per block."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def shard_matrices(model: nn.Module, mesh: dist.device_mesh.DeviceMesh) -> None:
    """Apply tensor parallelism to every matrix, and sequence parallelism between them.

    The output of each norm is gathered along the sequence once, for all matrices that read it.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    sequence, replicated = Shard(1), Replicate()
    columns, rows = tp.ColwiseParallel(), tp.RowwiseParallel(output_layouts=sequence)
    for block in model.blocks:
        for norm in (block.attention_norm, block.mlp_norm):
            tp.parallelize_module(norm, mesh, tp.SequenceParallel())
            gather = tp.PrepareModuleOutput(
                output_layouts=sequence, desired_output_layouts=replicated, use_local_output=False
            )
            tp.parallelize_module(norm, mesh, gather)
        attention = {f"attention.{name}_proj": columns for name in "qkv"} | {
            "attention.o_proj": rows
        }
        mlp = {"gate_proj": columns, "up_proj": columns, "down_proj": rows}
        tp.parallelize_module(block, mesh, attention | mlp)
    ends = {
        "embedding": tp.RowwiseParallel(input_layouts=replicated, output_layouts=sequence),
        "norm": tp.SequenceParallel(),
        "head": tp.ColwiseParallel(
            input_layouts=sequence, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    tp.parallelize_module(model, mesh, ends)


def adamw_options() -> dict[str, object]:
    """nanotrain's AdamW options, with torch's fused kernel."""
    return {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY, "fused": True}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """torch's fused AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), **adamw_options())


def autocast_on(device: torch.device, bf16: bool) -> Callable[[], AbstractContextManager[object]]:
    """torch.autocast to bf16, or no context."""
    return (lambda: torch.autocast(device.type, torch.bfloat16)) if bf16 else nullcontext


def batches(shape: Shape, rank: int, device: torch.device) -> Iterator[Tensor]:
    """Random token ids [B, S + 1]: four batches, repeated."""
    generator = torch.Generator().manual_seed(1234 + rank)
    fixed = torch.randint(
        shape.vocab, (4, shape.micro_batch, shape.seq + 1), generator=generator
    ).to(device)
    while True:
        yield from fixed


def train_step(stack: Stack, microbatches: Sequence[Tensor]) -> float:
    """Forward, backward, clipping, update; reads the loss every step, as nanotrain does."""
    stack.optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for number, tokens in enumerate(microbatches, start=1):
        is_last = number == len(microbatches)
        with stack.step_context(), reduction(stack.model, is_last=is_last):
            with stack.forward_context():
                logits = stack.model(tokens[:, :-1])
            loss = stack.loss(logits.flatten(0, 1), tokens[:, 1:].flatten()) / len(microbatches)
            loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(stack.model.parameters(), MAX_NORM)
    stack.optimizer.step()
    return total.item()


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in fp32, mean over tokens; compiled, one kernel without fp32 logits in memory."""
    return F.cross_entropy(logits.float(), labels)


def reduction(model: nn.Module, *, is_last: bool) -> AbstractContextManager[object]:
    """Gradients are reduced across ranks in the last microbatch only, as torch's guides show."""
    if hasattr(model, "set_requires_gradient_sync"):  # fully_shard
        model.set_requires_gradient_sync(is_last)
    return model.no_sync() if hasattr(model, "no_sync") and not is_last else nullcontext()


@dataclass
class Times:
    """This rank's times of each step after the warmup, and the last loss."""

    step_time_s: list[float] = field(default_factory=list)
    cpu_time_s: list[float] = field(default_factory=list)
    loss: float = 0.0


def measure(
    stack: Stack, data: Iterator[Tensor], *, num_microbatches: int, warmup: int, steps: int
) -> Times:
    """Run and time the steps."""
    times = Times()
    for number in range(warmup + steps):
        start, cpu_start = time.perf_counter(), time.process_time()
        times.loss = train_step(stack, list(islice(data, num_microbatches)))
        if number >= warmup:
            times.step_time_s.append(time.perf_counter() - start)
            times.cpu_time_s.append(time.process_time() - cpu_start)
    return times


def summed_over_ranks(cpu_time_s: list[float]) -> list[float]:
    """CPU time summed over ranks, per step."""
    if not dist.is_initialized():
        return cpu_time_s
    ranks: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(ranks, cpu_time_s)
    return [sum(step) for step in zip(*ranks, strict=True)]


def build_parser() -> argparse.ArgumentParser:
    """The arguments of one run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", choices=STRATEGIES, required=True)
    parser.add_argument("--model", choices=SHAPES, default="25m")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--micro-batch", type=int, help="samples per microbatch (default: the model's)"
    )
    parser.add_argument(
        "--num-microbatches",
        type=int,
        default=1,
        help="per rank and step; their gradients are added",
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile every block with torch.compile"
    )
    parser.add_argument("--compile-loss", action="store_true", help="compile the loss too")
    parser.add_argument(
        "--checkpoint",
        action="store_true",
        help="recompute every block with torch.utils.checkpoint",
    )
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    return parser


def main() -> None:
    """Run one strategy and print the report."""
    args = build_parser().parse_args()

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device(
        args.device, int(os.environ.get("LOCAL_RANK", "0")) if args.device == "cuda" else None
    )
    if args.device == "cuda":
        torch.cuda.set_device(device)
    if args.strategy != "single":
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    shape = SHAPES[args.model]
    shape = Shape(**{**vars(shape), "micro_batch": args.micro_batch or shape.micro_batch})
    torch.manual_seed(0)
    with device:
        model = Llama(shape)
    if args.compile:
        for block in model.blocks:
            block.compile()
    if args.checkpoint:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    stack = STRATEGIES[args.strategy](model, device, args.dtype == "bf16")
    if args.compile_loss:
        stack = replace(stack, loss=torch.compile(mean_loss))
    reader = rank * stack.num_readers // world_size
    data, count = batches(shape, reader, device), args.num_microbatches
    times = measure(stack, data, num_microbatches=count, warmup=args.warmup, steps=args.steps)
    cpu_time_s = summed_over_ranks(times.cpu_time_s)
    if rank == 0:
        report = {
            "step_time_s": times.step_time_s,
            "cpu_time_s": cpu_time_s,
            "tokens_per_step": stack.num_readers * count * shape.micro_batch * shape.seq,
            "loss": times.loss,
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if args.device == "cuda" else 0,
        }
        print(json.dumps(report), flush=True)
    if dist.is_initialized():
        dist.barrier()
        # Wrappers and meshes keep gloo groups alive, which sometimes abort the process when the
        # interpreter exits.
        os._exit(0)


if __name__ == "__main__":
    main()
