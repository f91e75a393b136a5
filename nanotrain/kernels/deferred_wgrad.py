"""Deferred weight gradients, for pipeline schedules with separate I and W actions (Qi et al. 2023).

Wgrad              the weight gradients of one layer and microbatch, still to be computed
WgradQueue         collects them during a backward that computes input gradients only
accumulate_wgrads  computes them and accumulates into `param.grad`

with queue.defer():                      I: input gradients, sent to the previous stage
    grads = torch.autograd.grad(...)     ... and gradients of layers that do not defer (norms)
wgrads = queue.take()
...
accumulate_wgrads(wgrads, ready=...)     W: weight gradients, as if autograd had just computed them
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
        """One gradient per parameter; None for a gradient that was written to its `grad_view`."""


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
    """Compute weight gradients and accumulate them.

    Each layer's communication overlaps with the previous layer. Hooks run once per parameter, with
    the complete gradient, even if several layers share a weight.

    Args:
        wgrads: weight gradients in the order of computation; emptied, so that memory is freed after
            each.
        ready: parameters with gradients that are already computed.
    """
    sums = _GradSums()
    for param, _ in ready:
        sums.expect(param)
    for wgrad in wgrads:
        for param in wgrad.params:
            sums.expect(param)
    for param, grad in ready:
        sums.add(param, grad)
    wgrads.reverse()
    if wgrads:
        wgrads[-1].start()
    while wgrads:
        wgrad = wgrads.pop()
        if wgrads:
            wgrads[-1].start()
        for param, computed in zip(wgrad.params, wgrad.compute(), strict=True):
            sums.add(param, computed)


class _GradSums:
    """Sums of the gradients of parameters that may be used several times."""

    def __init__(self) -> None:
        self._uses_left: Counter[nn.Parameter] = Counter()
        self._sums: dict[nn.Parameter, Tensor] = {}

    def expect(self, param: nn.Parameter) -> None:
        """Count one use of a parameter."""
        self._uses_left[param] += 1

    def add(self, param: nn.Parameter, grad: Tensor | None) -> None:
        """Add the gradient of one use of a parameter; accumulate after the last. None: written."""
        self._uses_left[param] -= 1
        total = self._sums.pop(param, None)
        if grad is not None:
            total = grad if total is None else total + grad
        if self._uses_left[param]:
            if total is not None:
                self._sums[param] = total
        elif total is not None:  # as autograd does, with grad_dtype and post-accumulate hooks
            torch.autograd.backward(param, total)
        else:  # products wrote all of the gradient
            view = grad_view_of(param)
            if view is not None:
                view.mark_ready()
