"""Layout of the flat buffers: elements of each parameter and elements that each rank updates.

Everything here is pure and frozen: a layout needs no process group, module or device.

Parameters are laid out in reverse registration order, the order in which the backward pass produces
gradients. A parameter starts at a multiple of 64 elements; a bucket's end is padded so that all
shards have equal length.

    bucket 0                         bucket 1
    |param |..|param|param |pppp|    |param         |param|.|param|pp|       . alignment, p padding
    |shard 0  |shard 1  |shard 2|    |shard 0  |shard 1  |shard 2    |

Four index spaces, all counted in elements:

    in the buffer     0 is the buffer's first element; buckets and bucket params are given in it
    in the bucket     0 is the bucket's first element
    in the shard      0 is the first element of one rank's shard of one bucket
    in the parameter  0 is the local parameter's first element, row-major

Source: Megatron-LM core 0.20, `param_and_grad_buffer.py`; checked against its worked examples.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from nanotrain.quantities import round_up
from nanotrain.spec.boxes import TensorBox, flat_range_to_boxes
from nanotrain.spec.params import LocalParam

PARAM_ALIGNMENT = 64
BUCKET_ALIGNMENT = 128
HIGH_BUSBW_ALIGNMENT = 65536
MIN_DEFAULT_BUCKET_SIZE = 40_000_000
DEFAULT_BUCKET_SIZE_PER_SHARD = 1_000_000


@dataclass(frozen=True)
class LayoutRules:
    """Rules that decide where buckets end."""

    num_shards: int = 1  # ranks that a bucket is sharded over
    num_outer_shards: int = 1  # instances that a shard is sharded over in turn
    bucket_size: int | None = None  # elements after which a bucket closes; None for the default
    pad_for_high_busbw: bool = False  # pad bucket ends to a multiple of 65536 elements
    # also close a bucket where the FSDP unit changes, so that no bucket spans two units
    gathers_by_unit: bool = False
    keeps_units: bool = False  # close a bucket nowhere else, so that a unit lies in one bucket

    @property
    def closing_size(self) -> int:
        """Elements that close a bucket."""
        default = max(MIN_DEFAULT_BUCKET_SIZE, DEFAULT_BUCKET_SIZE_PER_SHARD * self.num_shards)
        return self.bucket_size or default

    @property
    def bucket_alignment(self) -> int:
        """Divisor of every bucket end, in elements."""
        alignment = math.lcm(self.num_shards * self.num_outer_shards, BUCKET_ALIGNMENT)
        if self.pad_for_high_busbw:
            alignment = math.lcm(alignment, HIGH_BUSBW_ALIGNMENT)
        return alignment


@dataclass(frozen=True)
class FlatRange:
    """Consecutive elements of a local parameter in a flat tensor (buffer, bucket or shard)."""

    param: LocalParam
    start: int  # first element in the flat tensor
    param_start: int  # first element in the local parameter
    numel: int  # number of elements

    @property
    def stop(self) -> int:
        """Element of the flat tensor after the last one."""
        return self.start + self.numel

    @cached_property
    def elements(self) -> slice:
        """The elements of the flat tensor."""
        return slice(self.start, self.stop)

    @property
    def name(self) -> str:
        """Global name of the parameter."""
        return self.param.spec.name

    def boxes(self, name: str) -> Iterator[TensorBox]:
        """The elements as boxes of the global tensor `name`, in their order."""
        local = self.param
        stop = self.param_start + self.numel
        for box in flat_range_to_boxes(local.box.shape, start=self.param_start, stop=stop):
            yield TensorBox(name, local.spec.shape, box.shifted(local.box.start))


def clip_ranges(ranges: Iterable[FlatRange], *, start: int, stop: int) -> Iterator[FlatRange]:
    """The nonempty parts of ranges inside elements [start, stop) of their flat tensor."""
    for whole in ranges:
        first = max(whole.start, start)
        last = min(whole.stop, stop)
        if first < last:
            param_start = whole.param_start + first - whole.start
            yield FlatRange(whole.param, first, param_start, last - first)


@dataclass(frozen=True)
class BucketLayout:
    """Parameters that are reduced and gathered together: elements [start, stop) of the buffer."""

    start: int
    stop: int
    params: tuple[FlatRange, ...]
    num_shards: int
    num_outer_shards: int = 1

    @property
    def numel(self) -> int:
        """Elements with padding."""
        return self.stop - self.start

    @property
    def is_shared(self) -> bool:
        """Whether the bucket holds a parameter that several units read."""
        return self.params[0].param.spec.is_shared

    @property
    def names(self) -> set[str]:
        """Global names of the parameters."""
        return {entry.name for entry in self.params}

    @property
    def units(self) -> set[str]:
        """FSDP units of the parameters."""
        return {entry.param.spec.unit for entry in self.params}

    @property
    def shard_numel(self) -> int:
        """Elements per shard."""
        return self.numel // self.num_shards

    @property
    def update_numel(self) -> int:
        """Elements that the optimizer of one rank updates: its shard, or a slice of the shard."""
        return self.shard_numel // self.num_outer_shards

    def update_ranges(self, shard_index: int, *, outer_index: int = 0) -> tuple[FlatRange, ...]:
        """The param ranges that one rank's optimizer updates, counted from the first one."""
        first = self.start + shard_index * self.shard_numel + outer_index * self.update_numel
        updated = clip_ranges(self.params, start=first, stop=first + self.update_numel)
        return tuple(replace(part, start=part.start - first) for part in updated)


@dataclass(frozen=True)
class GatherBlocks:
    """Blocks of memory that the gathered units of a buffer share, one after the other."""

    numel: dict[str, int]  # elements of every block, by name
    buckets: tuple["BlockRange", ...]  # range of the blocks per bucket


