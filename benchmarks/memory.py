"""Resident bytes per parameter and bytes sent per rank and step, compared with the table of docs/zero.md.

    python benchmarks/memory.py                  # 1, 2 and 4 ranks

Each rank builds nanotrain's DataParallel and DistributedOptimizer around a small GPT and runs optimizer steps of three
microbatches, with overlap. Then it finds every live tensor of the process through the garbage collector and sums the
distinct storages: `params` are those of the model's parameters, `optimizer` those of main params and moments, `receive`
the byte buffers that gloo collectives receive into (NCCL has its own), and all others count as `grads`. Bytes sent are
those that comm/ counted.

Measured bytes are divided by P, the number of parameters. The table is in terms of P; memory holds P plus alignment and
padding and, for ZeRO-2, two buckets. With both included, params + grads + optimizer must equal the table to the byte
(`exact`), and so must the bytes sent.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.distributed as dist

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import (
    Activation,
    DType,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PositionEmbedding,
    PrecisionConfig,
    ShardingStrategy,
)
from nanotrain.data.batch import Batch
from nanotrain.model.context import BatchContext
from nanotrain.model.init import initialize
from nanotrain.model.transformer import Stage, build_stage
from nanotrain.optim.distributed import DistributedOptimizer
from nanotrain.parallel.dp.data_parallel import DataParallel, DataParallelOptions
from nanotrain.parallel.dp.layout import LayoutRules, plan_layout
from nanotrain.parallel.dp.reduction import ReduceGroups
from nanotrain.parallel.dp.strategy import STRATEGIES
from nanotrain.precision.loss_scale import LossScale
from nanotrain.precision.policy import Precision
from nanotrain.topology.topology import Topology

# Odd widths, several buckets, learned positions (rotary tables would be counted as gradients).
MODEL = ModelConfig(
    num_layers=4,
    hidden_size=195,
    num_attention_heads=3,
    ffn_hidden_size=677,
    vocab_size=1999,
    max_position_embeddings=64,
    position_embedding_type=PositionEmbedding.learned_absolute,
    activation=Activation.swiglu,
    add_bias_linear=True,
)
BUCKET_SIZE = 300_000
MICROBATCHES = 3


@dataclass(frozen=True)
class Row:
    """Measurements of one strategy on one rank, in bytes."""

    strategy: str
    dtype: str
    ranks: int
    num_params: int
    params: int
    grads: int
    optimizer: int
    receive: int
    sent: int
    expected: int
    expected_sent: int

    @property
    def resident(self) -> int:
        """Parameters, gradients and optimizer state together."""
        return self.params + self.grads + self.optimizer


@dataclass(frozen=True)
class Case:
    """The variables of the table's formulas."""

    w: int  # bytes of a parameter
    s: int  # bytes of optimizer state: fp32 parameters need no main params, so 8 and not 12
    d: int  # shard ranks
    m: int = MICROBATCHES

    @classmethod
    def of(cls, dtype: str, ranks: int) -> "Case":
        """The case of a parameter dtype and a number of ranks."""
        return cls(w=4, s=8, d=ranks) if dtype == "fp32" else cls(w=2, s=12, d=ranks)


Formula = Callable[[Case], float]
RESIDENT: dict[str, Formula] = {
    "no_shard": lambda c: c.w + 4 + c.s,
    "optim": lambda c: c.w + 4 + c.s / c.d,
    "optim_grads": lambda c: c.w + (4 + c.s) / c.d,
    "optim_grads_params": lambda c: (c.w + 4 + c.s) / c.d,
}
SENT: dict[str, Formula] = {
    "no_shard": lambda c: 2 * 4 * (c.d - 1) / c.d,
    "optim": lambda c: (4 + c.w) * (c.d - 1) / c.d,
    "optim_grads": lambda c: (4 * c.m + c.w) * (c.d - 1) / c.d,
    "optim_grads_params": lambda c: (4 * c.m + 2 * c.m * c.w) * (c.d - 1) / c.d,
}


def live_tensors() -> list[torch.Tensor]:
    """All tensors of the process with more than one element and with storage."""
    gc.collect()
    # Not isinstance: it would trigger every deprecated lazy object.
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    return [tensor for tensor in tensors if tensor.numel() > 1 and not tensor.is_meta]


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Sizes of the distinct storages of tensors in bytes, by address."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def without(these: dict[int, int], those: dict[int, int]) -> dict[int, int]:
    """The storages of the first argument that are not in the second."""
    return {address: size for address, size in these.items() if address not in those}


