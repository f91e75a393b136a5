"""All-gather of parameters per FSDP unit (`optim_grads_params`): hooks that carry out a `GatherOrder`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from nanotrain.parallel.dp.gather_order import GatherChange, GatherOrder
from nanotrain.parallel.dp.stores import ParamStore


class UnitGather:
    """Hooks of the units of one module, which run one after another.

    Args:
        modules: in forward order.
        stores: of every bucket.
        order: of the buckets that these modules read.
        before_backward: called with the index of a unit when the backward of all later units is complete.
        is_recomputing: whether a forward pass is one that a backward runs again.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        stores: Sequence[ParamStore],
        *,
        order: GatherOrder,
        before_backward: Callable[[int], None],
        is_recomputing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._stores, self._order = stores, order
        self._notify, self._is_recomputing = before_backward, is_recomputing
        for index, module in enumerate(modules):
            module.register_forward_pre_hook(partial(self._before_forward, index))
            module.register_forward_hook(partial(self._after_forward, index))

    def begin_step(self) -> None:
        """Expect no backward of an earlier step."""
        self._carry_out(self._order.begin_step())

    def free(self) -> None:
        """Free the storage of all units except those that still wait for a backward."""
        self._carry_out(self._order.free())

    @contextmanager
    def all_gathered(self) -> Iterator[None]:
        """Gather all units for the time of the block; forward passes inside it communicate nothing."""
        for bucket in self._order.gather_all():
            self._stores[bucket].gather_apart()
        try:
            yield
        finally:
            self._carry_out(self._order.free_all())

    def _before_forward(self, index: int, *_: Any) -> None:
        again = self._is_recomputing()
        gather = self._order.before_recomputation if again else self._order.before_forward
        self._gather(index, gather(index))

    def _after_forward(self, index: int, *hook_arguments: Any) -> None:
        if self._is_recomputing():
            return  # the next forward or backward frees the unit; hooks of this output would never be called
        leaves = tree_leaves(hook_arguments[-1])
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        self._carry_out(self._order.after_forward(index, has_backward=bool(outputs)))
        if len(outputs) == 1:
            outputs[0].register_hook(partial(self._before_backward, index))
        elif outputs:  # the backward begins with the first gradient of any output
            register_multi_grad_hook(outputs, partial(self._before_backward, index), mode="any")

    def _before_backward(self, index: int, _grad: Tensor) -> None:
        self._notify(index)
        self._gather(index, self._order.before_backward(index))

    def _gather(self, index: int, change: GatherChange) -> None:
        self._carry_out(change)
        for bucket in self._order.units[index]:
            self._stores[bucket].wait()

    def _carry_out(self, change: GatherChange) -> None:
        for bucket in change.freed:
            self._stores[bucket].free()
        for bucket in change.started:
            self._stores[bucket].start_all_gather()
