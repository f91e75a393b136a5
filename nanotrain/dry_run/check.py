"""The dry run of a configuration: run ranks, compare them, and print one screen.

dry_run(config, world_size) -> DryRun.text(), DryRun.faults
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from heapq import nlargest
from pathlib import Path
from traceback import extract_tb
from typing import cast

from nanotrain.checkpoint.plan import coverage_fault
from nanotrain.comm.recorder import Call
from nanotrain.config.config import Config
from nanotrain.config.schedules import num_microbatches, with_batch_size
from nanotrain.config.schema import with_values
from nanotrain.config.tables import read_table
from nanotrain.dry_run.agreement import RankClasses, disagreements, full_calls
from nanotrain.dry_run.rank import RankRecord, run_rank
from nanotrain.parallel.pp.transfers import plan_rank
from nanotrain.plan.memory_plan import train_schedule
from nanotrain.plan.plan import plan_run
from nanotrain.plan.traffic import sent_bytes
from nanotrain.quantities import count_of, describe_bytes, table_lines
from nanotrain.spec.boxes import Box
from nanotrain.topology.groups import GroupName
from nanotrain.topology.topology import Topology

# Beside the planned buffers: scalars, statistics of routers, and the ends of the allocator's
# blocks.
SMALL_BYTES = 2 * 2**20
PEAK_SHARE = 0.1  # the planned peak is an estimate (docs/memory.md)
FEWEST = 3  # microbatches: the first, the last and one between
MAX_FAULTS, MAX_ROWS = 12, 4  # that are printed
MEMORY = ["memory", "planned", "reached", "peak planned", "peak reached", "a save writes"]
AXES: tuple[GroupName, ...] = ("tp", "cp", "dp", "pp", "ep", "etp")


@dataclass(frozen=True)
class DryRun:
    """What the ranks did that were run, and what is wrong."""

    config: Config
    topology: Topology
    records: dict[int, RankRecord]  # by rank
    steps: dict[int, list[Call]]  # calls of a step with all microbatches, by rank
    faults: list[str]

    def text(self) -> str:
        """One screen."""
        size, has_experts = self.topology.size, self.config.model.moe is not None
        sizes = [
            f"{axis} {size(axis)}" for axis in AXES[: 6 if has_experts else 4] if size(axis) > 1
        ]
        number = num_microbatches(self.config.train, size("dp"))
        run = max((record.plan.num_microbatches for record in self.records.values()), default=0)
        largest = nlargest(MAX_ROWS, self.records.values(), key=lambda record: record.peak)
        lines = [
            f"{count_of(self.topology.world_size, 'rank')}: {' '.join(sizes) or 'one'}; {len(self.records)} run",
            f"{count_of(number, 'microbatch')}: {run} run"
            + ", which stand for the others" * (run < number),
            *["experts: all get equally many tokens"] * has_experts,
            "",
            *table_lines(
                [["group", "ranks", "calls", "bytes", "operations"], *self._groups()],
                right=(1, 2, 3),
            ),
            "",
            *table_lines([MEMORY, *map(self._memory, largest)], right=range(1, 6)),
            "",
            *([f"error: {fault}" for fault in self.faults[:MAX_FAULTS]] or [self._agreement()]),
            *[f"and {len(self.faults) - MAX_FAULTS} more"] * (len(self.faults) > MAX_FAULTS),
        ]
        return "\n".join(lines)

    def _agreement(self) -> str:
        shares = [record.peak / record.planned[1] for record in self.records.values()]
        agree = (
            "all members of a group agree, all messages are received"
            if len(shares) > 1
            else "on this rank alone"
        )
        used = f"{min(shares):.1%} to {max(shares):.1%} of the planned memory is used"
        return f"no fault: {agree}, no buffer is reused; {used}"

    def _memory(self, record: RankRecord) -> list[str]:
        (resident, peak), rank = record.planned, record.plan.rank
        sizes = resident, record.resident, peak, record.peak, sum(record.saved.values())
        return [
            f"rank {rank} {self.topology.coords_text(rank)}".rstrip(),
            *map(describe_bytes, sizes),
        ]

    def _groups(self) -> Iterator[list[str]]:
        """Calls and bytes in a step, of the rank with the most, by group."""
        most: dict[str, tuple[int, int, list[str]]] = {}
        for rank, record in self.records.items():
            for ranks, spec in {
                spec.ranks: spec for spec in reversed([*record.plan.groups.values()])
            }.items():
                calls = [call for call in self.steps[rank] if call.ranks == ranks]
                operations = [
                    f"{op} {count:,}"
                    for op, count in Counter(call.op for call in calls).most_common()
                ]
                row = (
                    sum(call.num_bytes for call in calls),
                    len(calls),
                    [spec.name, f"{spec.size:,}", *operations],
                )
                most[spec.name] = max(most.get(spec.name, row), row)
        for num_bytes, number, (name, size, *operations) in most.values():
            if number:
                yield [name, size, f"{number:,}", describe_bytes(num_bytes), ", ".join(operations)]


def dry_run(config: Config, world_size: int, *, rank: int | None = None) -> DryRun:
    """Run the ranks that stand for all, and compare them.

    Args:
        config: a validated configuration with the vocabulary size set.
        world_size: ranks of the run.
        rank: the only rank to run; None for those of all classes.
    """
    config = with_values(config, read_table("settings", folder=Path(__file__).parent))
    topology = Topology.of(config.parallel, world_size, has_experts=config.model.moe is not None)
    classes, schedule = RankClasses(config, topology), train_schedule(config, world_size)
    firsts, others = classes.run_ranks if rank is None else ([rank], [])
    records: dict[int, RankRecord] = {}
    shapes: dict[object, object] = {}
    faults: list[str] = []
    for ranks, few in (
        (firsts, _few(config, topology)),
        (others, _few(config, topology, fewest=True)),
    ):
        for each in ranks:
            try:
                records[each] = run_rank(plan_run(few, world_size, rank=each), shapes=shapes)
            except Exception as error:  # of the code that is run
                frames = [
                    f"{frame.filename}:{frame.lineno}" for frame in extract_tb(error.__traceback__)
                ]
                place = [
                    frame for frame in frames if "/nanotrain/" in frame and "/dry_run/" not in frame
                ][-1]
                place = place.rpartition("/nanotrain/")[2]
                faults.append(
                    f"rank {each} ({topology.coords_text(each)}) stops: {error or type(error).__name__} ({place})"
                )
    plans = {index: plan_rank(schedule, index) for index in {r.pp_index for r in records.values()}}
    steps = {
        each: [*full_calls(record, plans[record.pp_index])] for each, record in records.items()
    }
    find = partial(disagreements, records, classes=classes)
    for ranks in (firsts, others):  # what was run, then what is replayed
        faults += find(
            {each: [*records[each].setup, *records[each].step] for each in ranks if each in records}
        )
    faults += [text for text in find(steps) if text not in faults]
    if len(records) == world_size:
        faults += _save_faults(records)
    for record in records.values():
        faults += [*_traffic_faults(record), *_memory_faults(record)]
    return DryRun(config, topology, records, steps, faults)


def _few(config: Config, topology: Topology, *, fewest: bool = False) -> Config:
    """The configuration with as many microbatches as show every part of its schedule, or with the
    fewest.
    """
    train, dp, pp = config.train, topology.size("dp"), topology.size("pp")
    number = num_microbatches(train, dp)
    # gpipe keeps all at once
    enough = number if config.parallel.pipeline_schedule == "gpipe" else pp + 2
    few = FEWEST if fewest else enough
    if config.parallel.num_virtual_stages_per_pipeline_rank > 1:
        few = 2 * pp
    return with_batch_size(config, train.micro_batch_size * dp * min(few, number))


def _save_faults(records: Mapping[int, RankRecord]) -> Iterator[str]:
    """Tensors of which the ranks together save some elements twice, or not at all."""
    boxes = defaultdict[tuple[str, tuple[int, ...]], list[Box]](list)
    for box in (box for record in records.values() for box in record.saved):
        boxes[box.name, box.shape].append(box.box)
    for (name, shape), saved in boxes.items():
        if fault := coverage_fault(shape, saved):
            yield f"a save does not cover {name} {list(shape)} exactly once: {fault}"


def _traffic_faults(record: RankRecord) -> Iterator[str]:
    """Groups over which a rank sends other bytes than planned."""
    for (name, op), planned in sent_bytes(record.plan).items():
        if record.sent[name, op] == planned:
            continue
        group = record.plan.groups[cast(GroupName, name)]
        calls = [call for call in record.step if (call.ranks, call.op) == (group.ranks, op)]
        counts = Counter(
            int(call.size.partition(" ")[0].replace(",", "")) for call in calls if not call.splits
        )
        buffers = [
            buffer
            for buffer in record.plan.buffers
            if name in (buffer.shard.name, buffer.replicate.name)
        ]
        buckets = [bucket for buffer in buffers for bucket in buffer.layout.buckets]
        expected = Counter(bucket.numel for bucket in buckets)
        most = max((counts[numel] / number for numel, number in expected.items()), default=0)
        missing = [b for b in buckets if counts[b.numel] < most * expected[b.numel]]
        text = f"rank {record.plan.rank} sends {record.sent[name, op]:,} bytes by {op} over group {name} in a step, "
        text += f"planned are {planned:,}" + (
            f"; the last one is at {calls[-1].place}" if calls else ""
        )
        yield text + "".join(
            f"; none for the bucket of {b.params[0].name} ({b.numel:,} elements)"
            for b in missing[:1]
        )


def _memory_faults(record: RankRecord) -> Iterator[str]:
    """Bytes that are not as planned."""
    name, (resident, peak) = f"rank {record.plan.rank} allocates", record.planned
    if not 0 <= record.resident - resident <= SMALL_BYTES:
        yield f"{name} {record.resident:,} bytes before the first step, planned are {resident:,}"
    if abs(record.peak - peak) > PEAK_SHARE * peak:
        yield f"{name} {record.peak:,} bytes at the peak of a step, planned are {peak:,}"
