"""Layout of the flat buffers: which elements hold each parameter, and which elements each shard
rank updates.

Everything here is pure and frozen: a layout needs no process group, module or device.

Parameters are laid out in reverse registration order, the order in which the backward pass produces
gradients. A parameter starts at a multiple of 64 elements; a bucket's end is padded so that all
shards have equal length.

    bucket 0                         bucket 1
    |param |..|param|param |pppp|    |param         |param|.|param|pp|       . alignment   p padding
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
from itertools import pairwise

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
        return math.lcm(
            self.num_shards * self.num_outer_shards,
            BUCKET_ALIGNMENT,
            HIGH_BUSBW_ALIGNMENT if self.pad_for_high_busbw else 1,
        )


@dataclass(frozen=True)
class FlatRange:
    """Consecutive elements of a local parameter in a flat tensor: the buffer, a bucket or a shard."""

    param: LocalParam
    start: int  # first element in the flat tensor
    param_start: int  # first element in the local parameter
    numel: int  # number of elements

    @property
    def stop(self) -> int:
        """Element of the flat tensor after the last one."""
        return self.start + self.numel

    @property
    def elements(self) -> slice:
        """The elements of the flat tensor."""
        return slice(self.start, self.stop)

    @property
    def name(self) -> str:
        """Global name of the parameter."""
        return self.param.spec.name

    def boxes(self, name: str) -> Iterator[TensorBox]:
        """The elements as boxes of the global tensor `name`, in their order."""
        local, stop = self.param, self.param_start + self.numel
        for box in flat_range_to_boxes(local.box.shape, start=self.param_start, stop=stop):
            yield TensorBox(name, local.spec.shape, box.shifted(local.box.start))


def clip_ranges(ranges: Iterable[FlatRange], *, start: int, stop: int) -> Iterator[FlatRange]:
    """The parts of ranges inside elements [start, stop) of their flat tensor, without empty ones."""
    for each in ranges:
        first, last = max(each.start, start), min(each.stop, stop)
        if first < last:
            yield FlatRange(each.param, first, each.param_start + first - each.start, last - first)


@dataclass(frozen=True)
class BucketLayout:
    """Consecutive parameters that are reduced and all-gathered together, elements [start, stop) of
    the buffer.
    """

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
        """Whether it holds a parameter that several units read."""
        return self.params[0].param.spec.is_shared

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
        """Elements that one rank's optimizer updates: a shard, or the part of it that is this
        instance's.
        """
        return self.shard_numel // self.num_outer_shards

    def update_ranges(self, shard_index: int, *, outer_index: int = 0) -> tuple[FlatRange, ...]:
        """The param ranges that one rank's optimizer updates; starts count from the first such
        element.
        """
        first = self.start + shard_index * self.shard_numel + outer_index * self.update_numel
        inside = clip_ranges(self.params, start=first, stop=first + self.update_numel)
        return tuple(replace(each, start=each.start - first) for each in inside)


@dataclass(frozen=True)
class GatherBlocks:
    """Blocks of memory that the gathered units of a buffer share: unit after unit uses the next
    block.
    """

    numel: dict[str, int]  # elements of every block, by name
    # per bucket: name of its block and its first element in the block
    places: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class BufferLayout:
    """The buckets of one buffer, contiguous from element 0."""

    buckets: tuple[BucketLayout, ...]

    @property
    def numel(self) -> int:
        """Elements of the buffer with padding."""
        return self.buckets[-1].stop if self.buckets else 0

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
        """Assign the units to blocks round-robin in forward order: `num_blocks` successive units
        have different blocks.

        A parameter that several units read has its own block.
        """
        turn: dict[str, str] = {}  # unit -> block
        filled: Counter[str] = Counter()  # elements by unit
        numel: dict[str, int] = {}
        places = []
        for bucket in reversed(self.buckets):
            (unit,) = bucket.units
            block, start = f"shared {unit}", 0
            if not bucket.is_shared:
                block, start = turn.setdefault(unit, str(len(turn) % num_blocks)), filled[unit]
                filled[unit] += bucket.numel
            places.append((block, start))
            numel[block] = max(numel.get(block, 0), start + bucket.numel)
        return GatherBlocks(numel, tuple(reversed(places)))

    @property
    def open_numel(self) -> int:
        """Elements of the two successive buckets that are the largest."""
        return max(
            (first.numel + second.numel for first, second in pairwise(self.buckets)),
            default=self.numel,
        )

    @property
    def open_starts(self) -> tuple[int, ...]:
        """Per bucket its first element in memory of `open_numel` elements: in turn from its start
        and up to its end.
        """
        return tuple((self.open_numel - b.numel) * (i % 2) for i, b in enumerate(self.buckets))

    @property
    def params(self) -> tuple[LocalParam, ...]:
        """All parameters in registration order."""
        return tuple(
            entry.param for bucket in reversed(self.buckets) for entry in reversed(bucket.params)
        )


def plan_layout(params: Sequence[LocalParam], rules: LayoutRules) -> BufferLayout:
    """Assign the parameters of one buffer to buckets.

    A parameter that several units read has its own bucket: the gradient of a word embedding is
    summed over the embed group after the reduce-scatter, so the first and the last stage must shard
    it in the same way.

    Args:
        params: this rank's parameters of one buffer, in registration order.
        rules: number of shards, bucket size, paddings, unit borders.
    """
    buckets: list[BucketLayout] = []
    open_params: list[FlatRange] = []
    bucket_start = 0

    def close_bucket() -> int:
        end = round_up(open_params[-1].stop, rules.bucket_alignment)
        buckets.append(
            BucketLayout(
                bucket_start, end, tuple(open_params), rules.num_shards, rules.num_outer_shards
            )
        )
        open_params.clear()
        return end

    def is_full() -> bool:
        return open_params[-1].stop - bucket_start >= rules.closing_size

    for param in reversed(params):
        enters_unit = bool(open_params) and param.spec.unit != open_params[-1].param.spec.unit
        ends = enters_unit and (rules.gathers_by_unit or is_full())
        if open_params and (param.spec.is_shared or ends):
            bucket_start = close_bucket()
        start = round_up(open_params[-1].stop, PARAM_ALIGNMENT) if open_params else bucket_start
        open_params.append(FlatRange(param, start, 0, param.box.numel))
        if param.spec.is_shared or (is_full() and not rules.keeps_units):
            bucket_start = close_bucket()
    if open_params:
        close_bucket()
    return BufferLayout(tuple(buckets))
