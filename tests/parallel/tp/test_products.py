"""The order in which the backward of parallel layers starts collectives and products."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nanotrain.comm.work import Work
from nanotrain.parallel.tp import region as crossing
from nanotrain.parallel.tp.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    column_parallel,
)
from tests.harness import ranks

B, S, I, O = 2, 4, 6, 10  # noqa: E741


class Recorder(TorchDispatchMode):
    """Records matrix products by their result, and the start and wait of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
            self.events.append(
                {(B * S, I): "input gradient", (O, I): "weight gradient"}[tuple(out.shape)]
            )
        elif func.overloadpacket is torch.ops.aten.bmm:
            self.events.append(f"input gradient of {out.shape[1]} tokens")
        return out

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Record collectives from here on."""

        def record(name: str, start):
            def begin(*args, **kwargs) -> Work:
                self.events.append(f"start {name}")
                work = start(*args, **kwargs)

                def wait() -> torch.Tensor:
                    self.events.append(f"wait {name}")
                    return work.wait()

                return type("Recorded", (), {"wait": staticmethod(wait)})()

            return begin

        for name in ("start_all_gather", "start_reduce_scatter", "start_all_reduce"):
            patch.setattr(
                crossing, name, record(name.removeprefix("start_"), getattr(crossing, name))
            )


EXPECTED = {
    False: [
        *("input gradient", "input gradient", "start all_reduce"),
        *("weight gradient", "weight gradient", "wait all_reduce"),
    ],
    True: [
        *("start all_gather", "input gradient", "input gradient", "start reduce_scatter"),
        *("wait all_gather", "weight gradient", "weight gradient", "wait reduce_scatter"),
    ],
}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@ranks(2, tp=2, threads=False)
def test_every_collective_starts_before_a_product_that_overlaps_it(ctx, sequence_parallel):
    tensor_parallel = TensorParallel(ctx.group("tp"), sequence_parallel)
    weights = [nn.Parameter(torch.zeros(O, I)) for _ in range(2)]
    layers = [
        ColumnParallelLinear(weight, None, tensor_parallel=tensor_parallel) for weight in weights
    ]
    x = torch.zeros(B, S // 2 if sequence_parallel else S, I, requires_grad=True)
    first, second = column_parallel(x, layers)
    recorder, loss = Recorder(), (first + second).sum()
    with pytest.MonkeyPatch.context() as patch, recorder:
        recorder.watch(patch)
        loss.backward()
    assert recorder.events == EXPECTED[sequence_parallel]


@ranks(4, tp=4, threads=False)
def test_the_input_gradient_of_a_ranks_tokens_overlaps_the_gather_of_the_others(ctx):
    tensor_parallel = TensorParallel(ctx.group("tp"), sequence_parallel=True)
    layer = RowParallelLinear(
        nn.Parameter(torch.randn(O, I)), None, tensor_parallel=tensor_parallel
    )
    x = torch.randn(B, S, I, requires_grad=True)
    recorder, loss = Recorder(), layer(x).square().sum()
    with pytest.MonkeyPatch.context() as patch, recorder:
        recorder.watch(patch)
        loss.backward()
    # tokens before and after those of this rank
    others = [num for num in (ctx.rank, 3 - ctx.rank) if num]
    assert recorder.events == [
        *("start all_gather", "input gradient of 1 tokens", "wait all_gather"),
        *(f"input gradient of {num} tokens" for num in others),
        *("wait all_gather", "weight gradient"),
    ]


@ranks(2, tp=2)
def test_a_weight_written_between_forward_and_backward_is_an_error(ctx):
    tensor_parallel = TensorParallel(ctx.group("tp"))
    layer = ColumnParallelLinear(
        nn.Parameter(torch.zeros(O, I)), None, tensor_parallel=tensor_parallel
    )
    (out,) = column_parallel(torch.zeros(B, S, I, requires_grad=True), (layer,))
    with torch.no_grad():
        layer.weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
