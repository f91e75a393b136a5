"""All-gather of parameters per FSDP unit (`optim_grads_params`): before its forward, again before its backward.

    before the forward of unit i     all-gather i, start i + 1, free all others
    after it                         free i
    before the backward of unit i    all-gather i, start i - 1, free all others
    recomputed forward of unit j     all-gather j, keep the unit whose backward waits for it, free all others
    after the last                   free all

Only the parameters of the current and, with prefetch, of the next unit have storage. Weight gradients that are computed
later (W of a zero-bubble schedule) read no parameters.

Source: Zhao et al. 2023 (PyTorch FSDP), sections 3.2 and 3.3.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from nanotrain.parallel.dp.stores import ParamStore

Unit = tuple[nn.Module, Sequence[ParamStore]]


class UnitGather:
    """Hooks of the units of one module, which run one after another.

    Args:
        units: modules in forward order and the parameter stores that each reads; two modules may share a store.
        prefetch: start the all-gather of the next unit before the current one runs.
        before_backward: called with the index of a unit when the backward of all later units is complete.
        is_recomputing: whether a forward pass is one that a backward runs again.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        prefetch: bool,
        before_backward: Callable[[int], None],
        is_recomputing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._stores = [tuple(stores) for _, stores in units]
        self._num_next = int(prefetch)
        self._notify, self._is_recomputing = before_backward, is_recomputing
        self._keeps_all, self._last_backward = False, 0  # the unit whose backward began last
        for index, (module, _) in enumerate(units):
            module.register_forward_pre_hook(partial(self._before_forward, index))
            module.register_forward_hook(partial(self._after_forward, index))

    def free(self, *, but: Sequence[ParamStore] = ()) -> None:
        """Free the storage of all units but some."""
        for store in self._of(range(len(self._stores))):
            if not self._keeps_all and not any(store is kept for kept in but):
                store.free()

    @contextmanager
    def all_gathered(self) -> Iterator[None]:
        """All units inside the block; forward passes in it communicate nothing."""
        is_outermost, self._keeps_all = not self._keeps_all, True
        for store in self._of(range(len(self._stores))):
            store.start_all_gather()
            store.wait()
        yield
        if is_outermost:
            self._keeps_all = False
            self.free()

    def _before_forward(self, index: int, *_: Any) -> None:
        if self._is_recomputing():
            self._gather_again(index)
            return
        self._gather(index, range(index + 1, index + 1 + self._num_next))

    def _after_forward(self, index: int, *hook_arguments: Any) -> None:
        if self._is_recomputing():
            return  # the next forward or backward frees the unit; hooks of this output would never be called
        output: Tensor = hook_arguments[-1]
        self.free(but=self._of(range(index + 1, index + 1 + self._num_next)))
        if output.requires_grad:
            output.register_hook(partial(self._before_backward, index))

    def _before_backward(self, index: int, _grad: Tensor) -> None:
        self._notify(index)
        self._last_backward = index
        self._gather(index, range(index - self._num_next, index))

    def _gather(self, index: int, following: range) -> None:
        if self._keeps_all:
            return
        current, prefetched = self._stores[index], self._of(following)
        self.free(but=(*current, *prefetched))
        for store in (*current, *prefetched):
            store.start_all_gather()
        for store in current:
            store.wait()

    def _gather_again(self, index: int) -> None:
        """Gather a unit in the backward of a later one, or of its own; what that backward has gathered stays."""
        last, num_prefetched = self._last_backward, self._num_next if index == self._last_backward else 0
        in_use = [store for store in self._of(range(last - num_prefetched, last + 1)) if store.has_storage]
        if not self._keeps_all:
            self.free(but=(*self._stores[index], *in_use))
            for store in self._stores[index]:
                store.start_all_gather()
                store.wait()

    def _of(self, indices: range) -> list[ParamStore]:
        return [store for i in indices if 0 <= i < len(self._stores) for store in self._stores[i]]
