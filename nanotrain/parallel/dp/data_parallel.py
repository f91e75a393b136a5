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

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from nanotrain.kernels.linear import GradView, attach
from nanotrain.parallel.dp.bucket import Bucket, Reduction
from nanotrain.parallel.dp.fp8_weights import Fp8Weights, placeholder
from nanotrain.parallel.dp.layout import BufferLayout
from nanotrain.parallel.dp.options import (
    MAX_FULL_BUCKETS,
    DataParallelOptions,
    ReduceGroups,
    Strategy,
)
from nanotrain.parallel.dp.stores import build_grads, build_params, shard_of
from nanotrain.parallel.dp.units import (
    GatherOrder,
    UnitGather,
    child_units,
    given_units,
    traced_units,
    wait_before_forward,
)
from nanotrain.precision.dtypes import Precision
from nanotrain.precision.fp8 import WEIGHT_DTYPE
from nanotrain.spec.params import LocalParam

# One reduction runs and the next is queued. More would hold memory on gloo, which receives into
# (d-1)/d of a bucket (measured, 13 buckets: 39 MiB with all in flight, 10.5 with two, no slower),
# and full-size gradients of a pool.
MAX_REDUCTIONS = 2


class DataParallel:
    """Flat buffers of one module's parameters and gradients, and their collectives.

    Args:
        module: module whose parameters become views of the buffer; those on the meta device are
            replaced.
        layout: layout from `plan_layout`; its parameters are those of the module that this wrapper
            takes over.
        groups: the shard and replicate groups.
        options: strategy and overlap.
        precision: dtypes of parameters and gradients.
        device: device of the buffers.
    """

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
        check_layout(layout, groups, strategy=options.strategy)
        self.layout = layout
        self.groups = groups
        self.options = options
        self.params = {param.spec.name: param for param in layout.params}
        self.param_buffer = allocate_params(
            layout,
            num_shards=groups.shard.size,
            options=options,
            precision=precision,
            device=device,
        )
        # this rank's part of fp8 weights in params_dtype, which the optimizer writes
        self.update_buffer: Tensor | None = None
        if options.fp8_amax_groups is not None:
            num_updated = sum(bucket.update_numel for bucket in layout.buckets)
            self.update_buffer = torch.zeros(num_updated, dtype=precision.params, device=device)
        self.fp8_weights: Fp8Weights | None = None
        self._grad_dtype = precision.grads
        self.buckets = self._build_buckets(precision)
        self._bucket_of: dict[str, Bucket] = {}
        for bucket in self.buckets:
            self._bucket_of |= dict.fromkeys(bucket.layout.names, bucket)
        self._num_started = 0  # buckets whose reduction was started in this backward
        self._in_flight: list[Bucket] = []
        self._is_last_microbatch = True
        self._in_backward = False
        self._is_gathered = False  # inside of `gathered`
        # parameters, and their views of a bucket
        self._views: dict[str, tuple[nn.Parameter, Tensor]] = {}
        self._move_parameters(module)
        self._unit_gather = self._register_unit_hooks(module)

    def begin_step(self) -> None:
        """Start a step: discard the gradients of the last one."""
        self._num_started = 0
        self._is_last_microbatch = True
        self._unit_gather.begin_step()
        for bucket in self.buckets:
            bucket.begin_step()

    def backward_begins(self, *, is_last: bool) -> None:
        """Start the backward of a microbatch; `is_last` for the last one of the step."""
        self._num_started = 0
        self._is_last_microbatch = is_last
        self._in_backward = True
        self._unit_gather.free()  # the unit that an I action has gathered last
        for bucket in self.buckets:
            bucket.begin_backward()

    def backward_ended(self) -> None:
        """End the backward pass of a microbatch; parameters without a gradient contribute zero."""
        if self._reduces_now:
            self._start_reductions(until=len(self.buckets))
        self._in_backward = False
        self._unit_gather.free()

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

    def fill_params(self, fill: Callable[[Sequence[LocalParam]], None]) -> None:
        """Write initial values: `fill` receives parameters whose tensors have full size.

        Sharded and fp8 parameters have full size for one bucket at a time, so `fill` is called once
        per bucket.
        """
        if self.fp8_weights is None and not self.options.strategy.shard_params:
            fill(self.layout.params)
            return
        for bucket in self.buckets:
            full = bucket.params.update.new_zeros(bucket.layout.numel)
            self._point_params(bucket, full)
            fill([entry.param for entry in bucket.layout.params])
            shard = shard_of(full, self.groups.shard)
            if self.fp8_weights is None:
                bucket.params.shard.copy_(shard)
            else:
                bucket.params.update.copy_(shard_of(shard, self.groups.outer))
            self._point_params(bucket, None)
        if self.fp8_weights is not None:
            self.start_param_gather()

    def start_param_gather(self) -> None:
        """All-gather the updated shards; fp8 weights are quantized before.

        The last bucket holds the first layers, so it is gathered first.
        """
        if self.fp8_weights is not None:
            self.fp8_weights.quantize()
        for bucket in reversed(self.buckets):
            bucket.params.start_across()
        if not self.options.strategy.shard_params:  # else each unit is gathered when it runs
            for bucket in reversed(self.buckets):
                bucket.params.start_all_gather()
        if not self.options.overlap_param_gather:
            self.wait_for_params()

    def wait_for_params(self) -> None:
        """Wait for the all-gathers that were started."""
        for bucket in reversed(self.buckets):
            bucket.params.wait()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather all parameters inside the block, for code that reads them without a forward."""
        self.wait_for_params()
        if self._is_gathered or not (self.options.strategy.shard_params or self.fp8_weights):
            yield
            return
        self._is_gathered = True
        fp8 = self.fp8_weights
        try:
            with self._unit_gather.all_gathered():
                for bucket in self.buckets:
                    full = bucket.params.separate if fp8 is None else fp8.gather_updates(bucket)
                    self._point_params(bucket, full)
                yield
        finally:
            for bucket in self.buckets:
                self._point_params(bucket, None)
                if fp8 is not None:
                    fp8.store(bucket)
            self._is_gathered = False

    def _point_params(self, bucket: Bucket, full: Tensor | None) -> None:
        """Point the parameters of a bucket into `full` [numel]; None: back to their own storage."""
        for entry in bucket.layout.params:
            param, view = self._views[entry.name]
            param.data = view if full is None else bucket.view(entry.name, full).view(view.shape)

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

    def _reduce_later_units(self, num_complete: Sequence[int], index: int) -> None:
        """Reduce the units after `index`, whose backward is next.

        All ranks do so between the same all-gathers.
        """
        if self._in_backward and self._reduces_now:
            self._start_reductions(until=num_complete[index])

    def _move_parameters(self, module: nn.Module) -> None:
        """Make the module's parameters views of the buffer that pass on their gradients."""
        is_transient = self.options.strategy.shard_grads
        writes_wgrads = self.options.writes_wgrads
        if writes_wgrads is None:
            writes_wgrads = not self.param_buffer.is_cpu
        traced = traced_units(
            self.layout, is_transient=is_transient, num_blocks=self.options.num_gather_blocks
        )
        for bucket in self.buckets:
            bucket.params.allocate()
            for entry in bucket.layout.params:
                spec = entry.param.spec
                param = _with_data(module, entry.name, data=self._param_data(bucket, entry.param))
                self._views[entry.name] = (param, param.data)
                param.register_post_accumulate_grad_hook(partial(self._take_grad, entry.name))
                # Several units use a shared weight: it would hold pooled storage from its first use
                # to its last.
                if writes_wgrads and not (is_transient and spec.is_shared):
                    attach(self._grad_view(param, entry.name, is_traced=spec.unit in traced), param)
            bucket.params.free()
        amax_groups = self.options.fp8_amax_groups
        if amax_groups is not None:
            self.fp8_weights = Fp8Weights(
                module, self.buckets, groups=self.groups, amax_groups=amax_groups
            )

    def _grad_view(self, param: nn.Parameter, name: str, *, is_traced: bool) -> GradView:
        """Access to a gradient's elements in its bucket, for products that write wgrad there."""
        start = partial(self._start_write, name)
        return GradView(
            self._grad_dtype,
            start_write=start,
            mark_ready=partial(self._take_grad, name, param),
            start_write_ahead=partial(self._start_write_ahead, name),
            start_write_in_graph=partial(start, in_graph=True) if is_traced else None,
        )

    def _param_data(self, bucket: Bucket, local: LocalParam) -> Tensor:
        """A view of the bucket; a placeholder for fp8 weights."""
        shape = local.box.shape
        update = self.update_buffer
        if update is not None:
            return placeholder(shape, dtype=update.dtype, device=update.device)
        return bucket.view(local.spec.name, bucket.params.full).view(shape)

    def _register_unit_hooks(self, module: nn.Module) -> UnitGather:
        """Before its forward each module waits for the parameters of its units, or gathers them."""
        options = self.options
        if options.units is None:
            units = child_units(module, self.layout)
        else:
            units = given_units(options.units, self.layout)
        if not options.strategy.shard_params:
            for unit in units:
                params = [self.buckets[i].params for i in unit.buckets]
                unit.first.register_forward_pre_hook(partial(wait_before_forward, params))
            units = []  # nothing is gathered and freed
        read = [unit.buckets for unit in units]
        lookups = [index for index, unit in enumerate(units) if unit.is_lookup]
        num_complete = [unit.num_complete for unit in units]
        return UnitGather(
            units,
            [bucket.params for bucket in self.buckets],
            order=GatherOrder.of(read, self.layout, options=options, lookups=lookups),
            before_backward=partial(self._reduce_later_units, num_complete),
            is_recomputing=options.is_recomputing,
        )

    def _build_buckets(self, precision: Precision) -> tuple[Bucket, ...]:
        all_params = build_params(
            self.layout,
            self.param_buffer,
            groups=self.groups,
            options=self.options,
            update_buffer=self.update_buffer,
        )
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