class BlockRange(NamedTuple):
    """The position of a gathered bucket in a shared block."""

    block: str  # name of the block
    start: int  # first element in the block


@dataclass(frozen=True)
class BufferLayout:
    """The buckets of one buffer, contiguous from element 0."""

    buckets: tuple[BucketLayout, ...]

    @property
    def numel(self) -> int:
        """Elements of the buffer with padding."""
        return self.buckets[-1].stop if self.buckets else 0

    @property
    def is_trainable(self) -> bool:
        """Whether its parameters have gradients; a buffer holds frozen ones or none."""
        return all(param.spec.is_trainable for param in self.params)

    @property
    def num_outer_shards(self) -> int:
        """Instances that a shard is sharded over."""
        return self.buckets[0].num_outer_shards if self.buckets else 1

    @property
    def units_in_one_bucket(self) -> set[str]:
        """FSDP units whose parameters are all in one bucket."""
        counts = Counter(unit for bucket in self.buckets for unit in bucket.units)
        return {unit for unit, count in counts.items() if count == 1}

    @property
    def numel_of_units(self) -> dict[str, int]:
        """Elements with padding by FSDP unit, where no bucket spans two units."""
        numel: Counter[str] = Counter()
        for bucket in self.buckets:
            for unit in bucket.units:
                numel[unit] += bucket.numel
        return dict(numel)

    def gather_blocks(self, num_blocks: int) -> GatherBlocks:
        """Assign the units to blocks round-robin in forward order.

        `num_blocks` successive units have different blocks. A parameter that several units read has
        its own block.
        """
        block_of_unit: dict[str, str] = {}
        filled: Counter[str] = Counter()  # elements by unit
        numel: dict[str, int] = {}
        ranges = []
        for bucket in reversed(self.buckets):
            (unit,) = bucket.units
            if bucket.is_shared:
                unit = f"shared {unit}"
                block = unit
            else:
                next_block = str(len(block_of_unit) % num_blocks)
                block = block_of_unit.setdefault(unit, next_block)
            start = filled[unit]
            filled[unit] += bucket.numel
            ranges.append(BlockRange(block, start))
            numel[block] = max(numel.get(block, 0), start + bucket.numel)
        return GatherBlocks(numel, tuple(reversed(ranges)))

    @property
    def open_numel(self) -> int:
        """The most elements of gradients that are open at a time: of two successive buckets."""
        neighbors = [first.numel + second.numel for first, second in pairwise(self.buckets)]
        return max(neighbors, default=self.numel)

    @property
    def open_starts(self) -> tuple[int, ...]:
        """Per bucket its first element in memory of `open_numel` elements.

        Buckets lie in turn at the start of the memory and at its end.
        """
        starts = []
        for index, bucket in enumerate(self.buckets):
            is_at_end = index % 2 == 1
            starts.append(self.open_numel - bucket.numel if is_at_end else 0)
        return tuple(starts)

    @property
    def params(self) -> tuple[LocalParam, ...]:
        """All parameters in registration order."""
        entries = [entry for bucket in self.buckets for entry in bucket.params]
        return tuple(entry.param for entry in reversed(entries))


def plan_layout(params: Sequence[LocalParam], rules: LayoutRules) -> BufferLayout:
    """Assign the parameters of one buffer to buckets.

    A parameter that several units read has its own bucket: the gradient of a word embedding is
    summed over the embed group after the reduce-scatter, so the first and the last stage must shard
    it in the same way.

    Args:
        params: this rank's parameters of one buffer, in registration order.
        rules: number of shards, bucket size, paddings, unit borders.
    """
    open_bucket = _OpenBucket(rules)
    buckets: list[BucketLayout] = []
    for param in reversed(params):
        if open_bucket.closes_before(param):
            buckets.append(open_bucket.close())
        open_bucket.add(param)
        if open_bucket.closes_after(param):
            buckets.append(open_bucket.close())
    if open_bucket.params:
        buckets.append(open_bucket.close())
    return BufferLayout(tuple(buckets))


class _OpenBucket:
    """The bucket that `plan_layout` is filling."""

    def __init__(self, rules: LayoutRules) -> None:
        self.rules = rules
        self.start = 0
        self.params: list[FlatRange] = []

    @property
    def is_full(self) -> bool:
        return self.params[-1].stop - self.start >= self.rules.closing_size

    def closes_before(self, param: LocalParam) -> bool:
        """Whether `param` begins a new bucket; buckets close at borders of units or around shared
        parameters.
        """
        if not self.params:
            return False
        if param.spec.is_shared:
            return True
        enters_unit = param.spec.unit != self.params[-1].param.spec.unit
        return enters_unit and (self.rules.gathers_by_unit or self.is_full)

    def closes_after(self, param: LocalParam) -> bool:
        """Whether the bucket ends with the parameter that was just added."""
        return param.spec.is_shared or (self.is_full and not self.rules.keeps_units)

    def add(self, param: LocalParam) -> None:
        """Append a parameter, at the next aligned element."""
        start = self.start
        if self.params:
            start = round_up(self.params[-1].stop, PARAM_ALIGNMENT)
        self.params.append(FlatRange(param, start, 0, param.box.numel))

    def close(self) -> BucketLayout:
        """The finished bucket; the next one begins at its end."""
        stop = round_up(self.params[-1].stop, self.rules.bucket_alignment)
        bucket = BucketLayout(
            self.start,
            stop,
            tuple(self.params),
            self.rules.num_shards,
            self.rules.num_outer_shards,
        )
        self.start = stop
        self.params = []
        return bucket
