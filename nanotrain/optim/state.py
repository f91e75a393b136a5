"""Optimizer state of a shard: its parts, planned and allocated, and their tensors in checkpoints.

    split_shard    the parts of the elements of a bucket that one rank updates: its shard, or the
                   part of the shard of its instance. Pure
    state_bytes    bytes of main params, state and average of parts. Pure
    PartState      main params, state and gradients of one part, read and written as fp32 ranges
    BucketState    the parts of one bucket; offsets stay here, tensors are named by `TensorBox`

A part is consecutive elements whose state is stored together. Parts cover the shard, gaps and
padding included. Without a rule for matrices and without offload a shard is one part.

    shard                     |norm ..|query ..key ..value |norm ..|gate ..up ..down |ppp|
    with a rule for matrices  |  0    |        1           |   2   |         3           |
    ranges of part 0          [weight decay|none]

    . gap   p padding   a range: consecutive params with the same hyperparameters, merged

If everything is stored in fp32, the ranges are views, made once. Otherwise one chunk at a time is
converted to fp32, updated and stored again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from nanotrain.comm.device import host_zeros
from nanotrain.config.config import OptimConfig
from nanotrain.optim import OPTIMIZERS
from nanotrain.optim.rule import ParamRange, UpdateRule, UpdateStep
from nanotrain.optim.stored import SCALE_BLOCK, StoredTensor, stored_bytes
from nanotrain.parallel.dp.bucket import Bucket
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.parallel.dp.layout import FlatRange, clip_ranges
from nanotrain.parallel.dp.options import ReduceGroups
from nanotrain.precision.dtypes import Precision
from nanotrain.spec.boxes import TensorBox

CHUNK_NUMEL = 1024 * SCALE_BLOCK  # elements that are converted to fp32 at once: 8 MiB per tensor


@dataclass(frozen=True)
class ShardPart:
    """Elements [start, stop) of a shard."""

    start: int
    stop: int
    ranges: tuple[FlatRange, ...]  # the params in it, in coordinates of the shard
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
        assert rule.matrix is not None, "only rules for matrices have parts of matrices"
        return rule.matrix.state_names


def split_shard(
    ranges: Iterable[FlatRange], numel: int, *, rule: UpdateRule, host_fraction: float = 0.0
) -> tuple[ShardPart, ...]:
    """The parts of a shard of `numel` elements with these param ranges, in order.

    State of the first `host_fraction` of the elements is in host memory; a part at the border is
    divided.
    """

    def is_matrix(part: FlatRange) -> bool:
        return rule.matrix is not None and part.param.spec.needs_whole_matrix

    groups = [(kind, list(group)) for kind, group in groupby(ranges, key=is_matrix)]
    if not groups:
        groups = [(False, [])]
    border = int(numel * host_fraction)
    start = 0
    parts: list[ShardPart] = []
    for index, (kind, group) in enumerate(groups):
        is_last = index == len(groups) - 1
        end = numel if is_last else group[-1].stop
        for stop in (min(border, end), end):
            if start < stop:
                inside = tuple(clip_ranges(group, start=start, stop=stop))
                on_host = stop <= border
                parts.append(ShardPart(start, stop, inside, is_matrix=kind, on_host=on_host))
                start = stop
    return tuple(parts)


def host_fraction(config: OptimConfig) -> float:
    """The fraction of each shard whose state is in host memory."""
    return config.optimizer_offload_fraction if config.optimizer_cpu_offload else 0.0


@dataclass(frozen=True)
class Replica:
    """Index of a rank among the ranks with the same shard, and the number of these ranks."""

    index: int
    size: int  # number of these ranks

    @classmethod
    def of(cls, groups: ReduceGroups) -> "Replica":
        """This rank among the ranks with the same part of a bucket."""
        if groups.shards_across:
            return cls(0, 1)
        return cls(groups.replicate.index, groups.replicate.size)


def ranges_to_save(ranges: Iterable[FlatRange], replica: Replica) -> list[FlatRange]:
    """This rank's share of every range to save; ranks with equal shards save nearly equal parts.

    Args:
        ranges: param ranges of the shard; only replica 0 of a parameter is saved.
        replica: this rank among the ranks with the same shard.
    """
    parts = []
    for full in ranges:
        if not full.param.is_first_replica:
            continue
        first = full.numel * replica.index // replica.size
        last = full.numel * (replica.index + 1) // replica.size
        start = full.start + first
        parts.append(FlatRange(full.param, start, full.param_start + first, last - first))
    return parts


def state_bytes(
    parts: Iterable[ShardPart], rule: UpdateRule, *, config: OptimConfig, precision: Precision
) -> int:
    """Bytes on the device of the state, the average, and main params that are stored separately."""
    total = 0
    for part in parts:
        if part.on_host:
            continue
        dtypes = [precision.state_dtype(name) for name in part.state_names(rule, config)]
        if config.ema_decay is not None:
            dtypes.append(torch.float32)
        if precision.has_separate_main_params:
            dtypes.append(precision.main)
        for dtype in dtypes:
            total += stored_bytes(part.numel, dtype)
    return total


@dataclass(frozen=True)
class HostBuffers:
    """The source and the target of the copies of a part with state in host memory."""

    device_grad: Tensor  # [numel] reduced gradients on the device
    params: Tensor  # [numel] model params in their dtype, on the host


@dataclass(eq=False)
class PartState:
    """Optimizer state of one part."""

    part: ShardPart  # elements and params
    main: StoredTensor  # [numel] main params
    state: Mapping[str, StoredTensor]  # [numel] state tensors by name
    grad: Tensor  # [numel] reduced gradients, fp32 or `--main-grads-dtype`
    model_params: Tensor  # [numel] model params; the values of `main` where they have its dtype
    host: HostBuffers | None = None  # None unless all but `model_params` is in host memory
    ema: StoredTensor | None = None  # [numel] fp32 moving average of `main` with `--ema-decay`
    grad_factor: float | Tensor = 1.0  # unscales and clips gradients that are not fp32
    # updates of the run before a parameter was trained, by name; 0 for all others
    first_updates: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_fp32(self) -> bool:
        """Whether main params and states are all fp32, so that ranges are views."""
        stored = (self.main, *self.state.values())
        return self.grad.dtype is torch.float32 and all(tensor.is_fp32 for tensor in stored)

    @property
    def stored(self) -> dict[str, StoredTensor]:
        """Main params, state tensors and average by their prefix in checkpoints."""
        stored = {"model": self.main}
        for name, tensor in self.state.items():
            stored[f"optimizer/{name}"] = tensor
        if self.ema is not None:
            stored["ema"] = self.ema
        return stored

    def ranges(self) -> list[ParamRange]:
        """The ranges of a part that is stored in fp32, as views."""
        assert self.is_fp32, "changes of copies would be lost"
        with self.loaded(0, self.part.numel) as ranges:
            return ranges

    @property
    def has_separate_model_params(self) -> bool:
        """Whether the model params are rounded copies of the main params, not the same memory."""
        return self.main.values is not self.model_params

    def copy_main_to_model_params(self) -> None:
        """Round the main params to the model params, where they are stored separately."""
        if self.has_separate_model_params:
            self.main_in_chunks_to(self.model_params)

    def main_in_chunks_to(self, params: Tensor) -> None:
        """Round the main params to a tensor of the dtype of the model params."""
        for start, stop in self.chunks():
            params[start:stop].copy_(self.main.read(start, stop))

    def scale_rows(self, factors: Mapping[str, Tensor]) -> None:
        """Multiply main params by factors per row, and round them to the model params.

        Args:
            factors: factors by parameter name, [rows] of the global parameter.
        """
        scaled = [param_range for param_range in self.part.ranges if param_range.name in factors]
        if not scaled:
            return
        for start, stop in self.chunks():
            main = self.main.read(start, stop)
            first = self.part.start + start
            for part in clip_ranges(scaled, start=first, stop=self.part.start + stop):
                elements = main[part.start - first : part.stop - first]
                elements.mul_(_element_factors(part, factors[part.name]).to(main.device))
            self.main.write(main, start)
        self.copy_main_to_model_params()

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Start and stop of the chunks of this part."""
        for start in range(0, self.part.numel, CHUNK_NUMEL):
            yield start, min(start + CHUNK_NUMEL, self.part.numel)

    def update(self, rule: UpdateRule, step: UpdateStep) -> None:
        """Apply an elementwise rule to one chunk after another."""
        for start, stop in self.chunks():
            with self.loaded(start, stop) as ranges:
                rule.update(ranges, step)

    @contextmanager
    def loaded(self, start: int, stop: int) -> Iterator[list[ParamRange]]:
        """The fp32 ranges of elements [start, stop); changes are stored at the end of the block."""
        main = self.main.read(start, stop)
        state = {name: stored.read(start, stop) for name, stored in self.state.items()}
        grad = self.grad[start:stop]
        if grad.dtype is not torch.float32:
            grad = grad.float().mul_(self.grad_factor)
        ranges = []
        for segment in self._segments(start, stop):
            elements = slice(segment.start, segment.stop)
            ranges.append(
                ParamRange(
                    main_param=main[elements],
                    grad=grad[elements],
                    state={name: values[elements] for name, values in state.items()},
                    weight_decay=segment.options.weight_decay,
                    is_decoupled=segment.options.is_decoupled,
                    width_multiplier=segment.options.width_multiplier,
                    follows_width=segment.options.follows_width,
                    first_update=segment.options.first_update,
                )
            )
        yield ranges
        self.main.write(main, start)
        for name, values in state.items():
            self.state[name].write(values, start)

    def _segments(self, start: int, stop: int) -> list["Segment"]:
        """Split [start, stop) of the part by hyperparameters, gaps and padding included."""
        first = self.part.start + start
        inside = clip_ranges(self.part.ranges, start=first, stop=self.part.start + stop)
        segments = []
        begin = 0
        for options, ranges in groupby(inside, key=self._param_options):
            end = list(ranges)[-1].stop - first
            segments.append(Segment(options, begin, end))
            begin = end
        if not segments:
            segments.append(Segment(NO_OPTIONS, 0, 0))
        segments[-1] = segments[-1]._replace(stop=stop - start)
        return segments

    def _param_options(self, param_range: FlatRange) -> "ParamOptions":
        """The hyperparameters of the parameter of a range."""
        spec = param_range.param.spec
        first_update = self.first_updates.get(spec.name, 0)
        return ParamOptions(
            weight_decay=spec.weight_decay,
            is_decoupled=spec.is_embedding_or_output,
            width_multiplier=spec.width_multiplier,
            follows_width=spec.follows_width,
            first_update=first_update,
        )


