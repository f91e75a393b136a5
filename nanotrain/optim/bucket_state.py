"""`BucketState`: the part of one bucket that this rank updates, with its main params and optimizer state.

Its tensors leave it as `(TensorBox, Tensor)`; offsets into the bucket stay here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanotrain.comm.device import host_zeros
from nanotrain.config.config import OptimConfig
from nanotrain.optim.optimizers import OPTIMIZERS
from nanotrain.optim.part_state import HostBuffers, PartState
from nanotrain.optim.parts import ShardPart, clip_ranges, host_fraction, range_boxes, ranges_to_save, split_shard
from nanotrain.optim.stored import StoredTensor
from nanotrain.parallel.dp.bucket import Bucket
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.parallel.dp.layout import ShardRange
from nanotrain.precision.policy import Precision
from nanotrain.spec.boxes import TensorBox


@dataclass(frozen=True)
class BucketState:
    """The part of one bucket that this rank updates."""

    bucket: Bucket  # model params and gradients
    replica: tuple[int, int]  # index and number of the ranks that update the same part
    parts: tuple[PartState, ...]  # main params and state; they cover what this rank updates

    @classmethod
    def build(
        cls, wrapper: DataParallel, bucket: Bucket, *, precision: Precision, config: OptimConfig
    ) -> "BucketState":
        """Allocate the state of one bucket."""
        rule, replicate = OPTIMIZERS[config.optimizer], wrapper.groups.replicate
        parts = tuple(
            _build_part(part, bucket, precision=precision, names=part.state_names(rule, config))
            for part in split_shard(
                bucket.update_ranges, bucket.layout.update_numel, rule=rule, host_fraction=host_fraction(config)
            )
        )
        return cls(bucket, (0, 1) if wrapper.groups.shards_across else (replicate.index, replicate.size), parts)

    @property
    def ranges(self) -> tuple[ShardRange, ...]:
        """The param ranges."""
        return self.bucket.update_ranges

    @property
    def grads(self) -> Tensor:
        """[update_numel] reduced gradients."""
        return self.bucket.grads.main

    @property
    def ranges_to_save(self) -> list[ShardRange]:
        """The param ranges that this rank saves; every element is saved by one rank."""
        return ranges_to_save(self.ranges, self.replica)

    def grads_for_norm(self) -> Iterator[Tensor]:
        """Gradients that this rank adds to the norm: replica 0 of every element.

        Gaps and padding are zero and included, so that a bucket without other replicas is one tensor.
        """
        if self.replica[0] > 0:
            return
        start, end = 0, self.bucket.layout.update_numel
        for part in self.ranges:
            if not part.param.is_first_replica:
                if start < part.shard_start:
                    yield self.grads[start : part.shard_start]
                start = part.elements.stop
        if start < end:
            yield self.grads[start:end]

    def grad_tensors(self, ranges: Sequence[ShardRange]) -> Iterator[tuple[TensorBox, Tensor]]:
        """Reduced gradients of these parameters, as views."""
        for part in ranges:
            yield from _boxes(part.name, part, flat=self.grads, first=0)

    def tensors(
        self, ranges: Sequence[ShardRange], *, copies: list[tuple[StoredTensor, Tensor]], only: str | None = None
    ) -> Iterator[tuple[TensorBox, Tensor]]:
        """Main params and state by their names in checkpoints.

        Args:
            ranges: of the parameters.
            copies: tensors that are stored with scales are yielded as fp32 copies, which are appended here.
            only: a prefix of names ("model"); None for all.
        """
        for state in self.parts:
            start, stop = state.part.start, state.part.stop
            inside = list(clip_ranges(ranges, start=start, stop=stop))
            for prefix, stored in state.stored.items():
                if only not in (None, prefix):
                    continue
                flat = stored.values
                if stored.scales is not None:
                    flat = stored.read()
                    copies.append((stored, flat))
                for part in inside:
                    yield from _boxes(f"{prefix}/{part.name}", part, flat=flat, first=start)


def _boxes(name: str, part: ShardRange, *, flat: Tensor, first: int) -> Iterator[tuple[TensorBox, Tensor]]:
    """A range as boxes of the global tensor, with their views of a flat tensor that begins at element `first`."""
    begin = part.shard_start - first
    for box in range_boxes(name, part):
        yield box, flat[begin : begin + box.box.numel].view(box.box.shape)
        begin += box.box.numel


def _build_part(part: ShardPart, bucket: Bucket, *, precision: Precision, names: Sequence[str]) -> PartState:
    """Allocate main params, unless the model param shard has their dtype, and state tensors."""
    model_params = bucket.params.update[part.start : part.stop]
    device, on_host = model_params.device, part.on_host
    main = StoredTensor(model_params)
    if precision.has_separate_main_params:
        main = StoredTensor.zeros(part.numel, precision.main, device=device, on_host=on_host)
    elif on_host:  # as on the device: fp16 model params have no scales
        main = StoredTensor(host_zeros(part.numel, dtype=precision.main, device=device))
    if main.values is not model_params:
        main.write(model_params.to(main.values.device, torch.float32))
    state = {
        name: StoredTensor.zeros(
            part.numel, precision.state_dtype(name), device=device, is_square=name == "exp_avg_sq", on_host=on_host
        )
        for name in names
    }
    grad, host = bucket.grads.main[part.start : part.stop], None
    if on_host:
        host = HostBuffers(grad, host_zeros(part.numel, dtype=model_params.dtype, device=device))
        grad = host_zeros(part.numel, dtype=grad.dtype, device=device)
    return PartState(part, main=main, state=state, grad=grad, model_params=model_params, host=host)
