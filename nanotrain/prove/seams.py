"""The places of a step where a type is declared, or where a type must hold.

declared   batches (samples differ), weights (as their spec shards them), a slice of an equal
           tensor, a tensor on the first rank only, gradients that enter a reduction
must hold  every gradient is reduced over all its axes before the norm; the norm counts every
           element once; all ranks scale and step alike; updated weights are gathered
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from nanotrain.comm import autograd
from nanotrain.comm.group import Group
from nanotrain.comm.recorder import place
from nanotrain.data.batch import Batch
from nanotrain.kernels import grouped
from nanotrain.model import norm
from nanotrain.optim.distributed import DistributedOptimizer
from nanotrain.optim.matrix_update import MatrixUpdate
from nanotrain.optim.rule import UpdateStep
from nanotrain.optim.state import BucketState, Replica
from nanotrain.parallel.dp.bucket import Bucket, ParamBucket, Reduction
from nanotrain.parallel.dp.layout import FlatRange
from nanotrain.parallel.pp import executor
from nanotrain.parallel.tp import loss
from nanotrain.plan.plan import Plan
from nanotrain.prove.axes import Axes, Digit
from nanotrain.prove.messages import MessageTypes
from nanotrain.prove.rules import TypedRecorder
from nanotrain.prove.types import ZERO, Type, join
from nanotrain.spec.params import LocalParam, ParamSpec, localize
from nanotrain.topology.groups import GroupName
from nanotrain.topology.topology import Topology
from nanotrain.train import step
from nanotrain.train.batches import GlobalBatch
from nanotrain.train.run import Run

_RMS_NORM = functional.rms_norm
_SOFTMAX_GRADIENT = loss.softmax_gradient


@dataclass
class Seams:
    """The seams of one rank.

    Attributes:
        typed: names of the parameters whose gradients have types.
    """

    plan: Plan
    axes: Axes
    recorder: TypedRecorder
    typed: set[str] = field(default_factory=set)
    # elements in the gradient norm, and axes along which this rank alone counts them
    _counted: list[tuple[Tensor, int]] = field(default_factory=list)
    _bucket: Bucket | None = None  # whose reduction starts
    # axes that do not shard a parameter but along which ranks update different elements of it
    _shards: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Declare and check types inside the block."""
        with ExitStack() as stack:
            for owner, name, wrap in self._wrapped():
                original = getattr(owner, name)
                stack.enter_context(patch.object(owner, name, wrap(original)))
            yield

    def _wrapped(self) -> list[tuple[object, str, Any]]:
        """For each function of the seams: its owner, its name, and a function that wraps it."""
        messages = MessageTypes(self.plan, axes=self.axes, recorder=self.recorder)
        return [
            # kernels whose stand-ins on the meta device compute nothing
            (functional, "rms_norm", lambda stand_in: _RMS_NORM),
            (loss, "softmax_gradient", lambda stand_in: _SOFTMAX_GRADIENT),
            (grouped, "_grouped_mm", self._grouped_mm),
            # small widths would have products that the host waits for
            (grouped.LoopedMM, "is_looped", lambda original: lambda *_: False),
            (autograd, "_local_slice", self._slice),
            (Group, "once", self._once),
            (norm, "reduce_from", self._count_copies),
            (DistributedOptimizer, "step", self._optimizer_step),
            (Bucket, "start_reduce", self._start_reduce),
            (Reduction, "start_inside", self._start_inside),
            (BucketState, "grads_for_norm", self._grads_for_norm),
            (DistributedOptimizer, "_scale_grads", self._scale_grads),
            (DistributedOptimizer, "_run_rules", self._run_rules),
            (step, "run_schedule", self._run_schedule),
            (executor._Step, "start_transfers", messages.start_transfers),
            (MatrixUpdate, "run", self._matrix_update),
        ]

    def declare_weights(self, run: Run) -> None:
        """Give the parameters of a run the types of their specs."""
        types = self.recorder.types
        for data_parallel in run.data_parallel:
            groups = data_parallel.groups
            shards = self.axes.mask(groups.shard.ranks) | self.axes.mask(groups.outer.ranks)
            for bucket in data_parallel.buckets:
                for tensor in (bucket.params.shard, bucket.params.update):
                    for part in _ranges_of(tensor, bucket):
                        kind = Type(self.sharded(part.param.spec) | shards)
                        types.set(tensor[part.elements], kind)
                for entry in bucket.layout.params:
                    self._shards[entry.name] = shards
                    view = bucket.view(entry.name, bucket.params.full)
                    types.set(view, Type(self.sharded(entry.param.spec)))

    def declare_batch(self, batch: GlobalBatch) -> GlobalBatch:
        """Give the tensors of a batch types: ranks of dp and cp have other tokens.

        Returns:
            the batch with the target tokens of all ranks, which the recorded world makes up.
        """
        kind = Type(self.axes.masks["dp_cp"])
        for microbatch in batch.microbatches:
            for tensor in _tensors_of(microbatch):
                self.recorder.types.set(tensor, kind)
        config = self.plan.config
        # all tokens of mock data are targets
        num_local = config.train.micro_batch_size * config.data.seq_length * len(batch.microbatches)
        num_readers = len({*self.plan.topology.end_ranks})
        num_readers *= self.plan.topology.size("tp") * self.plan.topology.size("cp")
        made_up = num_local * self.plan.topology.world_size / num_readers
        is_reader = self.plan.groups["pp"].index in self.plan.topology.end_ranks
        if is_reader and round(made_up) != batch.num_target_tokens:
            self.recorder.fault(
                f"{num_readers} ranks read a sample, whose target tokens count as those of "
                f"{num_local * self.plan.topology.world_size / batch.num_target_tokens:g}"
            )
        return replace(batch, num_target_tokens=num_local * self.plan.topology.size("dp"))

    def check_weights(self, run: Run) -> None:
        """Check after a step that ranks with the same elements of a parameter agree on them."""
        for data_parallel in run.data_parallel:
            for bucket in data_parallel.buckets:
                if data_parallel.options.strategy.shard_params:
                    continue  # gathered by unit, in the next forward
                for entry in bucket.layout.params:
                    kind = self.recorder.types.of(bucket.view(entry.name, bucket.params.full))
                    wrong = 0 if kind is ZERO else kind.differs & ~self.sharded(entry.param.spec)
                    if wrong:
                        axis = self.axes.describe(wrong)
                        self.recorder.fault(
                            f"after the step {entry.name} is not equal over {axis}: its shards are "
                            "not gathered, or the ranks update it differently"
                        )

    def sharded(self, spec: ParamSpec) -> int:
        """The axes along which ranks hold other elements of a parameter."""
        mask = self.axes.masks["pp"]
        for shard in spec.shards:
            mask |= self.axes.masks[shard.axis]
        return mask

    def _grouped_mm(self, stand_in: Any) -> Any:
        """`grouped._grouped_mm`, whose stand-in makes a tensor of the right shape."""

        def wrapper(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
            out: Tensor = stand_in(a, b, offs=offs)
            types = self.recorder.types
            types.set(out, join([types.of(a), types.of(b)]))
            return out

        return wrapper

    def _slice(self, original: Any) -> Any:
        """`autograd._local_slice`: every rank of the group takes another slice."""

        def wrapper(tensor: Tensor, group: Group, *, dim: int) -> Tensor:
            kind = self.recorder.types.of(tensor)
            out = torch.empty_like(original(tensor, group=group, dim=dim))
            differs = 0 if kind is ZERO else kind.differs
            self.recorder.types.set(out, Type(differs | self.axes.mask(group.ranks)))
            return out

        return wrapper

    def _count_copies(self, original: Any) -> Any:
        """`norm.reduce_from`: if several ranks hold a head, each adds a share of its squares."""

        def wrapper(squares: Tensor, group: Group) -> Tensor:
            kind = self.recorder.types.of(squares)
            differs = 0 if kind is ZERO else kind.differs
            self.recorder.types.set(squares, Type(differs | self.axes.mask(group.ranks)))
            total: Tensor = original(squares, group)
            return total

        return wrapper

    def _optimizer_step(self, original: Any) -> Any:
        """`DistributedOptimizer.step`: its `sums` have numbers of a stage's layers, else zeros.

        Its squares of gradients have a seam of their own, whichever arithmetic sums them.
        """

        def wrapper(optimizer: DistributedOptimizer, *args: Any, **options: Any) -> Any:
            sums: Tensor | None = options.get("sums")
            kind = ZERO if sums is None else self.recorder.types.of(sums)
            if sums is not None and kind is not ZERO:
                stages = self.axes.masks["pp"]
                self.recorder.types.set(sums, kind._replace(varying=kind.varying | stages))
            arithmetic = optimizer._arithmetic
            local = self._squared_norm(arithmetic.local)
            with patch.object(optimizer, "_arithmetic", replace(arithmetic, local=local)):
                return original(optimizer, *args, **options)

        return wrapper

    def _once(self, original: Any) -> Any:
        """`Group.once`: the first rank keeps its values and the others get zeros: a partial sum."""

        def wrapper(group: Group, tensor: Tensor) -> Tensor:
            kind = self.recorder.types.of(tensor)
            out = torch.empty_like(tensor)
            if kind is not ZERO:
                mask = self.axes.mask(group.ranks)
                equal = mask & ~kind.differs
                if equal != mask:
                    axis = self.axes.describe(mask & kind.differs)
                    self.recorder.fault(
                        f"of values that vary over {axis} only those of the first rank are kept, "
                        f"at {place()}"
                    )
                self.recorder.types.set(out, kind._replace(partial=kind.partial | equal))
            return out

        return wrapper

    def _start_reduce(self, original: Any) -> Any:
        """`Bucket.start_reduce`: remember the bucket."""

        def wrapper(bucket: Bucket, *, is_last: bool) -> None:
            self._bucket = bucket
            original(bucket, is_last=is_last)

        return wrapper

    def _start_inside(self, original: Any) -> Any:
        """`Reduction.start_inside`: gradients of an equal weight that differ are partial sums."""

        def wrapper(reduction: Reduction, full: Tensor) -> Any:
            bucket = self._bucket
            assert bucket is not None, "a reduction is started by its bucket"
            for entry in bucket.layout.params:
                self._declare_grad(bucket.view(entry.name, full), entry.param.spec)
            return original(reduction, full)

        return wrapper

    def _declare_grad(self, grad: Tensor, spec: ParamSpec) -> None:
        """The type of an unreduced gradient."""
        kind = self.recorder.types.of(grad)
        if kind is ZERO:
            return
        sharded = self.sharded(spec)
        partial = kind.differs & ~sharded
        if self._is_at_both_ends(spec):
            partial |= self.axes.ends
        declared = Type(varying=sharded, partial=partial, factor=1.0, name=spec.name)
        self.recorder.types.set(grad, declared)
        self.typed.add(spec.name)

    def _is_at_both_ends(self, spec: ParamSpec) -> bool:
        """Whether the first and the last stage have a copy of a parameter each."""
        shape = self.plan.shape
        is_used = shape.is_tied or shape.num_mtp_layers > 0
        is_word = spec.is_embedding_or_output and spec.unit == "embedding"
        return is_used and is_word and len(self.axes.end_ranks) > 1

    def _grads_for_norm(self, original: Any) -> Any:
        """`BucketState.grads_for_norm`: note the elements that this rank alone adds to the norm.

        Along each axis, elements are alone if the rank with the next value does not add them too.
        """

        def wrapper(state: BucketState) -> list[Tensor]:
            counted = list(original(state))
            for bit, digit in enumerate(self.axes.digits):
                if self.axes.masks["pp"] & 1 << bit:
                    continue
                neighbour = _neighbour(self.plan.rank, digit)
                others = list(original(_as_rank(state, neighbour, topology=self.plan.topology)))
                for tensor in counted:
                    for part in _without(tensor, others, flat=state.grads):
                        self._counted.append((part, 1 << bit))
            return counted

        return wrapper

    def _squared_norm(self, original: Any) -> Any:
        """`StepArithmetic.local`: check that one rank adds each element, and type the sum."""

        def wrapper(grad_shards: Sequence[Tensor], *, device: torch.device) -> Tensor:
            for shard in grad_shards:
                self._check_counted_once(shard)
            result: Tensor = original(grad_shards, device=device)
            self.recorder.types.set(result, Type(partial=self.axes.world))
            return result

        return wrapper

    def _check_counted_once(self, shard: Tensor) -> None:
        """Check that no other rank adds the same elements to the norm."""
        offset = int(shard.storage_offset())
        for first, last, kind in self.recorder.types.pieces(shard):
            if kind is ZERO or first == last:
                continue
            once = 0
            for part, mask in self._counted:
                if _covers(part, shard, first=offset + first, last=offset + last):
                    once |= mask
            several = self.axes.world & ~kind.differs & ~once & ~self._shards.get(kind.name, 0)
            if several:
                axis = self.axes.describe(several)
                self.recorder.fault(
                    f"the norm counts the gradient of {kind.name} once per rank of {axis}"
                )
            missing = once & kind.varying
            if missing:
                axis = self.axes.describe(missing)
                self.recorder.fault(
                    f"the norm leaves out the gradient of {kind.name} on other ranks of {axis}"
                )

    def _check_reduced(self, grads: Tensor) -> None:
        """Check that gradients are complete."""
        expected = 1 / self.plan.num_averaged_ranks
        for first, last, kind in self.recorder.types.pieces(grads):
            if kind is ZERO or first == last:
                continue
            if kind.factor is None:
                self.recorder.fault("gradients reach the optimizer that no bucket has reduced")
            if kind.partial:
                axis = self.axes.describe(kind.partial)
                self.recorder.fault(f"the gradient of {kind.name} is not summed over {axis}")
            if kind.factor is not None and abs(kind.factor / expected - 1) > 1e-9:
                self.recorder.fault(
                    f"the gradient of {kind.name} is multiplied by {kind.factor:g} when it is "
                    f"reduced, where the loss expects {expected:g}"
                )

    def _scale_grads(self, original: Any) -> Any:
        """`DistributedOptimizer._scale_grads`: check that all ranks have the same factor."""

        def wrapper(optimizer: DistributedOptimizer, factor: Tensor) -> None:
            self._check_equal(factor, "the factor that clips gradients")
            for grads in optimizer._grads:
                self._check_reduced(grads)
            original(optimizer, factor)

        return wrapper

    def _run_rules(self, original: Any) -> Any:
        """`DistributedOptimizer._run_rules`: check that all ranks take the same step."""

        def wrapper(optimizer: DistributedOptimizer, update: UpdateStep) -> None:
            self._check_equal(update.number, "the number of updates")
            self._check_equal(update.found_inf, "whether the step is skipped")
            original(optimizer, update)

        return wrapper

    def _run_schedule(self, original: Any) -> Any:
        """`run_schedule`: check that the loss is divided by the target tokens of all ranks."""

        def wrapper(*args: Any, grad_scale: float | Tensor, **kwargs: Any) -> Tensor:
            if isinstance(grad_scale, float):
                config = self.plan.config
                num_samples = config.train.global_batch_size or 0
                expected = self.plan.num_averaged_ranks / (num_samples * config.data.seq_length)
                if abs(grad_scale / expected - 1) > 1e-9:
                    self.recorder.fault(
                        f"the gradient of the loss is multiplied by {grad_scale:g}, where "
                        f"{expected:g} is the mean over the target tokens of all ranks"
                    )
            total: Tensor = original(*args, grad_scale=grad_scale, **kwargs)
            return total

        return wrapper

    def _matrix_update(self, original: Any) -> Any:
        """`MatrixUpdate.run`: owners of whole matrices send each rank the update of its shard."""

        def wrapper(update: MatrixUpdate, values: UpdateStep, *, device: torch.device) -> None:
            original(update, values, device=device)
            for bucket in update._buckets:
                for state in bucket.parts:
                    for entry in state.part.ranges:
                        first = entry.start - state.part.start
                        elements = state.main.values[first : first + entry.numel]
                        spec = entry.param.spec
                        kind = Type(self.sharded(spec) | self._shards[spec.name])
                        self.recorder.types.set(elements, kind)

        return wrapper

    def _check_equal(self, tensor: Tensor, what: str) -> None:
        """Check that a tensor is equal on all ranks; `what` names it in the fault."""
        kind = self.recorder.types.of(tensor)
        if kind is not ZERO and kind.differs:
            axis = self.axes.describe(kind.differs)
            self.recorder.fault(f"{what} is not equal over {axis}")


def _ranges_of(tensor: Tensor, bucket: ParamBucket) -> tuple[FlatRange, ...]:
    """The param ranges of a tensor: of this rank's shard, or of the part that it updates."""
    if tensor.numel() == bucket.layout.update_numel:
        return bucket.update_ranges
    whole = replace(bucket.layout, num_outer_shards=1)
    return whole.update_ranges(bucket.params._groups.shard.index)


def _tensors_of(batch: Batch) -> Iterator[Tensor]:
    """The tensors of a microbatch."""
    for value in vars(batch).values():
        if isinstance(value, Tensor):
            yield value
    for depth in batch.mtp:
        yield from _tensors_of(depth)


def _neighbour(rank: int, digit: Digit) -> int:
    """The rank with the next value of a digit."""
    value = rank // digit.stride % digit.size
    return rank + digit.stride * ((value + 1) % digit.size - value)


def _as_rank(state: BucketState, rank: int, *, topology: Topology) -> Any:
    """A state as `grads_for_norm` reads it on another rank, with the gradients of this one."""
    ranges = []
    for part in state.bucket.update_ranges:
        ranges.append(replace(part, param=_param_on(part.param.spec, rank, topology=topology)))
    groups = state.bucket._reduction.groups
    replica = Replica(0, 1)
    if not groups.shards_across:
        ranks = topology.members(rank, groups.replicate.name)
        replica = Replica(ranks.index(rank), len(ranks))
    bucket = SimpleNamespace(update_ranges=ranges, layout=state.bucket.layout)
    return SimpleNamespace(replica=replica, bucket=bucket, grads=state.grads)


def _param_on(spec: ParamSpec, rank: int, *, topology: Topology) -> LocalParam:
    """The part of a parameter that another rank holds."""
    coords = topology.coords(rank)
    sizes = {axis: topology.size(cast(GroupName, axis)) for axis in coords}
    return localize(spec, coords=coords, sizes=sizes)


def _without(tensor: Tensor, others: Sequence[Tensor], *, flat: Tensor) -> Iterator[Tensor]:
    """The parts of a slice of `flat` that no other slice of it covers."""
    first = tensor.storage_offset() - flat.storage_offset()
    stop = first + tensor.numel()
    for other in sorted(others, key=Tensor.storage_offset):
        begin = other.storage_offset() - flat.storage_offset()
        end = begin + other.numel()
        if end <= first or stop <= begin:
            continue
        if first < begin:
            yield flat[first:begin]
        first = end
    if first < stop:
        yield flat[first:stop]


def _covers(part: Tensor, shard: Tensor, *, first: int, last: int) -> bool:
    """Whether a flat tensor has elements [first, last) of the storage of another one."""
    if part.untyped_storage()._cdata != shard.untyped_storage()._cdata:
        return False
    start = part.storage_offset()
    return start <= first and last <= start + part.numel()
