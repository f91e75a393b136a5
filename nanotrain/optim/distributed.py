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
from collections.abc import Iterator, Mapping, Sequence
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

    layer: DataParallel
    bucket: Bucket
    pieces: tuple[ShardPiece, ...]
    main: Tensor
    moments: Mapping[str, Tensor]


class DistributedOptimizer:
    """AdamW on the shards of a rank's data-parallel layers.

    Args:
        layers: whose buckets are updated: one per stage, and one per stage for its experts.
        config: hyperparameters.
        precision: says whether main weights are the parameters themselves.
        loss_scale: the scale that gradients carry; moved by every step.
        world: all ranks, which share one gradient norm.
    """

    def __init__(
        self,
        layers: Sequence[DataParallel],
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
        self._states = [_own(layer, bucket, precision=precision) for layer in layers for bucket in layer.buckets]
        stretches = [stretch for state in self._states for stretch in _stretches(state)]
        # A rank whose shards hold nothing but padding has no stretch, and torch's optimizers refuse an empty list.
        self._adamw = build_adamw(stretches, config) if stretches else None

    def step(self, lr: float) -> Update:
        """Update this rank's shards from `grad_shard`; every rank returns the same.

        Args:
            lr: the learning rate of this step.
        """
        grads = [state.bucket.grad_shard for state in self._states]
        scale = self.loss_scale.scale
        counted = [grad for state in self._states for grad in _counted_grads(state)]
        norm = global_norm(counted, self._world) / scale
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
        return dict(self._tensors(only_first_copies=False))

    def held_grads(self) -> dict[TensorBox, Tensor]:
        """The reduced gradients of the last step that this rank holds, as views; after `step` they are clipped."""
        return {
            box: view
            for state in self._states
            for piece in state.pieces
            for box, view in _boxes(
                piece.name,
                state.layer.params[piece.name],
                flat=state.bucket.grad_shard,
                piece=piece,
                span=range(piece.numel),
            )
        }

    def tensors_to_save(self) -> dict[TensorBox, Tensor]:
        """This rank's share of what it holds: copies are left out, replicas divide the writing among themselves."""
        return dict(self._tensors(only_first_copies=True))

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

    def _update(self, lr: float) -> None:
        self.num_updates += 1
        if self._adamw is not None:
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
        self.publish()

    def _tensors(self, *, only_first_copies: bool) -> Iterator[tuple[TensorBox, Tensor]]:
        for state in self._states:
            tensors = {"model": state.main} | {f"optimizer/{name}": t for name, t in state.moments.items()}
            replicate = state.layer.groups.replicate
            part, num_parts = (replicate.index, replicate.size) if only_first_copies else (0, 1)
            for piece in state.pieces:
                local = state.layer.params[piece.name]
                if only_first_copies and not local.is_first_replica:
                    continue
                first, last = (piece.numel * i // num_parts for i in (part, part + 1))
                for prefix, flat in tensors.items():
                    yield from _boxes(f"{prefix}/{piece.name}", local, flat=flat, piece=piece, span=range(first, last))


def _own(layer: DataParallel, bucket: Bucket, *, precision: Precision) -> _BucketState:
    shard = bucket.param_shard
    main = shard.to(precision.main) if precision.has_own_main_weights else shard
    moments = {name: torch.zeros_like(main) for name in STATE_NAMES}
    return _BucketState(layer, bucket, bucket.layout.pieces(layer.groups.shard.index), main, moments)


def _counted_grads(state: _BucketState) -> Iterator[Tensor]:
    """The stretches of gradients that this rank counts in the norm: of all copies of an element one is counted.

    Runs of neighbours are merged, gaps and padding (zeros) included, so a bucket without copies is one tensor.
    """
    if not state.layer.groups.replicate.is_first:
        return
    start, end = 0, state.bucket.layout.shard_numel
    for piece in state.pieces:
        if not state.layer.params[piece.name].is_first_replica:
            if start < piece.shard_start:
                yield state.bucket.grad_shard[start : piece.shard_start]
            start = piece.shard_start + piece.numel
    if start < end:
        yield state.bucket.grad_shard[start:end]


def _boxes(
    name: str, local: LocalParam, *, flat: Tensor, piece: ShardPiece, span: range
) -> Iterator[tuple[TensorBox, Tensor]]:
    """The elements `span` of a piece as boxes of the global tensor, with their views of the flat shard."""
    begin = piece.shard_start + span.start
    first = piece.param_start + span.start
    for box in flat_range_to_boxes(local.box.shape, start=first, stop=first + len(span)):
        view = flat[begin : begin + box.numel].view(box.shape)
        yield TensorBox(name, local.spec.shape, box.shifted(local.box.start)), view
        begin += box.numel


def _stretches(state: _BucketState) -> list[Stretch]:
    """Merge neighbouring pieces with the same weight decay; fewer, longer tensors make a faster update."""
    ends: list[tuple[int, bool]] = []
    for piece in state.pieces:
        decays, end = state.layer.params[piece.name].spec.weight_decay, piece.shard_start + piece.numel
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
