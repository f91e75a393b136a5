"""Frozen parameters in checkpoints: model params alone, in their dtype, without optimizer state."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from nanotrain.optim.state import Replica, ranges_to_save, tensors_of_range
from nanotrain.optim.stored import StoredTensor
from nanotrain.parallel.dp.bucket import ParamBucket
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.parallel.dp.layout import FlatRange
from nanotrain.parallel.dp.param_buffer import ParamBuffer
from nanotrain.spec.boxes import TensorBox


@dataclass(frozen=True)
class FrozenState:
    """The part of a bucket of frozen parameters that this rank loads and saves."""

    bucket: ParamBucket  # model params
    replica: Replica  # this rank among the ranks with the same part

    @property
    def ranges_to_save(self) -> list[FlatRange]:
        """The param ranges that this rank saves; every element is saved by one rank."""
        return ranges_to_save(self.bucket.update_ranges, self.replica)

    def tensors(
        self,
        ranges: Sequence[FlatRange],
        *,
        copies: list[tuple[StoredTensor, Tensor]],
        only: str | None = None,
    ) -> Iterator[tuple[TensorBox, Tensor]]:
        """Model params by their names in checkpoints, as views; arguments as for `BucketState`."""
        if only in (None, "model"):
            for part in ranges:
                name = f"model/{part.name}"
                yield from tensors_of_range(name, part, flat=self.bucket.params.update)


def frozen_states(wrappers: Sequence[ParamBuffer]) -> list[FrozenState]:
    """The parts of all buckets without gradients."""
    states = []
    for wrapper in wrappers:
        if not isinstance(wrapper, DataParallel):
            replica = Replica.of(wrapper.groups)
            states += [FrozenState(bucket, replica) for bucket in wrapper.buckets]
    return states
