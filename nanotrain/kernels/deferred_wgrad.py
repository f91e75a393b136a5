"""Deferred weight gradients, for pipeline schedules with separate I and W actions (Qi et al. 2023).

Wgrad              the weight gradients of one layer and microbatch, still to be computed
WgradQueue         collects them during a backward that computes input gradients only
accumulate_wgrads  computes them and accumulates into `param.grad`

with queue.defer():                        I: input gradients, sent to the previous stage
    grads = torch.autograd.grad(...)       ... and those of parameters whose layer does not defer (norms, router)
wgrads = queue.take()
...
accumulate_wgrads(wgrads, ready=...)       W: weight gradients, as if autograd had just computed them
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeGuard

import torch
from torch import Tensor, nn

from nanotrain.kernels.linear import grad_view_of


class Wgrad(Protocol):
    """The weight gradients of one layer and microbatch, still to be computed."""

    @property
    def params(self) -> Sequence[nn.Parameter]:
        """The trained parameters of the layer."""

    def start(self) -> None:
        """Start the communication that `compute` waits for."""

    def compute(self) -> Sequence[Tensor | None]:
        """The gradients, one per parameter of `params`; None for one that was written to its
        `grad_view`.
        """


class WgradQueue:
    """The wgrad work of one microbatch, shared by all layers of a stage."""

    def __init__(self) -> None:
        self.is_deferring = False
        self._wgrads: list[Wgrad] = []

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Inside the block, linear layers add their wgrad to this queue instead of computing it."""
        assert not self._wgrads, (
            "work that was not taken would be accumulated with another microbatch's"
        )
        self.is_deferring = True
        try:
            yield
        finally:
            self.is_deferring = False

    def put(self, wgrad: Wgrad) -> None:
        """Add the work of one layer; called by its backward."""
        self._wgrads.append(wgrad)

    def take(self) -> list[Wgrad]:
        """The work added since the last call, in backward order."""
        wgrads, self._wgrads = self._wgrads, []
        return wgrads


def is_deferring(queue: WgradQueue | None) -> TypeGuard[WgradQueue]:
    """Whether a layer with this queue (None: no schedule defers) has to defer its wgrad now."""
    return queue is not None and queue.is_deferring


def accumulate_wgrads(
    wgrads: list[Wgrad], *, ready: Sequence[tuple[nn.Parameter, Tensor]] = ()
) -> None:
    """Compute weight gradients and accumulate them, each layer's communication overlapped with the
    previous layer.

    Hooks run once per parameter, with the complete gradient, even if several layers share a weight.

    Args:
        wgrads: weight gradients in the order of computation; emptied, so that memory is freed after
            each.
        ready: parameters with gradients that are already computed.
    """
    uses_left = Counter(id(param) for wgrad in wgrads for param in wgrad.params)
    uses_left.update(id(param) for param, _ in ready)
    sums: dict[int, Tensor] = {}

    def accumulate(param: nn.Parameter, grad: Tensor | None) -> None:
        uses_left[id(param)] -= 1
        total = sums.pop(id(param), None)
        if grad is not None:
            total = grad if total is None else total + grad
        if total is None:
            view = grad_view_of(param)
            if view is not None and not uses_left[id(param)]:  # products wrote all of it
                view.mark_ready()
        elif uses_left[id(param)]:
            sums[id(param)] = total
        else:  # as autograd does, with grad_dtype and post-accumulate hooks
            torch.autograd.backward(param, total)

    for param, grad in ready:
        accumulate(param, grad)
    wgrads.reverse()
    if wgrads:
        wgrads[-1].start()
    while wgrads:
        wgrad = wgrads.pop()
        if wgrads:
            wgrads[-1].start()
        for param, computed in zip(wgrad.params, wgrad.compute(), strict=True):
            accumulate(param, computed)