def check_layout(layout: BufferLayout, groups: ReduceGroups, *, strategy: Strategy) -> None:
    """Assert that a layout is one that the strategy can reduce and gather."""
    is_complete = strategy.shard_optim or groups.shard.size == 1
    assert is_complete, (
        "without shard_optim no rank would gather the shards that it does not update"
    )
    if strategy.shard_params:
        is_by_unit = all(len(bucket.units) == 1 for bucket in layout.buckets)
        assert is_by_unit, "a bucket with two units would be gathered for each of them"


def allocate_params(
    layout: BufferLayout,
    *,
    num_shards: int,
    options: DataParallelOptions,
    precision: Precision,
    device: torch.device,
) -> Tensor:
    """[numel] zeros for the parameters of a buffer, or for this rank's shard of them."""
    numel = layout.numel
    if options.strategy.shard_params:
        numel //= num_shards
    dtype = precision.params if options.fp8_amax_groups is None else WEIGHT_DTYPE
    return torch.zeros(numel, dtype=dtype, device=device)


def _with_data(module: nn.Module, name: str, *, data: Tensor) -> nn.Parameter:
    """Give a parameter of the module other data; a parameter on the meta device is replaced.

    Every reference to the parameter stays valid. The data is set by `.data`: a gather between
    forward and backward must not count as a change of what autograd saved.
    """
    param = module.get_parameter(name)
    if not param.is_meta:
        param.data = data.data
        param.grad = None
        return param
    owner, _, leaf = name.rpartition(".")
    param = module.get_submodule(owner)._parameters[leaf] = nn.Parameter(data.data)
    return param


@contextmanager
def gathered(wrappers: Iterable[DataParallel]) -> Iterator[None]:
    """`DataParallel.gathered` of several wrappers."""
    with ExitStack() as stack:
        for wrapper in wrappers:
            stack.enter_context(wrapper.gathered())
        yield
