"""ZeRO-2 for any torch module and optimizer.

    torchrun --standalone --nproc-per-node 2 examples/zero_by_hand.py

Uses only nanotrain.comm and nanotrain.parallel.dp. DataParallel moves the parameters into flat
buffers. Each rank gets the summed gradients of its shard and updates this shard, here with signs of
gradients (signSGD). Every rank ends with the same weights, and none stores all gradients at full
size or the full optimizer state.
"""

import os

import torch
from torch import nn

from nanotrain.comm.collectives import all_gather_object
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.parallel import ParallelConfig
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.parallel.dp.layout import LayoutRules, plan_layout
from nanotrain.parallel.dp.options import STRATEGIES, DataParallelOptions, ReduceGroups
from nanotrain.precision.dtypes import Precision
from nanotrain.spec.params import LocalParam, Normal, ParamSpec
from nanotrain.topology.topology import Topology


def describe(model: nn.Module) -> list[LocalParam]:
    """What DataParallel needs of each parameter: name and shape; no model parallelism shards it."""
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    return [
        LocalParam.unsharded(
            ParamSpec(name, shape, dtype="fp32", init=Normal(0.02), weight_decay=len(shape) > 1)
        )
        for name, shape in shapes.items()
    ]


def train(context: ParallelContext) -> None:
    """Fit a sine with a small network, two microbatches a step."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(1, 77), nn.Tanh(), nn.Linear(77, 77), nn.Tanh(), nn.Linear(77, 1)
    )
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    shard = context.group("dp_shard")
    parallel = DataParallel(
        model,
        plan_layout(describe(model), LayoutRules(shard.size, bucket_size=3000)),
        groups=ReduceGroups(shard, context.group("dp_replicate")),
        options=DataParallelOptions(STRATEGIES["optim_grads"]),
        precision=Precision(params=torch.float32),
        device=context.device,
    )
    with torch.no_grad():  # the buffer starts at zero
        for name, param in model.named_parameters():
            param.copy_(start[name])
    torch.manual_seed(1 + context.rank)  # each rank reads data of its own
    for step in range(100):
        parallel.begin_step()
        for is_last in (False, True):
            x = 6 * torch.rand(64, 1, device=context.device) - 3
            loss = (model(x) - x.sin()).square().mean()
            parallel.backward_begins(is_last=is_last)
            loss.backward()
            parallel.backward_ended()
        parallel.finish_grad_reduce()
        with torch.no_grad():
            for bucket in parallel.buckets:
                bucket.params.shard.sub_(2e-3 * (1 - step / 100) * bucket.grads.shard.sign())
        parallel.start_param_gather()
        if context.rank == 0 and step % 25 == 24:
            print(f"step {step + 1:3}  loss {loss.item():.4f}")
    sums = all_gather_object(
        [param.double().sum().item() for param in model.parameters()], context.control
    )
    held = sum(bucket.grads.shard.numel() for bucket in parallel.buckets)
    if context.rank == 0:
        print(
            f"rank 0 of {shard.size} keeps gradients for {held:,} of {parallel.layout.numel:,} elements"
        )
        print("same weights on every rank:", all(row == sums[0] for row in sums))


if __name__ == "__main__":
    config = ParallelConfig(data_parallel_sharding_strategy="optim_grads")
    with ParallelContext.start(
        Topology.of(config, int(os.environ.get("WORLD_SIZE", "1"))), device="cpu"
    ) as ctx:
        train(ctx)
