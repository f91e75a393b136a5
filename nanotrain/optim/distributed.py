"""Distributed optimizer: main params and optimizer state of this rank's shard of every bucket.

    bucket.grads.main   [--range--|gap|---range---|--range--]   summed gradients, fp32 or `--main-grads-dtype`
    main params         [--range--|gap|---range---|--range--]   fp32; the model param shard itself where that is fp32
    exp_avg, exp_avg_sq [--range--|gap|---range---|--range--]
    param ranges        [===== weight decay ======|=========]   consecutive ranges with the same weight decay, merged

`step`: global norm of all shards -> skip on every rank if it is not finite, which needs no further communication since
the norm is equal on all ranks -> unscale and clip in one multiplication -> update the main params -> copy them to the
model param shards. The caller then all-gathers. Gaps and padding have zero gradients and stay zero.

Checkpoints see no offsets: state is `dict[TensorBox, Tensor]`, each tensor a view of flat state.

Source: Rajbhandari et al. 2020 (ZeRO), section 5.1; Megatron-LM, `distrib_optimizer.py`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from nanotrain.comm.group import Group
from nanotrain.config.config import OptimConfig
from nanotrain.errors import ConfigError
from nanotrain.optim.clip import clip_factor, global_norm
from nanotrain.optim.optimizers import OPTIMIZERS
from nanotrain.optim.rule import ParamRange, UpdateRule
from nanotrain.parallel.dp.bucket import Bucket
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.parallel.dp.layout import ShardRange
from nanotrain.precision.loss_scale import LossScale
from nanotrain.precision.policy import Precision
from nanotrain.topology.boxes import TensorBox, flat_range_to_boxes


@dataclass(frozen=True)
class Update:
    """Result of one optimizer step, equal on every rank."""

    grad_norm: float  # global 2-norm before clipping; not finite if the step was skipped
    skipped: bool  # whether no parameter changed


@dataclass(frozen=True)
class _BucketState:
    """Optimizer state of the part of one bucket that this rank updates."""

    bucket: Bucket  # model params and gradients
    replica: tuple[int, int]  # index and number of the ranks that update the same part
    main: Tensor  # [update_numel] main params
    state: Mapping[str, Tensor]  # [update_numel] state tensors of the update rule, by name
    # the tensors that the update rule takes, with their elements and shape
    updated: list[tuple[Tensor, slice]] = field(default_factory=list)

    @classmethod
    def build(cls, wrapper: DataParallel, bucket: Bucket, *, precision: Precision, rule: UpdateRule) -> "_BucketState":
        """Allocate the state of one bucket."""
        params, replicate = bucket.params.gather.update, wrapper.groups.replicate
        main = params.to(precision.main) if precision.has_separate_main_params else params
        state = {name: torch.zeros_like(main) for name in rule.state_names}
        replica = (0, 1) if wrapper.groups.shards_across else (replicate.index, replicate.size)
        return cls(bucket, replica, main, state)

    @property
    def ranges(self) -> tuple[ShardRange, ...]:
        """The param ranges."""
        return self.bucket.update_ranges

    @property
    def grads(self) -> Tensor:
        """[update_numel] reduced gradients."""
        return self.bucket.grads.main

    def cast_grads(self) -> Tensor:
        """[update_numel] a copy of the gradients in the dtype of the main params, which the next update reads."""
        grads = self.grads.to(self.main.dtype)
        for main_param, elements in self.updated:
            main_param.grad = grads[elements].view(main_param.shape)
        return grads

    def release_cast_grads(self) -> None:
        """Free the copy after the update."""
        for main_param, _ in self.updated:
            main_param.grad = None

    def tensors(self, ranges: Sequence[ShardRange]) -> Iterator[tuple[TensorBox, Tensor]]:
        """Views of main params and state by their names in checkpoints."""
        flat = {"model": self.main} | {f"optimizer/{name}": tensor for name, tensor in self.state.items()}
        for part in ranges:
            for prefix, tensor in flat.items():
                yield from _boxes(f"{prefix}/{part.name}", part, flat=tensor)


class DistributedOptimizer:
    """An update rule applied to this rank's shards.

    Args:
        wrappers: data-parallel wrappers whose buckets are updated: per stage one for dense and one for expert params.
        config: update rule and hyperparameters.
        precision: dtype of the main params.
        loss_scale: scale of the gradients; updated by every step.
        world: all ranks; the gradient norm is global.

    Raises:
        ConfigError: the rule needs whole matrices and a matrix is sharded.
    """

    def __init__(
        self,
        wrappers: Sequence[DataParallel],
        config: OptimConfig,
        *,
        precision: Precision,
        loss_scale: LossScale,
        world: Group,
    ) -> None:
        self.loss_scale = loss_scale
        self.num_updates = 0
        self._clip_grad = config.clip_grad
        self._world = world
        rule = OPTIMIZERS[config.optimizer]
        self._states = [
            _BucketState.build(wrapper, bucket, precision=precision, rule=rule)
            for wrapper in wrappers
            for bucket in wrapper.buckets
        ]
        ranges = [part for state in self._states for part in _param_ranges(state, rule)]
        # The shards of a rank may be padding only, and torch's optimizers refuse an empty list.
        self._optimizer = rule.build(ranges, config) if ranges else None
        self._casts_grads = precision.main_grads != precision.main

    def step(self, lr: float) -> Update:
        """Update the main params from the reduced gradients, and the model param shards from the main params."""
        grads = [state.grads for state in self._states]
        scale = self.loss_scale.scale
        norm = global_norm([grad for state in self._states for grad in _grads_for_norm(state)], self._world) / scale
        skipped = not math.isfinite(norm)
        self.loss_scale.update(overflowed=skipped)
        if not skipped:
            factor = clip_factor(norm, self._clip_grad) / scale
            if self._casts_grads:
                grads = [state.cast_grads() for state in self._states]
            if factor != 1.0:
                torch._foreach_mul_(grads, factor)
            self._update(lr)
        return Update(grad_norm=norm, skipped=skipped)

    def copy_main_to_model_params(self) -> None:
        """Copy the main params to this rank's shards of the model params, where they are stored apart."""
        for state in self._states:
            params = state.bucket.params.gather.update
            if state.main is not params:
                params.copy_(state.main)

    def state_tensors(self) -> dict[TensorBox, Tensor]:
        """Main params and optimizer state on this rank, as views that a checkpoint can be read into."""
        return {box: view for state in self._states for box, view in state.tensors(state.ranges)}

    def grad_tensors(self) -> dict[TensorBox, Tensor]:
        """Reduced gradients of the last step on this rank, as views; after `step` they are unscaled and clipped."""
        return {
            box: view
            for state in self._states
            for part in state.ranges
            for box, view in _boxes(part.name, part, flat=state.grads)
        }

    def tensors_to_save(self) -> dict[TensorBox, Tensor]:
        """This rank's part of a checkpoint: every element of the state is saved by one rank.

        Only replica 0 of a parameter is saved; the ranks with the same shard save equal parts of it.
        """
        return {box: view for state in self._states for box, view in state.tensors(_ranges_to_save(state))}

    def state_dict(self) -> dict[str, object]:
        """The state that is not a tensor, as JSON."""
        return {"num_updates": self.num_updates, "loss_scale": self.loss_scale.state_dict()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from a checkpoint whose tensors were read into `state_tensors` before."""
        num_updates, loss_scale = state["num_updates"], state["loss_scale"]
        assert isinstance(num_updates, int) and isinstance(loss_scale, dict), "not written by state_dict"
        self.num_updates = num_updates
        self.loss_scale.load_state_dict(loss_scale)
        if self._optimizer is not None:
            for tensors in self._optimizer.state.values():
                if "step" in tensors:
                    tensors["step"].fill_(num_updates)  # used by bias correction
        self.copy_main_to_model_params()

    def _update(self, lr: float) -> None:
        self.num_updates += 1
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            if self._casts_grads:
                for state in self._states:
                    state.release_cast_grads()
        self.copy_main_to_model_params()


def _grads_for_norm(state: _BucketState) -> Iterator[Tensor]:
    """Gradients that this rank adds to the norm: replica 0 of every element.

    Gaps and padding are zero and included, so that a bucket without other replicas is one tensor.
    """
    if state.replica[0] > 0:
        return
    start, end = 0, state.bucket.layout.update_numel
    for part in state.ranges:
        if not part.param.is_first_replica:
            if start < part.shard_start:
                yield state.grads[start : part.shard_start]
            start = part.elements.stop
    if start < end:
        yield state.grads[start:end]


def _ranges_to_save(state: _BucketState) -> list[ShardRange]:
    """The index-th of `replica[1]` nearly equal parts of every range of a first replica."""
    parts = []
    for full in state.ranges:
        if full.param.is_first_replica:
            index, size = state.replica
            first, last = full.numel * index // size, full.numel * (index + 1) // size
            parts.append(ShardRange(full.param, full.shard_start + first, full.param_start + first, last - first))
    return parts


def _boxes(name: str, part: ShardRange, *, flat: Tensor) -> Iterator[tuple[TensorBox, Tensor]]:
    """A range as boxes of the global tensor, with their views of a flat shard."""
    local, begin = part.param, part.shard_start
    for box in flat_range_to_boxes(local.box.shape, start=part.param_start, stop=part.param_start + part.numel):
        view = flat[begin : begin + box.numel].view(box.shape)
        yield TensorBox(name, local.spec.shape, box.shifted(local.box.start)), view
        begin += box.numel


def _param_ranges(state: _BucketState, rule: UpdateRule) -> Iterator[ParamRange]:
    """Merge consecutive ranges with the same weight decay: fewer and longer tensors are updated faster.

    A parameter of which the rule needs the whole matrix stays a range of its own, in its local shape.
    """

    def key(part: ShardRange) -> tuple[bool, str]:
        needs_whole = rule.needs_whole_matrix and part.param.spec.needs_whole_matrix
        return part.param.spec.weight_decay, part.name if needs_whole else ""

    start = 0
    for (weight_decay, matrix), group in groupby(state.ranges, key=key):
        parts = list(group)
        end = parts[-1].elements.stop
        elements = slice(start, end)
        shape: tuple[int, ...] = (-1,)
        if matrix:
            _check_whole(parts[0])
            elements, shape = parts[0].elements, parts[0].param.box.shape
        main_param = state.main[elements].detach().view(shape)
        state.updated.append((main_param, elements))
        if state.grads.dtype == main_param.dtype:
            main_param.grad = state.grads[elements].view(shape)
        tensors = {name: flat[elements].view(shape) for name, flat in state.state.items()}
        yield ParamRange(main_param, tensors, weight_decay)
        start = end


def _check_whole(part: ShardRange) -> None:
    numel = part.param.spec.numel
    if part.numel < numel:
        raise ConfigError(
            f"this rank holds {part.numel} of the {numel} elements of {part.name}",
            why="the update rule of --optimizer needs whole matrices",
            fix="set --optimizer adam, or --data-parallel-sharding-strategy no_shard without tensor parallelism",
        )
