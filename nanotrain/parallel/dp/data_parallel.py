"""The data-parallel layer: a stage's parameters and gradients in flat storage, reduced and gathered by buckets.

1. Construction moves every parameter of the stage into one flat buffer, as a view, and lays out its gradients.
2. `begin_step`, then for each microbatch `backward_begins` and `backward_ended`: hooks take each gradient the
   moment autograd has it. The schedule says which backward is the stage's last.
3. `finish_grad_reduce`: from here `buckets[i].grad_shard` holds this rank's part of the summed gradients.
4. The optimizer updates `buckets[i].param_shard`; `start_param_gather` spreads the result.
5. The next forward pass waits, unit by unit, for the parameters it is about to use.

What travels, and when (the group is the bucket's shard group, or its replicate group under `no_shard`):

    strategy      gradients                               parameters
    no_shard      all-reduce after the last microbatch    -
    optim         reduce-scatter after the last one       all-gather after the step
    optim_grads   reduce-scatter after every one          all-gather after the step

Buckets are reduced in buffer order on every rank, whatever the order in which their gradients arrive: two ranks
that disagreed about the order would hang NCCL.

Source: Rajbhandari et al. 2020 (ZeRO), sections 5.1-5.2; Megatron-LM core, `distributed_data_parallel.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from nanotrain.parallel.dp.bucket import Bucket, GradPool, ReduceGroups, ResidentBucket, TransientBucket
from nanotrain.parallel.dp.layout import BufferLayout, LayoutRules, plan_layout
from nanotrain.parallel.dp.strategy import Strategy
from nanotrain.precision.policy import Precision
from nanotrain.topology.params import LocalParam

# One bucket fills while another is on the wire; a third would only hold memory.
MAX_OPEN_BUCKETS = 2
# One reduction is on the wire and another follows at once. More would only hold memory: on gloo each has (d-1)/d of its
# bucket to receive into, which is kept (measured, 13 buckets: 39 MiB with all in flight, 10.5 with two, no slower).
MAX_REDUCTIONS = 2


@dataclass(frozen=True)
class DataParallelOptions:
    """How one buffer behaves.

    Attributes:
        strategy: what the shard group shares.
        rules: where buckets end; `rules.num_shards` is the size of the shard group.
        overlap_grad_reduce: reduce a bucket as soon as it is complete.
        overlap_param_gather: return from `start_param_gather` before the parameters have arrived.
    """

    strategy: Strategy
    rules: LayoutRules
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False


class DataParallel:
    """Flat storage and communication of one stage's parameters.

    Args:
        stage: the module; its parameters may be on the meta device, and are replaced.
        params: what this rank holds of each parameter, in registration order.
        groups: the shard and replicate groups.
        options: strategy, layout rules and overlap.
        precision: dtypes of parameters and gradients.
        device: where the storage lies.
    """

    def __init__(
        self,
        stage: nn.Module,
        params: Sequence[LocalParam],
        *,
        groups: ReduceGroups,
        options: DataParallelOptions,
        precision: Precision,
        device: torch.device,
    ) -> None:
        whole = options.strategy.shard_optim or groups.shard.size == 1
        assert whole, "a rank that owns a part of an unsharded bucket would never receive the others' weights"
        alone = groups.shard.size == 1 or groups.replicate.size == 1
        assert alone, "a bucket is reduced over one group only: replicas of shards would drift apart"
        self.groups, self.options = groups, options
        self.params = {param.spec.name: param for param in params}
        self.layout: BufferLayout = plan_layout(params, options.rules)
        self.param_buffer = torch.zeros(self.layout.numel, dtype=precision.params, device=device)
        self.buckets = _build_buckets(self, precision.grads)
        self._bucket_of = {slot.name: bucket for bucket in self.buckets for slot in bucket.layout.slots}
        self._num_started = 0
        self._in_flight: list[Bucket] = []
        self._is_last_microbatch = False
        self._adopt(stage)

    def begin_step(self) -> None:
        """A new step: gradients of the last one no longer count."""
        for bucket in self.buckets:
            bucket.begin_step()

    def backward_begins(self, *, is_last: bool) -> None:
        """A microbatch's backward pass begins on this stage; `is_last` if no other follows in this step."""
        self._is_last_microbatch = is_last
        self._num_started = 0
        for bucket in self.buckets:
            bucket.expect_all()

    def backward_ended(self) -> None:
        """The backward pass of a microbatch is over; parameters it left out count as zero."""
        if self._reduces_now:
            self._start_reductions(until=len(self.buckets))

    def finish_grad_reduce(self) -> None:
        """Sum the gradients over the ranks; afterwards every `grad_shard` is complete."""
        self._start_reductions(until=len(self.buckets))
        while self._in_flight:
            self._finish_oldest()
        # A unit that no forward pass used has not waited, and the optimizer is about to overwrite what is being sent.
        self.finish_param_gather()

    def start_param_gather(self) -> None:
        """Spread the updated shards; the last bucket holds the first layers, so it goes first."""
        for bucket in reversed(self.buckets):
            bucket.start_all_gather()
        if not self.options.overlap_param_gather:
            self.finish_param_gather()

    def finish_param_gather(self) -> None:
        """Wait until all parameters are complete; only those who bypass the stage's forward need to call it."""
        for bucket in reversed(self.buckets):
            bucket.finish_gather()

    def grad_pieces(self, axis: str) -> list[torch.Tensor]:
        """This rank's reduced gradients of the parameters that are also summed over `axis`, as flat views.

        Ranks along the axis hold the same parameters in the same layout, so their lists match.
        """
        return [
            bucket.grad_shard[piece.shard_start : piece.shard_start + piece.numel]
            for bucket in self.buckets
            for piece in bucket.layout.pieces(self.groups.shard.index)
            if axis in self.params[piece.name].spec.grad_sum_axes
        ]

    @property
    def _reduces_now(self) -> bool:
        """Whether a complete bucket is reduced during this backward pass rather than at the end of the step."""
        overlaps_last = self.options.overlap_grad_reduce and self._is_last_microbatch
        return self.options.strategy.shard_grads or overlaps_last

    def _take_grad(self, name: str, param: torch.Tensor) -> None:
        grad, param.grad = param.grad, None
        if grad is None:
            return
        bucket = self._bucket_of[name]
        self._make_room(bucket)
        bucket.add_grad(name, grad)
        if self._reduces_now:
            unready = (i for i, b in enumerate(self.buckets) if i >= self._num_started and not b.is_ready)
            self._start_reductions(until=next(unready, len(self.buckets)))

    def _start_reductions(self, *, until: int) -> None:
        for bucket in self.buckets[self._num_started : until]:
            self._make_room(bucket)
            while len(self._in_flight) >= MAX_REDUCTIONS:
                self._finish_oldest()
            bucket.start_reduce()
            self._in_flight.append(bucket)
            if not self.options.overlap_grad_reduce and self.options.strategy.shard_grads:
                self._finish_oldest()
        self._num_started = max(self._num_started, until)

    def _make_room(self, bucket: Bucket) -> None:
        """Before a bucket is written: its last reduction must be over, and storage to lend must be left."""
        while bucket.is_in_flight:
            self._finish_oldest()
        if self.options.strategy.shard_grads and not bucket.is_open:
            while self._in_flight and sum(b.is_open for b in self.buckets) >= MAX_OPEN_BUCKETS:
                self._finish_oldest()

    def _finish_oldest(self) -> None:
        self._in_flight.pop(0).finish_reduce()

    def _adopt(self, stage: nn.Module) -> None:
        """Put views of the flat buffer in place of the stage's parameters, and hook them."""
        for name, local in self.params.items():
            view = self._bucket_of[name].slot(name, self._bucket_of[name].params).view(local.box.shape)
            param = nn.Parameter(view)
            owner, _, leaf = name.rpartition(".")
            stage.get_submodule(owner)._parameters[leaf] = param
            param.register_post_accumulate_grad_hook(partial(self._take_grad, name))
        # A unit without parameters of its own, the head of a tied model, works with those that are tied to it.
        tied = [name for name, local in self.params.items() if local.spec.is_tied]
        for unit_name, unit in units_of(stage):
            own = [name for name in self.params if name.startswith(unit_name + ".")]
            used = {id(bucket): bucket for bucket in (self._bucket_of[name] for name in own or tied)}
            if used:
                unit.register_forward_pre_hook(partial(_wait_for_params, tuple(used.values())))


