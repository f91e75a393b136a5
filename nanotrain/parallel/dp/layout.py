"""Where each parameter lies in the flat buffers, and which part of them each shard rank owns: pure and frozen.

Parameters lie in reverse registration order, the order in which the backward pass makes their gradients ready.
A slot starts at a multiple of 64 elements; a bucket's end is padded so that every shard rank owns an equal part.

    bucket 0                         bucket 1
    |slot  |..|slot |slot  |pppp|    |slot          |slot |.|slot|pp|        . alignment   p padding
    |shard 0  |shard 1  |shard 2|    |shard 0  |shard 1  |shard 2   |

Four index spaces, all counted in elements:

    in the buffer     0 at the buffer's first element; slots and buckets are given in it
    in the bucket     0 at the bucket's first element
    in my shard       0 at the first element of my part of one bucket
    in the parameter  0 at the parameter's first element, row-major

Source: Megatron-LM core 0.20, `param_and_grad_buffer.py`; checked against its worked examples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nanotrain.topology.params import LocalParam

SLOT_ALIGNMENT = 64
BUCKET_ALIGNMENT = 128
HIGH_BUSBW_ALIGNMENT = 65536
MIN_DEFAULT_BUCKET_SIZE = 40_000_000
DEFAULT_BUCKET_SIZE_PER_SHARD = 1_000_000


@dataclass(frozen=True)
class LayoutRules:
    """What decides where buckets end.

    Attributes:
        num_shards: ranks that a bucket is cut among.
        bucket_size: elements after which a bucket closes; None for the default.
        pad_for_high_busbw: pad bucket ends to a multiple of 65536 elements.
    """

    num_shards: int = 1
    bucket_size: int | None = None
    pad_for_high_busbw: bool = False

    @property
    def closing_size(self) -> int:
        """Elements that close a bucket."""
        default = max(MIN_DEFAULT_BUCKET_SIZE, DEFAULT_BUCKET_SIZE_PER_SHARD * self.num_shards)
        return self.bucket_size or default

    @property
    def bucket_alignment(self) -> int:
        """What the end of a bucket is a multiple of, in elements."""
        return math.lcm(self.num_shards, BUCKET_ALIGNMENT, HIGH_BUSBW_ALIGNMENT if self.pad_for_high_busbw else 1)


@dataclass(frozen=True)
class Slot:
    """A parameter's place in the buffer: elements [start, stop)."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class ShardPiece:
    """The part of one parameter that lies in one rank's shard of a bucket.

    Attributes:
        name: the parameter.
        shard_start: where the piece begins in my shard.
        param_start: where it begins in the parameter.
        numel: its length.
    """

    name: str
    shard_start: int
    param_start: int
    numel: int


@dataclass(frozen=True)
class BucketLayout:
    """A run of slots that is reduced and gathered as one, elements [start, stop) of the buffer."""

    start: int
    stop: int
    slots: tuple[Slot, ...]
    num_shards: int

    @property
    def numel(self) -> int:
        """Elements with padding."""
        return self.stop - self.start

    @property
    def unpadded_numel(self) -> int:
        """Elements up to the end of the last slot."""
        return self.slots[-1].stop - self.start

    @property
    def shard_numel(self) -> int:
        """Elements that each shard rank owns."""
        return self.numel // self.num_shards

    def pieces(self, shard_index: int) -> tuple[ShardPiece, ...]:
        """The parts of parameters that a shard rank owns, in the order in which they lie."""
        first = self.start + shard_index * self.shard_numel
        last = first + self.shard_numel
        found = []
        for slot in self.slots:
            start, stop = max(slot.start, first), min(slot.stop, last)
            if start < stop:
                found.append(ShardPiece(slot.name, start - first, start - slot.start, stop - start))
        return tuple(found)


@dataclass(frozen=True)
class BufferLayout:
    """The buckets of one buffer, back to back from element 0."""

    buckets: tuple[BucketLayout, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole buffer with padding."""
        return self.buckets[-1].stop if self.buckets else 0


def plan_layout(params: Sequence[LocalParam], rules: LayoutRules) -> BufferLayout:
    """Lay parameters into buckets.

    Args:
        params: what this rank holds of each parameter of one buffer, in registration order.
        rules: shard count, bucket size and paddings.

    A tied embedding sits alone in its bucket: its gradient is summed between the first and the last stage after
    the reduce-scatter, so both stages must cut it alike.
    """
    buckets: list[BucketLayout] = []
    slots: list[Slot] = []
    bucket_start = 0

    def close_bucket() -> int:
        end = _round_up(slots[-1].stop, rules.bucket_alignment)
        buckets.append(BucketLayout(bucket_start, end, tuple(slots), rules.num_shards))
        slots.clear()
        return end

    for param in reversed(params):
        if param.spec.is_tied and slots:
            bucket_start = close_bucket()
        start = _round_up(slots[-1].stop, SLOT_ALIGNMENT) if slots else bucket_start
        slots.append(Slot(param.spec.name, start, start + param.box.numel))
        if param.spec.is_tied or slots[-1].stop - bucket_start >= rules.closing_size:
            bucket_start = close_bucket()
    if slots:
        close_bucket()
    return BufferLayout(tuple(buckets))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
