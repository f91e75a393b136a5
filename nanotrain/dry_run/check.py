"""The dry run of a configuration: run ranks, compare them, and print one screen.

dry_run(config, world_size) -> DryRun.text(), DryRun.faults
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from pathlib import Path
from traceback import extract_tb
from types import TracebackType
from typing import NamedTuple, cast

from nanotrain.checkpoint.plan import coverage_fault
from nanotrain.comm.recorder import Call
from nanotrain.config.config import Config
from nanotrain.config.schedules import num_microbatches, with_batch_size
from nanotrain.config.schema import with_values
from nanotrain.config.tables import read_table
from nanotrain.dry_run.agreement import disagreements, full_calls
from nanotrain.dry_run.rank import RankRecord, run_rank
from nanotrain.dry_run.rank_classes import RankClasses
from nanotrain.parallel.dp.layout import BucketLayout
from nanotrain.parallel.pp.transfers import RankPlan, plan_rank
from nanotrain.plan.memory_plan import train_schedule
from nanotrain.plan.plan import plan_run
from nanotrain.plan.traffic import sent_bytes
from nanotrain.quantities import count_of, describe_bytes, table_lines
from nanotrain.spec.boxes import Box
from nanotrain.topology.groups import GroupName
from nanotrain.topology.topology import Topology

# Memory besides the planned buffers: scalars, statistics of routers, and the ends of the
# allocator's blocks.
SMALL_BYTES = 2 * 2**20
PEAK_SHARE = 0.1  # the planned peak is an estimate (docs/memory.md)
FEWEST = 3  # microbatches: the first, the last and one between
MAX_FAULTS = 12  # that are printed
MAX_ROWS = 4  # ranks whose memory is printed
MEMORY = ["memory", "planned", "reached", "peak planned", "peak reached", "a save writes"]
DENSE_AXES: tuple[GroupName, ...] = ("tp", "cp", "dp", "pp")
EXPERT_AXES: tuple[GroupName, ...] = ("ep", "etp")


class GroupRow(NamedTuple):
    """Calls over a group in a step of one rank."""

    num_bytes: int
    num_calls: int
    operations: list[str]  # with their counts, the most frequent first
    size: int  # ranks of the group

    def cells(self, name: str) -> list[str]:
        """A line of the table."""
        sizes = [f"{self.size:,}", f"{self.num_calls:,}", describe_bytes(self.num_bytes)]
        return [name, *sizes, ", ".join(self.operations)]


@dataclass(frozen=True)
class DryRun:
    """Records of the ranks that were run, and the faults that were found."""

    config: Config
    topology: Topology
    records: dict[int, RankRecord]  # by rank
    steps: dict[int, list[Call]]  # calls of a step with all microbatches, by rank
    faults: list[str]

    def text(self) -> str:
        """The report, which fits a screen."""
        groups = [["group", "ranks", "calls", "bytes", "operations"], *self._group_lines()]
        largest = nlargest(MAX_ROWS, self.records.values(), key=lambda record: record.peak)
        memory = [MEMORY, *(self._memory_line(record) for record in largest)]
        lines = [
            *self._size_lines(),
            "",
            *table_lines(groups, right=(1, 2, 3)),
            "",
            *table_lines(memory, right=range(1, 6)),
            "",
        ]
        if not self.faults:
            lines.append(self._agreement())
        lines += [f"error: {fault}" for fault in self.faults[:MAX_FAULTS]]
        if len(self.faults) > MAX_FAULTS:
            lines.append(f"and {len(self.faults) - MAX_FAULTS} more")
        return "\n".join(lines)

    def _size_lines(self) -> list[str]:
        """Ranks, groups and microbatches, and how many of them were run."""
        has_experts = self.config.model.moe is not None
        axes = (*DENSE_AXES, *EXPERT_AXES) if has_experts else DENSE_AXES
        size = self.topology.size
        sizes = [f"{axis} {size(axis)}" for axis in axes if size(axis) > 1]
        ranks = count_of(self.topology.world_size, "rank")
        num_planned = num_microbatches(self.config.train, size("dp"))
        run = max((record.plan.num_microbatches for record in self.records.values()), default=0)
        microbatches = f"{count_of(num_planned, 'microbatch')}: {run} run"
        if run < num_planned:
            microbatches += ", which stand for the others"
        lines = [f"{ranks}: {' '.join(sizes) or 'one'}; {len(self.records)} run", microbatches]
        if has_experts:
            lines.append("experts: all get equally many tokens")
        return lines

    def _agreement(self) -> str:
        """The line of a dry run without faults."""
        shares = [record.peak / record.planned.peak for record in self.records.values()]
        agree = "on this rank alone"
        if len(shares) > 1:
            agree = "all members of a group agree, all messages are received"
        used = f"{min(shares):.1%} to {max(shares):.1%} of the planned memory is used"
        return f"no fault: {agree}, no buffer is reused; {used}"

    def _memory_line(self, record: RankRecord) -> list[str]:
        """Planned and reached memory of a rank, and the size of a save."""
        rank = record.plan.rank
        sizes = [
            record.planned.resident,
            record.resident,
            record.planned.peak,
            record.peak,
            sum(record.saved.values()),
        ]
        name = f"rank {rank} {self.topology.coords_text(rank)}".rstrip()
        return [name, *(describe_bytes(size) for size in sizes)]

    def _group_lines(self) -> Iterator[list[str]]:
        """Calls and bytes in a step by group, of the rank with the most."""
        most: dict[str, GroupRow] = {}
        for rank, record in self.records.items():
            for spec in record.distinct_groups:
                calls = [call for call in self.steps[rank] if call.ranks == spec.ranks]
                row = _group_row(calls, size=spec.size)
                most[spec.name] = max(most.get(spec.name, row), row)
        for name, row in most.items():
            if row.num_calls:
                yield row.cells(name)


def _group_row(calls: Sequence[Call], *, size: int) -> GroupRow:
    """The calls of a rank over one group."""
    counts = Counter(call.op for call in calls)
    return GroupRow(
        num_bytes=sum(call.num_bytes for call in calls),
        num_calls=len(calls),
        operations=[f"{op} {count:,}" for op, count in counts.most_common()],
        size=size,
    )


def dry_run(config: Config, world_size: int, *, rank: int | None = None) -> DryRun:
    """Run one rank of each class of equal ranks, and compare their communication.

    Args:
        config: a validated configuration with the vocabulary size set.
        world_size: ranks of the run.
        rank: the only rank to run; None for the ranks of all classes.
    """
    config = with_values(config, read_table("settings", folder=Path(__file__).parent))
    topology = Topology.of(config.parallel, world_size, has_experts=config.model.moe is not None)
    classes = RankClasses(config, topology)
    firsts = [rank] if rank is not None else classes.first_ranks
    others = [] if rank is not None else classes.other_ranks
    records: dict[int, RankRecord] = {}
    faults: list[str] = []
    shapes: dict[object, object] = {}
    several = _with_few_microbatches(config, topology)
    fewest = _with_few_microbatches(config, topology, fewest=True)
    for chosen in [*firsts, *others]:
        few = several if chosen in firsts else fewest
        try:
            records[chosen] = run_rank(plan_run(few, world_size, rank=chosen), shapes=shapes)
        except Exception as error:  # any error of the code that is run
            faults.append(_describe_stop(chosen, error, topology=topology))
    steps = _full_steps(records, config=config, world_size=world_size)
    for ranks in (firsts, others):  # first the calls that were run
        faults += disagreements(records, _run_calls(records, ranks), classes=classes)
    replayed = disagreements(records, steps, classes=classes)
    faults += [fault for fault in replayed if fault not in faults]
    if len(records) == world_size:
        faults += _save_faults(records)
    for record in records.values():
        faults += [*_traffic_faults(record), *_memory_faults(record)]
    return DryRun(config, topology, records, steps, faults)


def _run_calls(records: Mapping[int, RankRecord], ranks: Sequence[int]) -> dict[int, list[Call]]:
    """Recorded calls of the build and of two steps, of ranks that did not stop."""
    calls = {}
    for rank in ranks:
        if rank in records:
            calls[rank] = [*records[rank].setup, *records[rank].step]
    return calls


def _full_steps(
    records: Mapping[int, RankRecord], *, config: Config, world_size: int
) -> dict[int, list[Call]]:
    """Calls of a step with all microbatches, by rank."""
    schedule = train_schedule(config, world_size)
    plans: dict[int, RankPlan] = {}  # by pipeline rank
    steps = {}
    for rank, record in records.items():
        if record.pp_index not in plans:
            plans[record.pp_index] = plan_rank(schedule, record.pp_index)
        steps[rank] = list(full_calls(record, plans[record.pp_index]))
    return steps


def _describe_stop(rank: int, error: Exception, *, topology: Topology) -> str:
    """A rank whose code has raised an error, with the innermost line of nanotrain."""
    who = f"rank {rank} ({topology.coords_text(rank)})"
    return f"{who} stops: {error or type(error).__name__} ({_innermost_line(error.__traceback__)})"


def _innermost_line(traceback: TracebackType | None) -> str:
    """The innermost line of nanotrain outside of the dry run."""
    lines = []
    for frame in extract_tb(traceback):
        if "/nanotrain/" in frame.filename and "/dry_run/" not in frame.filename:
            lines.append(f"{frame.filename}:{frame.lineno}")
    return lines[-1].rpartition("/nanotrain/")[2]


def _with_few_microbatches(config: Config, topology: Topology, *, fewest: bool = False) -> Config:
    """The configuration with enough microbatches for every part of its schedule, or the fewest."""
    dp = topology.size("dp")
    pp = topology.size("pp")
    count = num_microbatches(config.train, dp)
    if config.parallel.num_virtual_stages_per_pipeline_rank > 1:
        few = 2 * pp
    elif fewest:
        few = FEWEST
    elif config.parallel.pipeline_schedule == "gpipe":
        few = count  # it keeps all at once
    else:
        few = pp + 2
    return with_batch_size(config, config.train.micro_batch_size * dp * min(few, count))


def _save_faults(records: Mapping[int, RankRecord]) -> Iterator[str]:
    """Tensors of which the ranks together save some elements twice, or not at all."""
    boxes = defaultdict[tuple[str, tuple[int, ...]], list[Box]](list)
    for record in records.values():
        for box in record.saved:
            boxes[box.name, box.shape].append(box.box)
    for (name, shape), saved in boxes.items():
        fault = coverage_fault(shape, saved)
        if fault:
            yield f"a save does not cover {name} {list(shape)} exactly once: {fault}"


def _traffic_faults(record: RankRecord) -> Iterator[str]:
    """Groups over which a rank sends other bytes than planned."""
    for (name, op), planned in sent_bytes(record.plan).items():
        sent = record.sent[name, op]
        if sent == planned:
            continue
        group = record.plan.groups[cast(GroupName, name)]
        calls = [call for call in record.step if call.ranks == group.ranks and call.op == op]
        rank = record.plan.rank
        text = f"rank {rank} sends {sent:,} bytes by {op} over group {name} in a step"
        text += f", planned are {planned:,}"
        if calls:
            text += f"; the last one is at {calls[-1].place}"
        yield text + _missing_bucket(record, calls, group_name=name)


def _missing_bucket(record: RankRecord, calls: Sequence[Call], *, group_name: str) -> str:
    """The first bucket of a group that has fewer calls than other buckets; empty without one."""
    counts: Counter[int] = Counter()  # calls by their number of elements
    for call in calls:
        if not call.splits:
            counts[int(call.size.partition(" ")[0].replace(",", ""))] += 1
    buckets: list[BucketLayout] = []
    for buffer in record.plan.buffers:
        if group_name in (buffer.shard.name, buffer.replicate.name):
            buckets += buffer.layout.buckets
    expected = Counter(bucket.numel for bucket in buckets)
    most = max((counts[numel] / number for numel, number in expected.items()), default=0)
    for bucket in buckets:
        if counts[bucket.numel] < most * expected[bucket.numel]:
            name = bucket.params[0].name
            return f"; none for the bucket of {name} ({bucket.numel:,} elements)"
    return ""


def _memory_faults(record: RankRecord) -> Iterator[str]:
    """Memory that is not as planned."""
    planned = record.planned
    rank = f"rank {record.plan.rank}"
    if not 0 <= record.resident - planned.resident <= SMALL_BYTES:
        allocated = f"{rank} allocates {record.resident:,} bytes before the first step"
        yield f"{allocated}, planned are {planned.resident:,}"
    if abs(record.peak - planned.peak) > PEAK_SHARE * planned.peak:
        allocated = f"{rank} allocates {record.peak:,} bytes at the peak of a step"
        yield f"{allocated}, planned are {planned.peak:,}"
