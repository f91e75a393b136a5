"""Resident bytes per parameter and bytes sent per rank and step, compared with the table of
docs/zero.md.

    python benchmarks/memory.py                  # 1, 2, 4 and 8 ranks
    python benchmarks/memory.py --resident       # peak resident set of two processes, 110 M parameters
    python benchmarks/memory.py --resident --ranks 4
    python benchmarks/memory.py --planned        # whole runs of nine layouts: planned beside measured

Each rank builds nanotrain's DataParallel and DistributedOptimizer around a small GPT and runs
optimizer steps of three microbatches, with overlap. Then it finds every live tensor of the process
through the garbage collector and sums the distinct storages: `params` are those of the model's
parameters, `optimizer` those of main params and moments, the byte buffers that gloo collectives
receive into are left out (NCCL has its own), and all others count as `grads`. Bytes sent are those
that comm/ counted. `n` is the number of optimizer instances, `outer` what is sharded across them.
`peak` is the most bytes of full gradient buckets and gathered units at once, and must not exceed
`bound`: two buckets, and with optim_grads_params one unit.

Measured bytes are divided by P, the number of parameters. The table is in terms of P; memory holds
P plus alignment and padding and, where gradients are sharded, two buckets. With all included,
params + grads + optimizer must equal the table to the byte (`exact`), and so must the bytes sent.

`--resident` trains a model of 110 M parameters in fp32 with each strategy on N processes, as users
run it (rank.py) but with freed memory given back to the system (planned_memory.EXACT), and prints
the peak resident set of rank 0. It exits with 1 unless each strategy needs less than the one
before. `--planned` is planned_memory.py.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product

import planned_memory
import torch
import torch.distributed as dist
from throughput import Contender, Job, launch, sharding

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import OptimConfig, PrecisionConfig
from nanotrain.config.model import ModelConfig
from nanotrain.config.parallel import ParallelConfig
from nanotrain.data.batch import Batch
from nanotrain.model.context import BatchContext
from nanotrain.model.parameters import initialize
from nanotrain.model.transformer import Stage, build_stage
from nanotrain.optim.distributed import DistributedOptimizer
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.parallel.dp.layout import LayoutRules, plan_layout
from nanotrain.parallel.dp.options import STRATEGIES, DataParallelOptions, ReduceGroups
from nanotrain.parallel.dp.stores import ShardedParams
from nanotrain.precision.dtypes import DTYPE_NAMES, Precision
from nanotrain.precision.loss_scale import LossScale
from nanotrain.topology.topology import Topology

# Odd widths, several buckets, learned positions (rotary tables would be counted as gradients).
MODEL = ModelConfig(
    num_layers=4,
    hidden_size=195,
    num_attention_heads=3,
    ffn_hidden_size=677,
    vocab_size=1999,
    max_position_embeddings=64,
    position_embedding_type="learned_absolute",
    activation="swiglu",
    add_bias_linear=True,
)
BUCKET_SIZE = 300_000
MICROBATCHES = 3


@dataclass(frozen=True)
class Case:
    """One row: what is measured, and the variables of the table's formulas."""

    strategy: str
    dtypes: str  # a key of DTYPES
    d: int  # shard ranks, or replicas of no_shard
    n: int = 1  # optimizer instances
    outer: int = 1  # instances that optimizer state is sharded over

    @property
    def precision(self) -> Precision:
        """The dtypes."""
        return DTYPES[self.dtypes]

    @property
    def resident(self) -> float:
        """Bytes per element of params, grads, main params and moments; fp32 params are their own
        main params.
        """
        w, g, main_grad = (
            x.itemsize
            for x in (self.precision.params, self.precision.grads, self.precision.main_grads)
        )
        strategy, optim = STRATEGIES[self.strategy], 8 if w == 4 else 12
        shards = self.d if strategy.shard_optim else 1
        grads = main_grad / self.d if strategy.shard_grads else g
        if not strategy.shard_grads and g != main_grad:
            grads += main_grad / (shards * self.outer)
        return w / (self.d if strategy.shard_params else 1) + grads + optim / (shards * self.outer)

    @property
    def sent(self) -> float:
        """Bytes per element sent per rank and step."""
        w, g, m = self.precision.params.itemsize, self.precision.grads.itemsize, MICROBATCHES
        inside = {
            "no_shard": 2 * g,
            "optim": g + w,
            "optim_grads": g * m + w,
            "optim_grads_params": g * m + 2 * m * w,
        }
        across = g + w if self.outer > 1 else 2 * g
        return (
            inside[self.strategy] * (self.d - 1) / self.d + across / self.d * (self.n - 1) / self.n
        )


@dataclass(frozen=True)
class Row:
    """Measurements of one case on one rank, in bytes."""

    case: Case
    num_params: int
    params: int
    grads: int
    optimizer: int
    receive: int
    sent: int
    peak: int  # full buckets of gradients and gathered units
    bound: int  # of the peak
    expected: int
    expected_sent: int

    @property
    def resident(self) -> int:
        """Parameters, gradients and optimizer state together."""
        return self.params + self.grads + self.optimizer


BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = {
    "bf16": Precision(BF16),
    "fp32": Precision(FP32),
    "bf16 reduced in bf16": Precision(BF16, grads=BF16),
    "bf16, main grads bf16": Precision(BF16, grads=BF16, main_grads=BF16),
}


def cases_of(num_ranks: int) -> Iterator[Case]:
    """Every strategy and dtypes, with one and two instances, whose state is replicated or sharded
    across.
    """
    for dtypes, strategy in product(DTYPES, STRATEGIES):
        yield Case(strategy, dtypes, num_ranks)
        if num_ranks % 2 == 0 and num_ranks > 2 and strategy != "no_shard":
            yield Case(strategy, dtypes, num_ranks // 2, n=2)
            yield Case(strategy, dtypes, num_ranks // 2, n=2, outer=2)


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


def measure(context: ParallelContext, case: Case) -> Row:
    """Build, run two steps, and measure live storages and the bytes sent in the second step."""
    before = storages(live_tensors())
    strategy, stage = (
        STRATEGIES[case.strategy],
        build_stage(MODEL, dtype=DTYPE_NAMES[case.precision.params]),
    )
    shard, replicate = context.group("dp_shard"), context.group("dp_replicate")
    rules = LayoutRules(shard.size, case.outer, BUCKET_SIZE, gathers_by_unit=strategy.shard_params)
    data_parallel = DataParallel(
        stage,
        plan_layout(stage.params, rules),
        groups=ReduceGroups(shard, replicate, shards_across=case.outer > 1),
        options=DataParallelOptions(strategy, overlap_grad_reduce=True),
        precision=case.precision,
        device=context.device,
    )
    data_parallel.fill_params(partial(initialize, stage, seed=1))
    scale = LossScale(PrecisionConfig())
    optimizer = DistributedOptimizer(
        [data_parallel],
        OptimConfig(),
        precision=case.precision,
        loss_scale=scale,
        groups=context.groups,
    )
    with peak_of_transient_bytes(data_parallel) as peak:
        for _ in range(2):
            context.traffic.reset()
            take_step(stage, data_parallel, optimizer)
    ops = ("all_reduce", "reduce_scatter", "all_gather")  # those in world are of the gradient norm
    sent = sum(context.traffic.bytes(group.name, op) for group in (shard, replicate) for op in ops)

    alive = [
        tensor for tensor in live_tensors() if tensor.untyped_storage().data_ptr() not in before
    ]
    params = storages([data_parallel.param_buffer, *stage.parameters()])
    state = without(storages(optimizer.allocated_tensors), params)
    receive = storages(tensor for tensor in alive if tensor.dtype is torch.uint8)
    grads = without(storages(alive), params | state | receive)
    expected, expected_sent, bound = closed_forms(case, data_parallel)
    return Row(
        case=case,
        num_params=sum(local.spec.numel for local in stage.params),
        params=sum(params.values()),
        grads=sum(grads.values()),
        optimizer=sum(state.values()),
        receive=sum(receive.values()),
        sent=sent,
        peak=max(peak),
        bound=bound,
        expected=expected,
        expected_sent=expected_sent,
    )


@contextmanager
def peak_of_transient_bytes(data_parallel: DataParallel) -> Iterator[list[int]]:
    """Bytes of full gradient buckets and gathered units whenever one is allocated."""
    seen, allocate, memory = (
        [0],
        ShardedParams.allocate,
        getattr(data_parallel.buckets[0].grads, "_memory", None),
    )

    def record() -> None:
        full = (
            sum(b.params.full.untyped_storage().nbytes() for b in data_parallel.buckets)
            if gathers
            else 0
        )
        is_allocated = memory is not None and "tensor" in vars(memory)
        seen.append(full + (memory.tensor.nbytes if is_allocated else 0))

    def recorded_allocate(store: ShardedParams) -> None:
        allocate(store)
        record()

    gathers = data_parallel.options.strategy.shard_params
    ShardedParams.allocate = recorded_allocate  # type: ignore[method-assign]
    yield seen
    record()
    ShardedParams.allocate = allocate  # type: ignore[method-assign]


def closed_forms(case: Case, data_parallel: DataParallel) -> tuple[int, int, int]:
    """Resident bytes, bytes sent, and the bound of full buckets and gathered units, padding
    included.
    """
    layout, strategy = data_parallel.layout, STRATEGIES[case.strategy]
    expected, bound = case.resident * layout.numel, 0
    if strategy.shard_grads:
        bound = layout.open_numel * case.precision.grads.itemsize
        expected += bound
    expected_sent = case.sent * layout.numel
    # the tied embedding is gathered for the embedding, and with the final norm for the head
    if strategy.shard_params:
        width = case.precision.params.itemsize
        tied = sum(bucket.numel for bucket in layout.buckets if bucket.is_shared)
        bound += max(layout.numel_of_units["head"] + tied, *layout.numel_of_units.values()) * width
        ends = [bucket.numel for bucket in layout.buckets if bucket.units & {"embedding", "head"}]
        expected_sent -= MICROBATCHES * width * (sum(ends) - tied) * (case.d - 1) / case.d
    return round(expected), round(expected_sent), bound


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
    for case in cases_of(world_size):
        config = ParallelConfig(
            data_parallel_sharding_strategy=case.strategy,
            num_distributed_optimizer_instances=case.n,
        )
        context = ParallelContext.attach(Topology.of(config, world_size))
        row = measure(context, case)
        if context.rank == 0:
            print(json.dumps(asdict(row)), flush=True)
    if world_size > 1:
        dist.destroy_process_group()


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table, in bytes per parameter."""
    heads = (
        "dtypes",
        "strategy",
        "d",
        "n",
        "outer",
        "params",
        "grads",
        "optimizer",
        "total",
        "table",
        "exact",
    )
    heads += ("peak", "bound", "sent", "table", "exact")
    lines = ["| " + " | ".join(heads) + " |", "|---|---|" + "---:|" * (len(heads) - 2)]
    for row in rows:
        case = row.case
        sizes = (row.params, row.grads, row.optimizer, row.resident, case.resident * row.num_params)
        cells = [
            case.dtypes,
            case.strategy,
            str(case.d),
            str(case.n),
            "optim" if case.outer > 1 else "-",
        ]
        cells += [f"{size / row.num_params:.3f}" for size in sizes]
        cells.append(
            "yes" if row.resident == row.expected else f"{row.resident - row.expected:+,} B"
        )
        traffic = (row.peak, row.bound, row.sent, case.sent * row.num_params)
        cells += [f"{size / row.num_params:.3f}" for size in traffic]
        cells.append(
            "yes" if row.sent == row.expected_sent else f"{row.sent - row.expected_sent:+,} B"
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def peak_resident_bytes(strategy: str, num_ranks: int) -> int:
    """The peak resident set of rank 0: two steps of two microbatches of few tokens, so that state
    dominates.

    Buckets have the size of a block: two of them are transient where gradients are sharded.
    """
    job = Job("110m", "fp32", warmup=1, steps=1)
    # later flags win
    batch = f"--global-batch-size={2 * num_ranks}"
    sizes = ("--seq-length=64", "--micro-batch-size=1", batch, "--ddp-bucket-size=7000000")
    command = sharding(strategy, *sizes, "--num-workers=0")
    (report,) = launch(
        [Contender(strategy, num_ranks, command, environment=planned_memory.EXACT)], job
    )
    return report.peak_memory_bytes


def compare_resident(num_ranks: int) -> int:
    """Print the peak of every strategy; 1 unless each is below the one before."""
    print(f"| strategy | peak resident set of one of {num_ranks} processes |\n|---|---:|")
    peaks = {}
    for strategy in STRATEGIES:
        peaks[strategy] = peak_resident_bytes(strategy, num_ranks)
        print(f"| `{strategy}` | {peaks[strategy] / 1e9:.2f} GB |", flush=True)
    return int(list(peaks.values()) != sorted(set(peaks.values()), reverse=True))


def read_row(line: str) -> Row:
    """A row from the line that a rank printed."""
    values = json.loads(line)
    return Row(**values | {"case": Case(**values["case"])})


def main() -> None:
    """Launch the world sizes one after the other and print the table; exit 1 if a byte differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", help="by default 1, 2, 4 and 8; with --resident 2"
    )
    parser.add_argument(
        "--resident", action="store_true", help="peak resident sets of a larger model"
    )
    parser.add_argument(
        "--planned", action="store_true", help="planned memory beside that of whole runs"
    )
    args = parser.parse_args()
    if args.planned:
        sys.exit(planned_memory.compare())
    if args.resident:
        sys.exit(max(compare_resident(num_ranks) for num_ranks in args.ranks or [2]))
    if "RANK" in os.environ:
        run_rank()
        return
    rows = []
    for num_ranks in args.ranks or [1, 2, 4, 8]:
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={num_ranks}",
        ]
        done = subprocess.run([*launcher, __file__], stdout=subprocess.PIPE, text=True, check=True)
        rows += [read_row(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print(
        f"{rows[0].num_params:,} parameters, {MICROBATCHES} microbatches per step; bytes per parameter\n"
    )
    print(table(rows))
    print(
        "\nexact: equal to the table to the byte, including alignment, padding and two buckets of sharded gradients"
    )
    wrong = [row for row in rows if row.resident != row.expected or row.sent != row.expected_sent]
    sys.exit(bool(wrong) or any(row.peak > row.bound for row in rows))


if __name__ == "__main__":
    main()