def units_of(stage: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The named parts of a stage that run one after another: its children, lists and dicts of modules taken apart."""
    for name, child in stage.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from ((f"{name}.{key}", part) for key, part in child.named_children())
        else:
            yield name, child


def _wait_for_params(buckets: tuple[Bucket, ...], *_hook_arguments: Any) -> None:
    for bucket in buckets:
        bucket.finish_gather()


def _build_buckets(owner: DataParallel, grad_dtype: torch.dtype) -> tuple[Bucket, ...]:
    params, layout, groups = owner.param_buffer, owner.layout, owner.groups
    if owner.options.strategy.shard_grads:
        pool = GradPool(max(b.numel for b in layout.buckets), device=params.device, dtype=grad_dtype)
        shards = torch.zeros(layout.numel // groups.shard.size, dtype=grad_dtype, device=params.device)
        pieces = shards.split([b.shard_numel for b in layout.buckets])
        return tuple(
            TransientBucket(b, params[b.start : b.stop], groups=groups, grad_shard=piece, pool=pool)
            for b, piece in zip(layout.buckets, pieces, strict=True)
        )
    grads = torch.zeros(layout.numel, dtype=grad_dtype, device=params.device)
    return tuple(
        ResidentBucket(b, params[b.start : b.stop], groups=groups, grads=grads[b.start : b.stop])
        for b in layout.buckets
    )
