"""Distributed optimizer: main params and optimizer state of this rank's shard of every bucket.

    bucket.grads.main   [--range--|gap|---range---|--range--]   summed gradients, fp32 or
                                                                `--main-grads-dtype`
    main params         [--range--|gap|---range---|--range--]   the model param shard itself where
                                                                the dtypes are equal
    state tensors       [--range--|gap|---range---|--range--]   exp_avg, exp_avg_sq, ... of the rule
    parts               [======== part ===========|== part =]   stored together, `state.py`

`step`: global norm of all shards -> skip if it is not finite, on every rank alike -> unscale and
clip in one multiplication -> update the main params -> copy them to the model param shards. The
caller then updates `average` and all-gathers. Gaps and padding stay zero. The host waits for the
device only if state is in host memory.

Checkpoints contain no offsets: state is `dict[TensorBox, Tensor]`, each tensor a view of flat
state.

Source: Rajbhandari et al. 2020 (ZeRO), section 5.1; Megatron-LM, `distrib_optimizer.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from nanotrain.comm.collectives import all_reduce
from nanotrain.comm.group import Group
from nanotrain.config.config import OptimConfig
from nanotrain.optim import OPTIMIZERS
from nanotrain.optim.arithmetic import step_arithmetic
from nanotrain.optim.average import WeightAverage
from nanotrain.optim.frozen import FrozenState, frozen_states
from nanotrain.optim.matrix_routes import grid_groups
from nanotrain.optim.matrix_update import MatrixUpdate
from nanotrain.optim.offload import HostUpdate
from nanotrain.optim.rule import ParamRange, UpdateStep
from nanotrain.optim.state import BucketState, PartState
from nanotrain.optim.stored import StoredTensor
from nanotrain.optim.trained_sets import TrainedSets
from nanotrain.optim.whole_matrix_state import WholeMatrixStates
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.parallel.dp.param_buffer import ParamBuffer
from nanotrain.precision.dtypes import Precision
from nanotrain.precision.loss_scale import LossScale
from nanotrain.spec.boxes import TensorBox
from nanotrain.spec.trainable import TrainableSet
from nanotrain.topology.groups import GroupName

ALL_PARAMS = TrainableSet()
# Keeps the clip factor finite for a vanishing norm; Megatron-LM's value.
EPSILON = 1e-6


@dataclass(frozen=True)
class Update:
    """Result of one optimizer step, on the device, so the host need not wait.

    All but `local_finite` is equal on every rank.
    """

    grad_norm: Tensor  # fp64 scalar, global 2-norm before clipping; not finite in a skipped step
    skipped: Tensor  # bool scalar, whether no parameter changed
    sums: Tensor  # [n] fp64, the argument `sums` summed over all ranks
    loss_scale: float | Tensor  # factor of the gradients in this step
    local_finite: Tensor  # bool scalar, whether this rank's shards of the gradients are finite


class DistributedOptimizer:
    """An update rule applied to this rank's shards.

    Args:
        wrappers: data-parallel wrappers of this rank, per stage one for dense and one for expert
            params. The buckets of `DataParallel` are updated; all are loaded and saved.
        config: update rule and hyperparameters.
        precision: dtype of the main params.
        loss_scale: scale of the gradients; updated by every step.
        groups: groups of this rank by name; the gradient norm is over `world`.
        trainable: which parameters are trained; the `DataParallel` wrappers have exactly these.
    """

    def __init__(
        self,
        wrappers: Sequence[ParamBuffer],
        config: OptimConfig,
        *,
        precision: Precision,
        loss_scale: LossScale,
        groups: Mapping[GroupName, Group],
        trainable: TrainableSet = ALL_PARAMS,
    ) -> None:
        self.loss_scale = loss_scale
        self._config = config
        self._world = groups["world"]
        self._arithmetic = step_arithmetic(precision)
        self._rule = self._arithmetic.form_of(OPTIMIZERS[config.optimizer])
        self._wrappers = wrappers
        trained = [wrapper for wrapper in wrappers if isinstance(wrapper, DataParallel)]
        self._states = _build_states(trained, precision=precision, config=config)
        # the states and the frozen parameters, which are loaded and saved too
        self._stored: list[BucketState | FrozenState] = [*self._states, *frozen_states(wrappers)]
        self._parts = [part for state in self._states for part in state.parts]
        self._device = wrappers[0].param_buffer.device
        self.average = WeightAverage(self._parts, config.ema_decay)
        self._num_updates = torch.zeros((), device=self._device)
        self._trainable = trainable
        self._trained_sets = TrainedSets(((0, trainable),))
        self._grads = [state.grads for state in self._states]
        self._norm_grads: list[Tensor] = []
        for state in self._states:
            self._norm_grads.extend(state.grads_for_norm())
        self._group_parts()
        # parts on the device whose model params are copies of the main params
        self._rounded: list[PartState] = []
        on_host: list[PartState] = []
        for part in self._parts:
            if part.host is not None:
                on_host.append(part)
            elif part.has_separate_model_params:
                self._rounded.append(part)
        self._host = HostUpdate(on_host, device=self._device) if on_host else None
        self._matrix_updates = self._build_matrix_updates(trained, groups)
        self._loading: list[tuple[StoredTensor, Tensor]] = []
        # a tied embedding whose two stages are on this rank, and its copy
        self._replicas: list[tuple[Tensor, Tensor]] = []

    def _group_parts(self) -> None:
        """Group the parts that the elementwise rule updates on the device."""
        self._ranges: list[ParamRange] = []  # fp32 views, updated together
        self._converted: list[PartState] = []  # parts that are updated in chunks
        for part in self._parts:
            if part.part.is_matrix or part.host is not None:
                continue
            if part.is_fp32:
                self._ranges.extend(part.ranges())
            else:
                self._converted.append(part)

    @property
    def matrix_balances(self) -> list[str]:
        """Descriptions of how dense and expert matrices are distributed over ranks."""
        balances = (update.balance for update in self._matrix_updates)
        return [balance for balance in balances if balance is not None]

    @property
    def _whole_matrix_states(self) -> list[WholeMatrixStates]:
        """State of whole matrices, per grid of ranks."""
        states = (update.state for update in self._matrix_updates)
        return [state for state in states if state is not None]

    def step(
        self,
        lr: float,
        *,
        decoupled_lr: float | None = None,
        weight_decay: float | None = None,
        sums: Tensor | None = None,
    ) -> Update:
        """Update main params from the reduced gradients, and model param shards from main params.

        Args:
            lr: learning rate.
            decoupled_lr: learning rate of the embedding and the output layer; None for `lr`.
            weight_decay: weight decay; None for the one of the configuration.
            sums: [n] fp64 on the device, summed over all ranks in the all-reduce of the norm.
        """
        scale = self.loss_scale.scale
        local = self._arithmetic.local(self._norm_grads, device=self._device)
        is_local_finite = local[0].isfinite()  # before the all-reduce, which may be in place
        total = local if sums is None else torch.cat([local, sums])
        all_reduce(total, self._world)
        squares = total[: len(local)]
        norm = self._arithmetic.join(squares).sqrt() / scale
        is_finite = norm.isfinite()
        factor = clip_factor(norm, self._config.clip_grad) / scale
        # 1 in a skipped step: gaps and padding stay zero.
        self._scale_grads(torch.where(is_finite, factor, 1.0).float())
        found_inf = 1.0 - is_finite.float()
        self.loss_scale.update(found_inf)
        self._num_updates = self._num_updates + is_finite
        step = UpdateStep(
            config=self._config,
            number=self._num_updates,
            lr=lr,
            decoupled_lr=decoupled_lr,
            weight_decay=self._config.weight_decay if weight_decay is None else weight_decay,
            found_inf=found_inf,
        )
        # named in traces as torch names its optimizers
        with record_function(f"Optimizer.step#{self._config.optimizer}"):
            self._run_rules(step)
        return Update(norm, ~is_finite, total[len(local) :], scale, is_local_finite)

    def _scale_grads(self, factor: Tensor) -> None:
        """Unscale and clip the gradients."""
        if not self._grads:  # all parameters of this rank are frozen
            return
        if self._grads[0].dtype is torch.float32:
            # torch's fused kernels can divide by a scale too, but on GPUs only, for 4 of 46 bytes
            # per element.
            torch._foreach_mul_(self._grads, factor)
        else:  # multiplied when they are read
            for part in self._parts:
                part.grad_factor = factor.to(part.grad.device)

    @property
    def num_updates(self) -> int:
        """Steps that were not skipped; waits for the device."""
        return int(self._num_updates)

    def scale_rows(self, factors: Mapping[str, Tensor]) -> None:
        """Multiply main params by factors of their rows, and copy them to the model param shards.

        Args:
            factors: factors by parameter name, [rows] fp32 of the global parameter; other
                parameters are not changed.
        """
        for part in self._parts:
            part.scale_rows(factors)

    @property
    def allocated_tensors(self) -> list[Tensor]:
        """The flat tensors of main params and state on the device, padding included."""
        tensors: list[Tensor] = []
        for part in self._parts:
            if part.host is not None:
                continue
            for stored in part.stored.values():
                tensors.extend(stored.tensors)
        tensors.extend(states.flat for states in self._whole_matrix_states)
        return tensors

    def state_tensors(self) -> dict[TensorBox, Tensor]:
        """Main params and optimizer state on this rank, to read a checkpoint into.

        They are views, except for tensors that are stored with scales: `finish_load` writes their
        fp32 copies back.
        """
        self._loading.clear()
        self._replicas.clear()
        tensors: dict[TensorBox, Tensor] = {}
        for state in self._stored:
            for box, view in state.tensors(state.bucket.update_ranges, copies=self._loading):
                if tensors.setdefault(box, view) is not view:
                    self._replicas.append((tensors[box], view))
        for states in self._whole_matrix_states:
            tensors.update(states.tensors(once=False))
        return tensors

    def grad_tensors(self, *, once: bool = False) -> dict[TensorBox, Tensor]:
        """Reduced gradients of the last step on this rank, as views.

        After `step` fp32 gradients are unscaled and clipped; gradients in lower precision are still
        scaled.

        Args:
            once: whether every element is on one rank only.
        """
        tensors: dict[TensorBox, Tensor] = {}
        for state in self._states:
            ranges = state.ranges_to_save if once else state.bucket.update_ranges
            tensors.update(state.grad_tensors(ranges))
        return tensors

    def tensors_to_save(self, only: str | None = None) -> dict[TensorBox, Tensor]:
        """This rank's part of a checkpoint: every element of the state is saved by one rank.

        Only replica 0 of a parameter is saved; ranks with the same shard save equal parts.

        Args:
            only: a prefix of names; None for all.
        """
        tensors: dict[TensorBox, Tensor] = {}
        for state in self._stored:
            tensors.update(state.tensors(state.ranges_to_save, copies=[], only=only))
        if only is None:
            for states in self._whole_matrix_states:
                tensors.update(states.tensors(once=True))
        return tensors

    def state_dict(self) -> dict[str, object]:
        """The state that is not a tensor, as JSON."""
        return {
            "num_updates": self.num_updates,
            "loss_scale": self.loss_scale.state_dict(),
            **self._trained_sets.to_json(),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from a checkpoint whose tensors were read into `state_tensors` before."""
        num_updates = state["num_updates"]
        loss_scale = state["loss_scale"]
        assert isinstance(num_updates, int), "not written by state_dict"
        assert isinstance(loss_scale, dict), "not written by state_dict"
        self._num_updates = torch.full((), float(num_updates), device=self._device)
        self.loss_scale.load_state_dict(loss_scale)
        self._load_trained_sets(TrainedSets.from_json(state), num_updates=num_updates)
        self.finish_load()

    def _load_trained_sets(self, saved: TrainedSets, *, num_updates: int) -> None:
        """Count the updates of every parameter from the update at which its training began."""
        self._trained_sets = saved.then(self._trainable, num_updates=num_updates)
        for part in self._parts:
            names = [entry.name for entry in part.part.ranges]
            part.first_updates = {name: self._trained_sets.first_update(name) for name in names}
        self._group_parts()

    def finish_load(self) -> None:
        """Store the tensors that were read into `state_tensors`, and update the model params."""
        for tensor, replica in self._replicas:
            replica.copy_(tensor)
        for stored, values in self._loading:
            stored.write(values)
        self._loading.clear()
        for part in self._parts:
            part.copy_main_to_model_params()
        for wrapper in self._wrappers:
            wrapper.mark_loaded()

    def _build_matrix_updates(
        self, wrappers: Sequence[DataParallel], groups: Mapping[GroupName, Group]
    ) -> list[MatrixUpdate]:
        """One `MatrixUpdate` per grid of ranks, for the buffers of all stages together."""
        rule = self._rule.matrix
        if rule is None:
            return []
        parts_of_bucket = {}
        for state in self._states:
            parts = [part for part in state.parts if part.part.is_matrix]
            parts_of_bucket[id(state.bucket)] = parts
        wrappers_of_grid: dict[str, list[DataParallel]] = {}
        for wrapper in wrappers:
            wrappers_of_grid.setdefault(wrapper.groups.shard.name, []).append(wrapper)
        updates = []
        for chosen in wrappers_of_grid.values():
            reduce = chosen[0].groups
            buckets = [bucket for wrapper in chosen for bucket in wrapper.buckets]
            grid = grid_groups(
                reduce.shard,
                reduce.replicate,
                groups=groups,
                config=self._config,
                shards_across=reduce.shards_across,
            )
            update = MatrixUpdate(
                [wrapper.layout for wrapper in chosen],
                [parts_of_bucket[id(bucket)] for bucket in buckets],
                rule=rule,
                config=self._config,
                groups=grid,
                device=self._device,
            )
            updates.append(update)
        return updates

    def _run_rules(self, step: UpdateStep) -> None:
        """Update all main params and model param shards."""
        on_host = None
        if self._host is not None:
            self._host.start_grads()
            # Waits for the device, so it comes before the updates there, which then overlap with
            # the updates on the host.
            on_host = step.on_host()
            if self._matrix_updates:
                self._host.wait_for_grads()
        for update in self._matrix_updates:
            update.run(step, device=self._device)
        if self._ranges:
            self._rule.update(self._ranges, step)
        for part in self._converted:
            part.update(self._rule, step)
        for part in self._rounded:
            part.copy_main_to_model_params()
        if self._host is not None and on_host is not None:
            self._host.run(self._rule, on_host)


def _build_states(
    wrappers: Sequence[DataParallel], *, precision: Precision, config: OptimConfig
) -> list[BucketState]:
    """Allocate the state of all buckets."""
    states = []
    for wrapper in wrappers:
        for bucket in wrapper.buckets:
            states.append(BucketState.build(wrapper, bucket, precision=precision, config=config))
    return states


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Factor that reduces gradients of norm `norm` to norm `max_norm`; 0 means no limit.

    >>> norm = torch.tensor(4.0, dtype=torch.float64)
    >>> round(float(clip_factor(norm, 1.0)), 6), float(clip_factor(norm, 0.0))
    (0.25, 1.0)
    """
    if max_norm <= 0:
        return torch.ones_like(norm)
    return (torch.full_like(norm, max_norm) / (norm + EPSILON)).clamp(max=1.0)
