"""All-gather of parameters per FSDP unit (`optim_grads_params`): before its forward, again before its backward.

    before the forward of unit i     all-gather i, start the next ones, free all others
    after it                         free i
    before the backward of unit i    all-gather i, start the previous ones, free all others
    after the last                   free all

Only the parameters of the current unit and of those gathered ahead have storage. Weight gradients that are computed
later (W of a zero-bubble schedule) read no parameters. Without resharding after the forward a unit is kept until the
backwards of all microbatches that ran forward are complete, and the backward gathers nothing.

Source: Zhao et al. 2023 (PyTorch FSDP), sections 3.2 and 3.3.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from nanotrain.parallel.dp.stores import ParamStore

Unit = tuple[nn.Module, Sequence[ParamStore]]


class UnitGather:
    """Hooks of the units of one module, which run one after another.

    Args:
        units: modules in forward order and the parameter stores that each reads; two modules may share a store.
        num_prefetched: units gathered ahead: their all-gathers start before the current unit runs.
        reshards: free a unit after its forward and gather it again for its backward.
        before_backward: called with the index of a unit when the backward of all later units is complete.
        is_recomputing: whether a forward pass is one that a backward runs again.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        num_prefetched: int,
        reshards: bool,
        before_backward: Callable[[int], None],
        is_recomputing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._stores = [tuple(stores) for _, stores in units]
        self._gathered: dict[int, ParamStore] = {}  # by id: stores that were gathered and not freed since
        self._num_next, self._reshards = num_prefetched, reshards
        self._num_backwards: Counter[int] = Counter()  # by id of a store: backwards that are still to read it
        self._notify, self._is_recomputing = before_backward, is_recomputing
        self._last_backward = 0  # the unit whose backward began last
        self.keeps_all = False  # every unit has storage
        for index, (module, _) in enumerate(units):
            module.register_forward_pre_hook(partial(self._before_forward, index))
            module.register_forward_hook(partial(self._after_forward, index))

    def begin_step(self) -> None:
        """Expect no backward of an earlier step."""
        self._num_backwards.clear()
        self.free()

    def free(self, *, but: Sequence[ParamStore] = ()) -> None:
        """Free the storage of all units except `but` and those that still wait for a backward."""
        if self.keeps_all:
            return
        kept = {id(store) for store in but}
        for key, store in list(self._gathered.items()):
            if key not in kept and not self._num_backwards[key]:
                del self._gathered[key]
                store.free()

    @contextmanager
    def all_gathered(self) -> Iterator[None]:
        """Gather all units for the time of the block; forward passes inside it communicate nothing."""
        self.keeps_all = True
        for store in self._of(range(len(self._stores))):
            self._gathered[id(store)] = store
            store.gather_apart()
        try:
            yield
        finally:
            self.keeps_all = False
            self.free()

    def _before_forward(self, index: int, *_: Any) -> None:
        if self._is_recomputing():
            self._gather_again(index)
            return
        self._gather(index, range(index + 1, index + 1 + self._num_next))

    def _after_forward(self, index: int, *hook_arguments: Any) -> None:
        if self._is_recomputing():
            return  # the next forward or backward frees the unit; hooks of this output would never be called
        leaves = tree_leaves(hook_arguments[-1])
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        if outputs and not self._reshards:
            self._num_backwards.update(map(id, self._stores[index]))
        self.free(but=self._of(range(index + 1, index + 1 + self._num_next)))
        if len(outputs) == 1:
            outputs[0].register_hook(partial(self._before_backward, index))
        elif outputs:  # the backward begins with the first gradient of any output
            register_multi_grad_hook(outputs, partial(self._before_backward, index), mode="any")

    def _before_backward(self, index: int, _grad: Tensor) -> None:
        self._notify(index)
        self._last_backward = index
        if not self._reshards:
            self._num_backwards.subtract(map(id, self._stores[index]))
        self._gather(index, range(index - self._num_next, index))

    def _gather(self, index: int, following: range) -> None:
        if self.keeps_all:
            return
        current, prefetched = self._stores[index], self._of(following)
        self.free(but=(*current, *prefetched))
        self._start((*current, *prefetched))
        for store in current:
            store.wait()

    def _gather_again(self, index: int) -> None:
        """Gather a unit for its recomputation inside a backward; units that this backward has gathered are kept."""
        last, num_prefetched = self._last_backward, self._num_next if index == self._last_backward else 0
        current = self._stores[index]
        # a unit that shares its block with the current one is recomputed later, and gathered again then
        in_use = [
            store
            for store in self._of(range(last - num_prefetched, last + 1))
            if store.has_storage and not any(store.excludes(other) for other in current)
        ]
        if not self.keeps_all:
            self.free(but=(*current, *in_use))
            for store in current:
                self._start((store,))
                store.wait()

    def _start(self, stores: Sequence[ParamStore]) -> None:
        for store in stores:
            self._gathered[id(store)] = store
            store.start_all_gather()

    def _of(self, indices: range) -> list[ParamStore]:
        return [store for i in indices if 0 <= i < len(self._stores) for store in self._stores[i]]