def measure(context: ParallelContext, strategy: str, dtype: str) -> Row:
    """Build, run two steps, and measure live storages and the bytes sent in the second step."""
    before = storages(live_tensors())
    precision_config = PrecisionConfig(params_dtype=DType(dtype))
    precision = Precision.of(precision_config)
    stage = build_stage(MODEL, dtype=dtype)
    shard = context.group("dp_shard")
    rules = LayoutRules(shard.size, BUCKET_SIZE, gathers_by_unit=STRATEGIES[strategy].gathers_by_unit)
    data_parallel = DataParallel(
        stage,
        plan_layout(stage.params, rules),
        groups=ReduceGroups(shard, context.group("dp_replicate")),
        options=DataParallelOptions(STRATEGIES[strategy], overlap_grad_reduce=True),
        precision=precision,
        device=context.device,
    )
    data_parallel.fill_params(partial(initialize, stage, seed=1))
    scale = LossScale.of(precision_config)
    optimizer = DistributedOptimizer(
        [data_parallel], OptimConfig(), precision=precision, loss_scale=scale, groups=context.groups
    )
    for _ in range(2):
        context.traffic.reset()
        take_step(stage, data_parallel, optimizer)
    sent = sum(context.traffic.bytes(op=op) for op in ("all_reduce", "reduce_scatter", "all_gather"))

    alive = [tensor for tensor in live_tensors() if tensor.untyped_storage().data_ptr() not in before]
    params = storages([data_parallel.param_buffer, *stage.parameters()])
    state = without(storages(optimizer.state_tensors().values()), params)
    receive = storages(tensor for tensor in alive if tensor.dtype is torch.uint8)
    grads = without(storages(alive), params | state | receive)
    layout = data_parallel.layout
    case = Case.of(dtype, context.topology.world_size)
    expected = RESIDENT[strategy](case) * layout.numel
    if STRATEGIES[strategy].shard_grads:
        num_full = min(2, case.d)  # one rank waits for no reduction, so its bucket is free before the next one fills
        expected += num_full * 4 * max(bucket.numel for bucket in layout.buckets)
    expected_sent = SENT[strategy](case) * layout.numel
    if STRATEGIES[strategy].shard_params:  # the tied embedding is gathered for the embedding and for the head
        tied = sum(bucket.numel for bucket in layout.buckets if bucket.params[0].param.spec.is_tied)
        expected_sent += 2 * case.m * case.w * tied * (case.d - 1) / case.d
    return Row(
        strategy=strategy,
        dtype=dtype,
        ranks=case.d,
        num_params=sum(local.spec.numel for local in stage.params),
        params=sum(params.values()),
        grads=sum(grads.values()),
        optimizer=sum(state.values()),
        receive=sum(receive.values()),
        sent=sent,
        expected=round(expected),
        expected_sent=round(expected_sent),
    )


def take_step(stage: Stage, data_parallel: DataParallel, optimizer: DistributedOptimizer) -> None:
    """One optimizer step of several microbatches."""
    tokens = torch.zeros(1, MODEL.max_position_embeddings, dtype=torch.int64)
    batch = Batch(tokens, tokens, torch.ones(tokens.shape))
    data_parallel.begin_step()
    for number in range(1, MICROBATCHES + 1):
        loss = stage(None, BatchContext(batch))
        data_parallel.backward_begins(is_last=number == MICROBATCHES)
        loss.backward()
        data_parallel.backward_ended()
    data_parallel.finish_grad_reduce()
    optimizer.step(1e-3)
    data_parallel.start_param_gather()


def run_rank() -> None:
    """Measure every strategy on one rank; rank 0 prints one JSON line per strategy."""
    world_size = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo")
    for dtype in ("bf16", "fp32"):
        for strategy in STRATEGIES:
            config = ParallelConfig(data_parallel_sharding_strategy=ShardingStrategy(strategy))
            context = ParallelContext.attach(Topology.of(config, world_size))
            row = measure(context, strategy, dtype)
            if context.rank == 0:
                print(json.dumps(asdict(row)), flush=True)
    if world_size > 1:
        dist.destroy_process_group()


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table, in bytes per parameter."""
    heads = ("dtype", "strategy", "d", "params", "grads", "optimizer", "total", "table", "exact")
    heads += ("receive", "sent", "table", "exact")
    lines = ["| " + " | ".join(heads) + " |", "|---|---|" + "---:|" * (len(heads) - 2)]
    for row in rows:
        case = Case.of(row.dtype, row.ranks)
        sizes = (row.params, row.grads, row.optimizer, row.resident, RESIDENT[row.strategy](case) * row.num_params)
        traffic = (row.receive, row.sent, SENT[row.strategy](case) * row.num_params)
        cells = [row.dtype, row.strategy, str(row.ranks), *(f"{size / row.num_params:.3f}" for size in sizes)]
        cells.append("yes" if row.resident == row.expected else f"{row.resident - row.expected:+,} B")
        cells += [f"{size / row.num_params:.3f}" for size in traffic]
        cells.append("yes" if row.sent == row.expected_sent else f"{row.sent - row.expected_sent:+,} B")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Launch the world sizes one after the other and print the table; exit 1 if a byte differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    args = parser.parse_args()
    if "RANK" in os.environ:
        run_rank()
        return
    rows = []
    for num_ranks in args.ranks:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        done = subprocess.run([*launcher, __file__], stdout=subprocess.PIPE, text=True, check=True)
        rows += [Row(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
    print(f"{rows[0].num_params:,} parameters, {MICROBATCHES} microbatches per step; bytes per parameter\n")
    print(table(rows))
    print("\nexact: equal to the table to the byte, including alignment, padding and ZeRO-2's two buckets")
    sys.exit(any(row.resident != row.expected or row.sent != row.expected_sent for row in rows))


if __name__ == "__main__":
    main()
