"""Data-parallel wrapper of a module: flat buffers, gradient reduction, parameter all-gather.

1. Construction makes every parameter of the module a view of one flat buffer and allocates the
   gradients.
2. `begin_step`, then per microbatch `backward_begins` and `backward_ended`. A hook takes each
   gradient as soon as autograd has accumulated it; products may write theirs into the bucket, and
   the hook marks them as ready. The pipeline schedule decides which backward is the last of the
   step.
3. `finish_grad_reduce`: `buckets[i].grads.main` holds this rank's part of the summed gradients.
4. The optimizer updates `buckets[i].params.update`; `start_param_gather` all-gathers the result.
5. The next forward pass waits, unit by unit, for the parameters it uses.

    strategy             gradients                                  parameters
    no_shard             all-reduce after the last microbatch       -
    optim                reduce-scatter after the last microbatch   all-gather after the step
    optim_grads          reduce-scatter after every microbatch      all-gather after the step
    optim_grads_params   reduce-scatter after every microbatch      all-gather per unit, `units.py`

Reduce-scatter and all-gather run inside the shard group. With several optimizer instances (HSDP) an
all-reduce of the shard across the replicate group follows the last reduce-scatter. Where optimizer
state is sharded across instances too, a reduce-scatter does, and updated shards are all-gathered
across instances first.

Buckets are reduced in buffer order on every rank, independent of the order in which gradients are
ready: collectives that two ranks issue in different orders deadlock on NCCL. This holds across both
groups too. With overlap, the reduction across of bucket i starts right before the reduce-scatter of
bucket i + MAX_REDUCTIONS.

At most MAX_REDUCTIONS are in flight if a reduction holds memory or is followed by another one.
Otherwise there is no limit: on NCCL a wait in the backward would delay the rest of the backward
until the reduction is complete.

Source: Rajbhandari et al. 2020 (ZeRO), sections 5.1-5.2; Megatron-LM core,
`distributed_data_parallel.py` and `param_and_grad_buffer.py`.
"""

from functools import partial

import torch
from torch import Tensor, nn

from nanotrain.kernels.linear import GradView, attach
from nanotrain.parallel.dp.bucket import Bucket, Reduction
from nanotrain.parallel.dp.layout import BufferLayout
from nanotrain.parallel.dp.options import MAX_FULL_BUCKETS, DataParallelOptions, ReduceGroups
from nanotrain.parallel.dp.param_buffer import ParamBuffer
from nanotrain.parallel.dp.stores import build_grads
from nanotrain.parallel.dp.units import traced_units
from nanotrain.precision.dtypes import Precision

# One reduction runs and the next is queued. More would hold memory on gloo, which receives into
# (d-1)/d of a bucket (measured, 13 buckets: 39 MiB with all in flight, 10.5 with two, no slower),
# and full-size gradients of a pool.
MAX_REDUCTIONS = 2


