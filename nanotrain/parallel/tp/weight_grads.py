"""Weight gradients that wait: a zero-bubble schedule fills its bubbles with them.

While a queue is deferring, the backward of a linear layer computes only the gradient of its input and puts the rest of
its work here; `take` hands over what one microbatch has put, to be run at any later time:

    with queue.defer():                     B: input gradients, on their way to the stage before
        torch.autograd.backward(...)
    work = queue.take()
    ...
    work()                                  W: weight gradients, as if autograd had just computed them
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Delivery:
    """A gradient and the parameter it belongs to."""

    parameter: nn.Parameter
    grad: Tensor


class WeightGrads(Protocol):
    """The weight gradients of one layer and microbatch, still to be computed."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """What they belong to."""

    def start(self) -> None:
        """Begin the communication they need."""

    def finish(self) -> Sequence[Delivery]:
        """Compute them."""


class WeightGradQueue:
    """What the backward passes of one microbatch have put off; shared by all layers of a stage."""

    def __init__(self) -> None:
        self.is_deferring = False
        self._waiting: list[WeightGrads] = []

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Inside the block, layers put their weight gradients here instead of computing them."""
        assert not self._waiting, "work that nobody took would be delivered with another microbatch's"
        self.is_deferring = True
        try:
            yield
        finally:
            self.is_deferring = False

    def put(self, work: WeightGrads) -> None:
        """Called by a layer's backward, in backward order."""
        self._waiting.append(work)

    def take(self) -> Callable[[], None]:
        """The work put here since the last call; calling it (once) delivers the gradients to the parameters."""
        waiting, self._waiting = self._waiting, []
        return partial(_run, waiting)

    def late(self, parameter: nn.Parameter) -> Tensor:
        """The parameter, for a layer that leaves its gradient to autograd: while deferring, it is delivered with W."""
        value: Tensor = _Late.apply(parameter, self)
        return value


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, queue: WeightGradQueue) -> Tensor:
        ctx.parameter, ctx.queue = parameter, queue
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        if not ctx.queue.is_deferring:
            return grads[0], None
        ctx.queue.put(_Ready(Delivery(ctx.parameter, grads[0])))
        return None, None


@dataclass(frozen=True)
class _Ready:
    """A gradient that is computed already and only waits for its delivery."""

    delivery: Delivery

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The one it belongs to."""
        return (self.delivery.parameter,)

    def start(self) -> None:
        """Nothing to communicate."""

    def finish(self) -> Sequence[Delivery]:
        """The gradient as it came."""
        return (self.delivery,)


def _run(waiting: list[WeightGrads]) -> None:
    """Compute and deliver, each layer's communication running behind the matrix products of the layer before."""
    uses_left = Counter(id(parameter) for work in waiting for parameter in work.parameters)
    sums: dict[int, Tensor] = {}
    waiting.reverse()
    if waiting:
        waiting[-1].start()
    while waiting:
        work = waiting.pop()
        if waiting:
            waiting[-1].start()
        for delivery in work.finish():
            key = id(delivery.parameter)
            uses_left[key] -= 1
            grad = sums.pop(key) + delivery.grad if key in sums else delivery.grad
            if uses_left[key]:  # a tied weight: its hooks may fire once only, when all of its gradient is there
                sums[key] = grad
            else:
                # Autograd's own way to accumulate: honours grad_dtype and fires the post-accumulate hooks.
                torch.autograd.backward(delivery.parameter, grad)
