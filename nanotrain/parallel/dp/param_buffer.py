"""Flat storage of a module's parameters, and their all-gathers.

`ParamBuffer` is the wrapper of frozen parameters, which have no gradients, and the base of
`DataParallel`, which adds them. Shards of frozen parameters are all-gathered once they are loaded;
with `optim_grads_params` each unit is gathered when it runs, as that of other parameters.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from nanotrain.parallel.dp.bucket import ParamBucket
from nanotrain.parallel.dp.fp8_weights import Fp8Weights, placeholder
from nanotrain.parallel.dp.layout import BufferLayout
from nanotrain.parallel.dp.options import DataParallelOptions, ReduceGroups, Strategy
from nanotrain.parallel.dp.stores import ParamStore, build_params, shard_of
from nanotrain.parallel.dp.units import (
    GatherOrder,
    UnitGather,
    UnitModules,
    child_units,
    given_units,
)
from nanotrain.precision.dtypes import Precision
from nanotrain.precision.fp8 import WEIGHT_DTYPE
from nanotrain.spec.params import LocalParam


class ParamBuffer:
    """Flat storage of one module's parameters, and their all-gathers.

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

    buckets: tuple[ParamBucket, ...]

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
        self.buckets = self._build_buckets(precision)
        self._was_loaded = False  # whether shards were written since the last all-gather
        self._is_gathered = False  # inside of `gathered`
        # parameters, and their views of a bucket
        self._views: dict[str, tuple[nn.Parameter, Tensor]] = {}
        self._move_parameters(module)
        # None: parameters have storage all the time
        self._unit_gather: UnitGather | None = None
        self._register_unit_hooks(module)

    def begin_step(self) -> None:
        """Start a step."""
        if self._unit_gather is not None:
            self._unit_gather.begin_step()

    def backward_begins(self, *, is_last: bool) -> None:
        """Start the backward of a microbatch; `is_last` for the last one of the step."""
        if self._unit_gather is not None:
            self._unit_gather.free()  # the unit that an I action has gathered last

    def backward_ended(self) -> None:
        """End the backward pass of a microbatch."""
        if self._unit_gather is not None:
            self._unit_gather.free()

    def finish_grad_reduce(self, *, is_abandoned: bool = False) -> None:
        """Wait for the parameters, which the optimizer may write now."""
        self.wait_for_params()

    def grads_summed_over(self, axis: str) -> list[Tensor]:
        """Reduced gradients to sum over an axis: none."""
        return []

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
            self._all_gather_shards()

    def mark_loaded(self) -> None:
        """Have the next `start_param_gather` gather the shards, which were read from a file."""
        self._was_loaded = True

    def start_param_gather(self) -> None:
        """All-gather shards that were loaded; no step changes them."""
        if self._was_loaded:
            self._was_loaded = False
            self._all_gather_shards()

    def _all_gather_shards(self) -> None:
        """Start the all-gathers of all buckets; fp8 weights are quantized before.

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
        units = self._unit_gather
        try:
            with units.all_gathered() if units is not None else nullcontext():
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

    def _point_params(self, bucket: ParamBucket, full: Tensor | None) -> None:
        """Point the parameters of a bucket into `full` [numel]; None: back to their own storage."""
        for entry in bucket.layout.params:
            param, view = self._views[entry.name]
            param.data = view if full is None else bucket.view(entry.name, full).view(view.shape)

    def _move_parameters(self, module: nn.Module) -> None:
        """Make the module's parameters views of the buffer."""
        for bucket in self.buckets:
            bucket.params.allocate()
            for entry in bucket.layout.params:
                param = _with_data(module, entry.name, data=self._param_data(bucket, entry.param))
                self._views[entry.name] = (param, param.data)
            bucket.params.free()
        amax_groups = self.options.fp8_amax_groups
        if amax_groups is not None:
            self.fp8_weights = Fp8Weights(
                module, self.buckets, groups=self.groups, amax_groups=amax_groups
            )

    def _param_data(self, bucket: ParamBucket, local: LocalParam) -> Tensor:
        """A view of the bucket; a placeholder for fp8 weights."""
        shape = local.box.shape
        update = self.update_buffer
        if update is not None:
            return placeholder(shape, dtype=update.dtype, device=update.device)
        return bucket.view(local.spec.name, bucket.params.full).view(shape)

    def _register_unit_hooks(self, module: nn.Module) -> None:
        """Before its forward each module waits for the parameters of its units, or gathers them."""
        if self.options.units is None:
            units = child_units(module, self.layout)
        else:
            units = given_units(self.options.units, self.layout)
        if self.options.strategy.shard_params:
            self._unit_gather = self._build_unit_gather(units)
            return
        for unit in units:
            for index in unit.buckets:
                store = self.buckets[index].params
                unit.first.register_forward_pre_hook(store.wait_before_forward)

    def _build_unit_gather(self, units: Sequence[UnitModules]) -> UnitGather:
        """The hooks that gather and free the parameters of units."""
        options = self.options
        read = [unit.buckets for unit in units]
        lookups = [index for index, unit in enumerate(units) if unit.is_lookup]
        self._num_complete = [unit.num_complete for unit in units]
        return UnitGather(
            units,
            [bucket.params for bucket in self.buckets],
            order=GatherOrder.of(read, self.layout, options=options, lookups=lookups),
            before_backward=self._before_unit_backward,
            is_recomputing=options.is_recomputing,
        )

    def _before_unit_backward(self, index: int) -> None:
        """Called when the backward of all units after `index` is complete."""

    def _build_param_stores(self) -> Sequence[ParamStore]:
        """One parameter store per bucket."""
        return build_params(
            self.layout,
            self.param_buffer,
            groups=self.groups,
            options=self.options,
            update_buffer=self.update_buffer,
        )

    def _build_buckets(self, precision: Precision) -> tuple[ParamBucket, ...]:
        """One bucket per bucket of the layout, without gradients."""
        stores = self._build_param_stores()
        buckets = []
        for layout, params in zip(self.layout.buckets, stores, strict=True):
            buckets.append(ParamBucket(layout, params=params, groups=self.groups))
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
    param = module.get_submodule(owner)._parameters[leaf] = nn.Parameter(
        data.data, requires_grad=param.requires_grad
    )
    return param


@contextmanager
def gathered(wrappers: Iterable[ParamBuffer]) -> Iterator[None]:
    """`ParamBuffer.gathered` of several wrappers."""
    with ExitStack() as stack:
        for wrapper in wrappers:
            stack.enter_context(wrapper.gathered())
        yield