class DataParallel(ParamBuffer):
    """Flat buffers of one module's trained parameters and their gradients, and their collectives.

    Arguments as for `ParamBuffer`.
    """

    buckets: tuple[Bucket, ...]

    def __init__(
        self,
        module: nn.Module,
        layout: BufferLayout,
        *,
        groups: ReduceGroups,
        options: DataParallelOptions,
        precision: Precision,
        device: torch.device,
    ) -> None:
        self._grad_dtype = precision.grads
        self._num_started = 0  # buckets whose reduction was started in this backward
        self._in_flight: list[Bucket] = []
        self._is_last_microbatch = True
        self._in_backward = False
        super().__init__(
            module, layout, groups=groups, options=options, precision=precision, device=device
        )
        self._bucket_of: dict[str, Bucket] = {}
        for bucket in self.buckets:
            self._bucket_of |= dict.fromkeys(bucket.layout.names, bucket)
        self._register_grad_hooks()

    def begin_step(self) -> None:
        """Start a step: discard the gradients of the last one."""
        super().begin_step()
        self._num_started = 0
        self._is_last_microbatch = True
        for bucket in self.buckets:
            bucket.begin_step()

    def backward_begins(self, *, is_last: bool) -> None:
        """Start the backward of a microbatch; `is_last` for the last one of the step."""
        super().backward_begins(is_last=is_last)
        self._num_started = 0
        self._is_last_microbatch = is_last
        self._in_backward = True
        for bucket in self.buckets:
            bucket.begin_backward()

    def backward_ended(self) -> None:
        """End the backward pass of a microbatch; parameters without a gradient contribute zero."""
        if self._reduces_now:
            self._start_reductions(until=len(self.buckets))
        else:
            for bucket in self.buckets:
                bucket.observe()
        self._in_backward = False
        super().backward_ended()

    def finish_grad_reduce(self, *, is_abandoned: bool = False) -> None:
        """Wait until every `grads.main` holds the sum over the ranks.

        Args:
            is_abandoned: wait only for reductions that were started; the gradients are then not
                used.
        """
        if not is_abandoned:
            self._start_reductions(until=len(self.buckets))
        for bucket in self._in_flight:
            bucket.start_across()
        while self._in_flight:
            self._finish_oldest()
        # A unit without a forward pass in this step has not waited, and the optimizer is about to
        # write its shard.
        self.wait_for_params()

    def start_param_gather(self) -> None:
        """All-gather the updated shards; fp8 weights are quantized before."""
        self._all_gather_shards()

    def grads_summed_over(self, axis: str) -> list[Tensor]:
        """Reduced gradients, as flat views, of parameters with `axis` in their `grad_sum_axes`.

        Ranks along the axis hold the same parameters in the same layout, so their lists match.
        """
        grads = []
        for bucket in self.buckets:
            for part in bucket.update_ranges:
                if axis in part.param.spec.grad_sum_axes:
                    grads.append(bucket.grads.main[part.elements])
        return grads

    @property
    def _reduces_now(self) -> bool:
        """Whether a bucket is reduced as soon as it is ready, not at the end of the step."""
        overlaps_last = self.options.overlap_grad_reduce and self._is_last_microbatch
        return self.options.strategy.shard_grads or overlaps_last

    def _take_grad(self, name: str, param: Tensor) -> None:
        """Move a gradient from `.grad` to the bucket, and reduce the buckets that are complete."""
        grad = param.grad
        param.grad = None
        bucket = self._bucket_of[name]
        if grad is None:  # written into the bucket, or none
            bucket.mark_ready(name)
        elif self._may_open(bucket):
            self._prepare_write(bucket)
            bucket.add_grad(name, grad)
        else:
            bucket.keep_grad(name, grad)
        if bucket.is_ready and self._reduces_now:
            self._start_reductions(until=self._first_unready())

    def _first_unready(self) -> int:
        """Index of the first bucket that is not reduced and lacks a gradient."""
        index = self._num_started
        while index < len(self.buckets) and self.buckets[index].is_ready:
            index += 1
        return index

    def _start_write(self, name: str, *, in_graph: bool = False) -> tuple[Tensor, bool] | None:
        """`GradView.start_write` of a parameter."""
        if not self._in_backward:
            return None
        bucket = self._bucket_of[name]
        shape = self._views[name][1].shape
        if self._may_open(bucket):
            self._prepare_write(bucket)
            view, has_grads = bucket.start_write(name)
            return view.view(shape), has_grads
        if in_graph:
            return bucket.start_keep(name, shape=shape, dtype=self._grad_dtype)
        return None

    def _start_write_ahead(self, name: str) -> tuple[Tensor, bool] | None:
        """`GradView.start_write_ahead` of a parameter.

        Of transient stores only the first one of a backward borrows memory.
        """
        bucket = self._bucket_of[name]
        if self.options.strategy.shard_grads and bucket is not self.buckets[0]:
            return None
        self._prepare_write(bucket)
        if not self.params[name].spec.is_shared:
            bucket.expect_ahead(name)
        view, has_grads = bucket.start_write(name)
        return view.view(self._views[name][1].shape), has_grads

    def _may_open(self, bucket: Bucket) -> bool:
        """Whether a bucket may take shared gradient memory now.

        Later buckets must not overtake earlier ones.
        """
        if not self.options.strategy.shard_grads:
            return True
        first = self._num_started
        return bucket in self.buckets[first : first + MAX_FULL_BUCKETS]

    def _start_reductions(self, *, until: int) -> None:
        """Start the reductions of all buckets before `until` that have not started."""
        for bucket in self.buckets[self._num_started : until]:
            self._prepare_write(bucket)
            while len(self._in_flight) >= self._max_reductions:
                self._finish_oldest()
            bucket.start_reduce(is_last=self._is_last_microbatch)
            self._in_flight.append(bucket)
            if not self.options.overlap_grad_reduce and self.options.strategy.shard_grads:
                self._finish_oldest()
        self._num_started = max(self._num_started, until)

    @property
    def _max_reductions(self) -> int:
        """The largest number of reductions in flight."""
        shard = self.groups.shard
        replicate = self.groups.replicate
        holds_memory = self.options.strategy.shard_grads or shard.is_gloo or replicate.is_gloo
        is_followed = shard.size > 1 and replicate.size > 1
        return MAX_REDUCTIONS if holds_memory or is_followed else len(self.buckets)

    def _prepare_write(self, bucket: Bucket) -> None:
        """Finish earlier reductions of the bucket, and of buckets that use the same memory."""
        while bucket.is_in_flight:
            self._finish_oldest()
        if bucket.grads.is_open:
            return
        for started in self._in_flight:
            if bucket.grads.overlaps(started.grads):
                started.finish_inside()

    def _finish_oldest(self) -> None:
        self._in_flight.pop(0).finish_reduce()

    def _before_unit_backward(self, index: int) -> None:
        """Reduce the units after `index`, whose backward is next.

        All ranks do so between the same all-gathers.
        """
        if self._in_backward and self._reduces_now:
            self._start_reductions(until=self._num_complete[index])

    def _register_grad_hooks(self) -> None:
        """Take the gradient of every parameter when it is accumulated, or have it written."""
        is_transient = self.options.strategy.shard_grads
        writes_wgrads = self.options.writes_wgrads
        if writes_wgrads is None:
            writes_wgrads = not self.param_buffer.is_cpu
        traced = traced_units(
            self.layout, is_transient=is_transient, num_blocks=self.options.num_gather_blocks
        )
        for name, (param, _) in self._views.items():
            spec = self.params[name].spec
            param.register_post_accumulate_grad_hook(partial(self._take_grad, name))
            # Several units use a shared weight: it would hold pooled storage from its first use to
            # its last.
            if writes_wgrads and not (is_transient and spec.is_shared):
                attach(self._grad_view(param, name, is_traced=spec.unit in traced), param)

    def _grad_view(self, param: nn.Parameter, name: str, *, is_traced: bool) -> GradView:
        """Access to a gradient's elements in its bucket, for products that write wgrad there."""
        start = partial(self._start_write, name)
        return GradView(
            self._grad_dtype,
            start_write=start,
            mark_ready=partial(self._take_grad, name, param),
            start_write_ahead=partial(self._start_write_ahead, name),
            memory=self._grad_memory(param, name),
            start_write_in_graph=partial(start, in_graph=True) if is_traced else None,
        )

    def _grad_memory(self, param: nn.Parameter, name: str) -> Tensor | None:
        """The elements of a gradient; None where buckets borrow their memory."""
        if self.options.strategy.shard_grads:
            return None
        bucket = self._bucket_of[name]
        return bucket.view(name, bucket.grads.full()).view(param.shape)

    def _build_buckets(self, precision: Precision) -> tuple[Bucket, ...]:
        """One bucket per bucket of the layout, with gradients."""
        all_params = self._build_param_stores()
        all_grads = build_grads(
            self.layout,
            groups=self.groups,
            precision=precision,
            device=self.param_buffer.device,
            is_transient=self.options.strategy.shard_grads,
        )
        reduction = Reduction(self.groups, self.options)
        buckets = []
        for layout, params, grads in zip(self.layout.buckets, all_params, all_grads, strict=True):
            buckets.append(Bucket(layout, params=params, grads=grads, reduction=reduction))
        return tuple(buckets)
