"""A model in stages small enough to run hundreds of pipelines, and a callback that records.

ToyStage         embedding (first stage), a residual layer with a linear part and a gain, a loss (last stage)
Recorder         a callback that records every gradient
reference        loss and gradients of the whole model by plain autograd
"""

import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from nanotrain.data.batch import Batch
from nanotrain.kernels.deferred_wgrad import WgradQueue, is_deferring

B, S, H, VOCAB = 2, 3, 4, 7


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randint(VOCAB, (count, B, S + 1), generator=generator)
    return [Batch(t[:, :-1], t[:, 1:], torch.ones(B, S)) for t in tokens]


class _ToyWgrad:
    def __init__(self, weight: nn.Parameter, grad: Tensor, *, hidden: Tensor) -> None:
        self.params, self._grad, self._hidden = (weight,), grad, hidden

    def start(self) -> None:
        pass

    def compute(self) -> tuple[Tensor]:
        return (self._grad.flatten(0, 1).T @ self._hidden.flatten(0, 1),)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, owner: "ToyStage") -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.weight, ctx.queue = weight, owner.queue
        ctx.token = owner.new_token()
        return hidden @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (hidden,), weight = ctx.saved_tensors, ctx.weight
        wgrad = _ToyWgrad(weight, grad, hidden=hidden)
        if is_deferring(ctx.queue):
            ctx.queue.put(wgrad)
            return grad @ weight, None, None
        return grad @ weight, *wgrad.compute(), None


class _Token:
    """Alive as long as the graph of one forward."""


class ToyStage(nn.Module):
    """One stage; equal weights wherever it is built.

    Attributes:
        peak_alive: maximum number of graphs of this stage alive at once.
        peak_outputs: maximum number of outputs in memory when another one is computed.
    """

    def __init__(self, index: int, num_stages: int, *, queue: WgradQueue | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(index)
        self.index, self.is_last, self.queue = index, index == num_stages - 1, queue
        self.weight = nn.Parameter(torch.randn(H, H, generator=generator) / 2)
        self.gain = nn.Parameter(torch.randn(H, generator=generator))
        self.table = (
            nn.Parameter(torch.randn(VOCAB, H, generator=generator)) if index == 0 else None
        )
        self._tokens: weakref.WeakSet[_Token] = weakref.WeakSet()
        self._outputs: list[StorageWeakRef] = []
        self.peak_alive = self.peak_outputs = 0

    def forward(self, hidden: Tensor | None, batch: Batch) -> Tensor:
        assert (hidden is None) == (self.index == 0)
        if hidden is None:
            hidden = self.table[batch.tokens]
        output = hidden + self.gain * torch.tanh(_Linear.apply(hidden, self.weight, self))
        if self.is_last:
            return (output.mean(-1) - batch.labels).square().sum()
        self._outputs.append(StorageWeakRef(output.untyped_storage()))
        self.peak_outputs = max(self.peak_outputs, sum(not ref.expired() for ref in self._outputs))
        return output

    def new_token(self) -> _Token:
        token = _Token()
        self._tokens.add(token)
        self.peak_alive = max(self.peak_alive, len(self._tokens))
        return token


class Recorder:
    """Records the calls of a stage's callback and when its gradients are accumulated."""

    def __init__(self, stage: ToyStage) -> None:
        self.events: list[str] = []
        for name, param in stage.named_parameters():
            param.register_post_accumulate_grad_hook(lambda _, name=name: self.events.append(name))

    def backward_begins(self, *, is_last: bool) -> None:
        self.events.append("last" if is_last else "begins")

    def backward_ended(self) -> None:
        self.events.append("ended")

    def check(self, stage: ToyStage, num_microbatches: int) -> None:
        """Every parameter once between the begin and the end of every microbatch, and only the last
        is the last.
        """
        size = 2 + len(list(stage.parameters()))
        turns = [self.events[at : at + size] for at in range(0, len(self.events), size)]
        names = sorted(name for name, _ in stage.named_parameters())
        for number, turn in enumerate(turns, start=1):
            assert turn[0] == ("last" if number == num_microbatches else "begins"), self.events
            assert sorted(turn[1:-1]) == names and turn[-1] == "ended", self.events
        assert len(turns) == num_microbatches


@cache
def reference(
    num_stages: int, num_microbatches: int, *, grad_scale: float
) -> tuple[Tensor, list[ToyStage]]:
    """The summed loss, and stages with the gradients."""
    stages = [ToyStage(index, num_stages) for index in range(num_stages)]
    total = torch.zeros(())
    for batch in batches(num_microbatches):
        hidden = None
        for stage in stages:
            hidden = stage(hidden, batch)
        torch.autograd.backward(hidden, torch.tensor(grad_scale))
        total += hidden.detach()
    return total, stages