class ParamOptions(NamedTuple):
    """The hyperparameters that differ between parameters."""

    weight_decay: bool
    is_decoupled: bool  # `--decoupled-lr` applies
    width_multiplier: float  # with muP
    follows_width: bool
    first_update: int  # updates of the run before the parameter was trained


NO_OPTIONS = ParamOptions(
    weight_decay=False,
    is_decoupled=False,
    width_multiplier=1.0,
    follows_width=False,
    first_update=0,
)


class Segment(NamedTuple):
    """Elements [start, stop) of a chunk with the same hyperparameters."""

    options: ParamOptions
    start: int
    stop: int


def _element_factors(part: FlatRange, row_factors: Tensor) -> Tensor:
    """[numel of the range] from the factors of the rows of the global parameter."""
    box = part.param.box
    width = box.numel // box.shape[0]  # width of a local row
    stop = part.param_start + part.numel
    first = part.param_start // width
    last = -(-stop // width)
    rows = row_factors[box.start[0] + first : box.start[0] + last]
    return rows.repeat_interleave(width)[part.param_start - first * width :][: part.numel]


@dataclass(frozen=True)
class BucketState:
    """The part of one bucket that this rank updates."""

    bucket: Bucket  # model params and gradients
    replica: Replica  # this rank among the ranks that update the same part
    parts: tuple[PartState, ...]  # main params and state of all elements that this rank updates

    @classmethod
    def build(
        cls, wrapper: DataParallel, bucket: Bucket, *, precision: Precision, config: OptimConfig
    ) -> "BucketState":
        """Allocate the state of one bucket."""
        rule = OPTIMIZERS[config.optimizer]
        shard_parts = split_shard(
            bucket.update_ranges,
            bucket.layout.update_numel,
            rule=rule,
            host_fraction=host_fraction(config),
        )
        parts = []
        for part in shard_parts:
            names = part.state_names(rule, config)
            parts.append(_build_part(part, bucket, precision=precision, names=names))
        return cls(bucket, Replica.of(wrapper.groups), tuple(parts))

    @property
    def grads(self) -> Tensor:
        """[update_numel] reduced gradients."""
        return self.bucket.grads.main

    @property
    def ranges_to_save(self) -> list[FlatRange]:
        """The param ranges that this rank saves; every element is saved by one rank."""
        return ranges_to_save(self.bucket.update_ranges, self.replica)

    def grads_for_norm(self) -> Iterator[Tensor]:
        """Gradients that this rank adds to the norm: replica 0 of every element.

        Gaps and padding are zero and included, so that a bucket without other replicas is one
        tensor.
        """
        if self.replica.index > 0:
            return
        start = 0
        end = self.bucket.layout.update_numel
        for part in self.bucket.update_ranges:
            if not part.param.is_first_replica:
                if start < part.start:
                    yield self.grads[start : part.start]
                start = part.elements.stop
        if start < end:
            yield self.grads[start:end]

    def grad_tensors(self, ranges: Sequence[FlatRange]) -> Iterator[tuple[TensorBox, Tensor]]:
        """Reduced gradients of these parameters, as views."""
        for part in ranges:
            yield from tensors_of_range(part.name, part, flat=self.grads)

    def tensors(
        self,
        ranges: Sequence[FlatRange],
        *,
        copies: list[tuple[StoredTensor, Tensor]],
        only: str | None = None,
    ) -> Iterator[tuple[TensorBox, Tensor]]:
        """Main params and state by their names in checkpoints.

        Args:
            ranges: ranges of the parameters.
            copies: tensors that are stored with scales are yielded as fp32 copies, which are
                appended here.
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
                    yield from tensors_of_range(
                        f"{prefix}/{part.name}", part, flat=flat, first=start
                    )


def tensors_of_range(
    name: str, part: FlatRange, *, flat: Tensor, first: int = 0
) -> Iterator[tuple[TensorBox, Tensor]]:
    """A range as boxes of the global tensor, with views of a tensor from element `first` on."""
    start = part.start - first
    for box in part.boxes(name):
        stop = start + box.box.numel
        yield box, flat[start:stop].view(box.box.shape)
        start = stop


def _build_part(
    part: ShardPart, bucket: Bucket, *, precision: Precision, names: Sequence[str]
) -> PartState:
    """Allocate main params, unless the model param shard has their dtype, and state tensors."""
    model_params = bucket.params.update[part.start : part.stop]
    device = model_params.device
    main = StoredTensor(model_params)
    if precision.has_separate_main_params:
        main = StoredTensor.zeros(part.numel, precision.main, device=device, on_host=part.on_host)
    elif part.on_host:  # as on the device: fp16 model params have no scales
        main = StoredTensor(host_zeros(part.numel, dtype=precision.main, device=device))
    if main.values is not model_params:
        main.write(model_params.to(main.values.device, torch.float32))
    state = {}
    for name in names:
        state[name] = StoredTensor.zeros(
            part.numel,
            precision.state_dtype(name),
            device=device,
            is_square=name == "exp_avg_sq",
            on_host=part.on_host,
        )
    grad = bucket.grads.main[part.start : part.stop]
    host = None
    if part.on_host:
        host = HostBuffers(grad, host_zeros(part.numel, dtype=model_params.dtype, device=device))
        grad = host_zeros(part.numel, dtype=grad.dtype, device=device)
    return PartState(part, main=main, state=state, grad=grad, model_params=model_params, host=host)
