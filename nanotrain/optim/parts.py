"""Parts of a shard: consecutive elements whose optimizer state is stored together. Pure.

    split_shard   the parts of what one rank updates of a bucket: its shard, or the part of it of its instance
    clip_range    the elements of a param range inside an interval
    ranges_to_save, range_boxes   what one of the ranks with the same shard writes to a checkpoint
    state_bytes   bytes of main params, state and average of parts

Parts cover the shard, gaps and padding included. Without a rule for matrices and without offload a shard is one part.

    shard                     |norm ..|query ..key ..value |norm ..|gate ..up ..down |ppp|     . gap  p padding
    with a rule for matrices  |  0    |        1           |   2   |         3           |
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch

from nanotrain.config.config import OptimConfig
from nanotrain.optim.rule import UpdateRule
from nanotrain.optim.stored import stored_bytes
from nanotrain.parallel.dp.layout import ShardRange
from nanotrain.precision.policy import Precision
from nanotrain.spec.boxes import TensorBox, flat_range_to_boxes


@dataclass(frozen=True)
class ShardPart:
    """Elements [start, stop) of a shard."""

    start: int
    stop: int
    ranges: tuple[ShardRange, ...]  # the params in it, in coordinates of the shard
    is_matrix: bool = False  # whether the rule for matrices updates it
    on_host: bool = False  # whether its main params and state are in host memory

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def state_names(self, rule: UpdateRule, config: OptimConfig) -> tuple[str, ...]:
        """Names of the state tensors per element."""
        if not self.is_matrix:
            return rule.state_names(config)
        assert rule.matrix is not None, "only such rules have parts of matrices"
        return rule.matrix.state_names


def split_shard(
    ranges: Iterable[ShardRange], numel: int, *, rule: UpdateRule, host_fraction: float = 0.0
) -> tuple[ShardPart, ...]:
    """The parts of a shard of `numel` elements with these param ranges, in order.

    State of the first `host_fraction` of the elements is in host memory; a part at the border is divided.
    """

    def is_matrix(part: ShardRange) -> bool:
        return rule.matrix is not None and part.param.spec.needs_whole_matrix

    kinds = [(kind, tuple(group)) for kind, group in groupby(ranges, key=is_matrix)]
    edges = [0, *(group[-1].elements.stop for _, group in kinds[:-1]), numel]
    parts = [
        ShardPart(start, stop, group, is_matrix=kind)
        for (kind, group), start, stop in zip(kinds or [(False, ())], edges[:-1], edges[1:], strict=True)
    ]
    border = int(numel * host_fraction)
    return tuple(divided for part in parts for divided in _divide(part, border=border))


def host_fraction(config: OptimConfig) -> float:
    """The fraction of each shard whose state is in host memory."""
    return config.optimizer_offload_fraction if config.optimizer_cpu_offload else 0.0


def clip_range(part: ShardRange, *, start: int, stop: int) -> ShardRange | None:
    """The elements of a param range inside [start, stop) of the shard, or None."""
    first, last = max(part.shard_start, start), min(part.elements.stop, stop)
    if first >= last:
        return None
    return ShardRange(part.param, first, part.param_start + first - part.shard_start, last - first)


def clip_ranges(parts: Iterable[ShardRange], *, start: int, stop: int) -> Iterator[ShardRange]:
    """`clip_range` of several, without those outside."""
    for part in parts:
        clipped = clip_range(part, start=start, stop=stop)
        if clipped is not None:
            yield clipped


def ranges_to_save(ranges: Iterable[ShardRange], replica: tuple[int, int]) -> list[ShardRange]:
    """This rank's share of every range to save: ranks with equal shards save nearly equal parts of it.

    Args:
        ranges: of the shard; only replica 0 of a parameter is saved.
        replica: index and number of the ranks with the same shard.
    """
    index, size = replica
    parts = []
    for full in ranges:
        if full.param.is_first_replica:
            first, last = full.numel * index // size, full.numel * (index + 1) // size
            parts.append(ShardRange(full.param, full.shard_start + first, full.param_start + first, last - first))
    return parts


def range_boxes(name: str, part: ShardRange) -> Iterator[TensorBox]:
    """A range as boxes of the global tensor `name`, in the order of its elements."""
    local = part.param
    for box in flat_range_to_boxes(local.box.shape, start=part.param_start, stop=part.param_start + part.numel):
        yield TensorBox(name, local.spec.shape, box.shifted(local.box.start))


def state_bytes(parts: Iterable[ShardPart], rule: UpdateRule, *, config: OptimConfig, precision: Precision) -> int:
    """Bytes on the device of the state, of the average, and of main params that are separate from the model params."""
    total = 0
    for part in parts:
        if part.on_host:
            continue
        names = part.state_names(rule, config)
        total += sum(stored_bytes(part.numel, precision.state_dtype(name)) for name in names)
        if config.ema_decay is not None:
            total += stored_bytes(part.numel, torch.float32)
        if precision.has_separate_main_params:
            total += stored_bytes(part.numel, precision.main)
    return total


def _divide(part: ShardPart, *, border: int) -> Iterator[ShardPart]:
    """The elements of a part before the border, on the host, and those from there on."""
    edges = [part.start, min(max(border, part.start), part.stop), part.stop]
    for start, stop, on_host in zip(edges[:-1], edges[1:], (True, False), strict=True):
        if start < stop:
            ranges = tuple(clip_ranges(part.ranges, start=start, stop=stop))
            yield ShardPart(start, stop, ranges, is_matrix=part.is_matrix, on_host=on_host)
