"""The sharded optimizer: main weights and moments of this rank's part of every bucket, updated in place.

Goals: each element of optimizer state lies on one rank of the shard group; one norm and one vote for the whole model;
nothing here knows how gradients were reduced or how parameters travel back.

    bucket.grad_shard   [--piece--|gap|---piece---|--piece--]   summed gradients, fp32
    main                [--piece--|gap|---piece---|--piece--]   fp32; the parameter shard itself where that is fp32
    exp_avg, exp_avg_sq [--piece--|gap|---piece---|--piece--]
    stretches           [====== decays =======|no decay=====]   what AdamW gets: neighbours with the same weight decay

Phases of `step`: norm of all shards -> vote (a norm that is not finite skips the step on every rank, since all of them
hold the same norm) -> unscale and clip in one multiplication -> AdamW on the main weights -> copy into the parameter
shards. The caller then gathers the parameters. Alignment gaps and padding have zero gradients and stay zero.

Names travel, offsets stay home: checkpoints see `dict[TensorBox, Tensor]`, each tensor a view of the flat state.

Source: Rajbhandari et al. 2020 (ZeRO), section 5.1; Megatron-LM, `distrib_optimizer.py`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nanotrain.comm.group import Group
from nanotrain.config.config import OptimConfig
from nanotrain.optim.adamw import STATE_NAMES, Stretch, build_adamw, set_step
from nanotrain.optim.clip import clip_factor, global_norm
from nanotrain.parallel.dp.bucket import Bucket
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.parallel.dp.layout import ShardPiece
from nanotrain.precision.loss_scale import LossScale
from nanotrain.precision.policy import Precision
from nanotrain.topology.boxes import TensorBox, flat_range_to_boxes
from nanotrain.topology.params import LocalParam


@dataclass(frozen=True)
class Update:
    """What one optimizer step did.

    Attributes:
        grad_norm: global 2-norm before clipping; not finite if the step was skipped.
        skipped: whether no weight changed.
    """

    grad_norm: float
    skipped: bool


@dataclass(frozen=True)
class _BucketState:
    """This rank's optimizer state of one bucket, flat tensors of the shard's length."""

    bucket: Bucket
    pieces: tuple[ShardPiece, ...]
    main: Tensor
    moments: Mapping[str, Tensor]


class DistributedOptimizer:
    """AdamW on the shards of a data-parallel layer.

    Args:
        data_parallel: whose buckets are updated.
        config: hyperparameters.
        precision: says whether main weights are the parameters themselves.
        loss_scale: the scale that gradients carry; moved by every step.
    """

    def __init__(
        self, data_parallel: DataParallel, config: OptimConfig, *, precision: Precision, loss_scale: LossScale
    ) -> None:
        self.loss_scale = loss_scale
        self.num_updates = 0
        self._clip_grad = config.clip_grad
        self._data_parallel = data_parallel
        self._states = [self._own(bucket, precision) for bucket in data_parallel.buckets]
        stretches = [stretch for state in self._states for stretch in _stretches(state, data_parallel.params)]
        # A rank whose shards hold nothing but padding has no stretch, and torch's optimizers refuse an empty list.
        self._adamw = build_adamw(stretches, config) if stretches else None

    def step(self, lr: float) -> Update:
        """Update this rank's shards from `grad_shard`; every rank returns the same.

        Args:
            lr: the learning rate of this step.
        """
        grads = [state.bucket.grad_shard for state in self._states]
        scale = self.loss_scale.scale
        norm = global_norm(grads, self._shard_group) / scale
        skipped = not math.isfinite(norm)
        self.loss_scale.update(overflowed=skipped)
        if not skipped:
            factor = clip_factor(norm, self._clip_grad) / scale
            if factor != 1.0:
                torch._foreach_mul_(grads, factor)
            self._update(lr)
        return Update(grad_norm=norm, skipped=skipped)

    def publish(self) -> None:
        """Copy the main weights into this rank's part of the parameters."""
        for state in self._states:
            if state.main is not state.bucket.param_shard:
                state.bucket.param_shard.copy_(state.main)

    def held_tensors(self) -> dict[TensorBox, Tensor]:
        """Everything this rank holds, as views to read a checkpoint into."""
        return dict(self._tensors(part=0, num_parts=1))

    def tensors_to_save(self) -> dict[TensorBox, Tensor]:
        """This rank's share of what it holds: replicas divide the writing among themselves."""
        replicate = self._data_parallel.groups.replicate
        return dict(self._tensors(part=replicate.index, num_parts=replicate.size))

    def state(self) -> dict[str, object]:
        """The part of the state that is no tensor, as JSON."""
        return {"num_updates": self.num_updates, "loss_scale": self.loss_scale.state()}

    def load_state(self, state: Mapping[str, object]) -> None:
        """Take up what `state` gave; the tensors were read into `held_tensors` before."""
        num_updates, loss_scale = state["num_updates"], state["loss_scale"]
        assert isinstance(num_updates, int) and isinstance(loss_scale, dict), "a manifest holds what state() wrote"
        self.num_updates = num_updates
        self.loss_scale.load_state(loss_scale)
        if self._adamw is not None:
            set_step(self._adamw, num_updates)
        self.publish()

    @property
    def _shard_group(self) -> Group:
        return self._data_parallel.groups.shard

    def _own(self, bucket: Bucket, precision: Precision) -> _BucketState:
        shard = bucket.param_shard
        main = shard.to(precision.main) if precision.has_own_main_weights else shard
        moments = {name: torch.zeros_like(main) for name in STATE_NAMES}
        return _BucketState(bucket, bucket.layout.pieces(self._shard_group.index), main, moments)

    def _update(self, lr: float) -> None:
        self.num_updates += 1
        if self._adamw is not None:
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
        self.publish()

    def _tensors(self, *, part: int, num_parts: int) -> Iterator[tuple[TensorBox, Tensor]]:
        for state in self._states:
            tensors = {"model": state.main} | {f"optimizer/{name}": t for name, t in state.moments.items()}
            for piece in state.pieces:
                local = self._data_parallel.params[piece.name]
                first, last = (piece.numel * i // num_parts for i in (part, part + 1))
                for prefix, flat in tensors.items():
                    yield from _boxes(f"{prefix}/{piece.name}", local, flat=flat, piece=piece, span=range(first, last))


def _boxes(
    name: str, local: LocalParam, *, flat: Tensor, piece: ShardPiece, span: range
) -> Iterator[tuple[TensorBox, Tensor]]:
    """The elements `span` of a piece as boxes of the global tensor, with their views of the flat shard."""
    begin = piece.shard_start + span.start
    first = piece.param_start + span.start
    for box in flat_range_to_boxes(local.box.shape, first, first + len(span)):
        view = flat[begin : begin + box.numel].view(box.shape)
        yield TensorBox(name, local.spec.shape, box.shifted(local.box.start)), view
        begin += box.numel


def _stretches(state: _BucketState, params: Mapping[str, LocalParam]) -> list[Stretch]:
    """Merge neighbouring pieces with the same weight decay; fewer, longer tensors make a faster update."""
    ends: list[tuple[int, bool]] = []
    for piece in state.pieces:
        decays, end = params[piece.name].spec.decays, piece.shard_start + piece.numel
        if ends and ends[-1][1] is decays:
            ends[-1] = (end, decays)
        else:
            ends.append((end, decays))
    stretches, start = [], 0
    for end, decays in ends:
        stretches.append(_stretch(state, slice(start, end), decays=decays))
        start = end
    return stretches


def _stretch(state: _BucketState, elements: slice, *, decays: bool) -> Stretch:
    weight = state.main[elements].detach()
    weight.grad = state.bucket.grad_shard[elements]
    return Stretch(weight, {name: flat[elements] for name, flat in state.moments.items()}, decays)
