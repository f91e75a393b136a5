"""`--optimizer-cpu-offload` changes no bit (law L7), also where copies complete as late as they
may.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nanotrain.comm.collectives import barrier
from nanotrain.comm.device import HostTransfer
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import OptimConfig
from nanotrain.optim import offload
from nanotrain.optim.distributed import DistributedOptimizer
from nanotrain.precision.dtypes import Precision
from tests.harness import ranks
from tests.optim.test_distributed import CONFIG, Trainee, grads_of
from tests.optim.test_muon import CONFIG as MUON

BF16 = torch.bfloat16
VARIANTS = [
    (CONFIG, Precision(torch.float32)),
    (CONFIG, Precision(BF16)),
    (CONFIG, Precision(BF16, exp_avg=BF16, exp_avg_sq=BF16)),
    (CONFIG, Precision(BF16, grads=BF16, main_grads=BF16)),
    # model params have no scales
    (CONFIG, Precision(torch.float16, main=torch.float16, exp_avg=torch.float16)),
    (MUON, Precision(BF16)),
]


class LateCopies:
    """Copies in one queue that are made as late as the callers permit; a target is NaN until then."""

    def __init__(self, device: torch.device) -> None:
        self._queue: list[Callable[[], None]] = []

    def wait_for_device(self) -> None:
        pass

    def start(self, target: Tensor, source: Tensor) -> "LateCopies.Copy":
        assert target.dtype == source.dtype
        self._queue.append(lambda: target.copy_(source))
        target.fill_(float("nan"))
        return LateCopies.Copy(self, self._queue[-1])

    def finish(self) -> None:
        self._run(None)

    def _run(self, last: Callable[[], None] | None) -> None:
        while self._queue and last in (None, *self._queue):
            self._queue.pop(0)()

    class Copy:
        def __init__(self, copies: "LateCopies", copy: Callable[[], None]) -> None:
            self._copies, self._copy = copies, copy

        def wait_on_host(self) -> None:
            if self._copy in self._copies._queue:
                self._copies._run(self._copy)


def train(
    ctx: ParallelContext, strategy: str, config: OptimConfig, *more: Precision
) -> dict[str, Tensor]:
    (precision,) = more
    trainee = Trainee(ctx, strategy, config=config, dtype=precision.params, precision=precision)
    has_host = [part.host is not None for part in trainee.optimizer._parts]
    assert any(has_host) is config.optimizer_cpu_offload
    for step in range(3):
        trainee.step(grads_of(ctx.rank, step))
    full: dict[str, Tensor] = {}
    for box, view in trainee.optimizer.state_tensors().items():
        full.setdefault(box.name, torch.zeros(box.shape))[box.box.slices()] = view.float()
    return full | trainee.weights()


def copies_of(ctx: ParallelContext, kind: Any) -> None:
    """Choose the copies of all ranks, which are threads of one process, between what they do before
    and after.
    """
    barrier(ctx.control)
    offload.HostTransfer = kind
    barrier(ctx.control)


@ranks(2, strategy="optim")
def test_state_on_the_host_gives_the_same_bits_and_a_part_of_it_the_same_values(ctx):
    for strategy in ("no_shard", "optim_grads"):
        for config, precision in VARIANTS:
            on_device = train(ctx, strategy, config, precision)
            on_host = replace(config, optimizer_cpu_offload=True)
            divided = replace(on_host, optimizer_offload_fraction=0.4)
            full, part = (train(ctx, strategy, each, precision) for each in (on_host, divided))
            copies_of(ctx, LateCopies)
            for immediate, each in ((full, on_host), (part, divided)):
                delayed = train(ctx, strategy, each, precision)
                assert all(torch.equal(tensor, immediate[name]) for name, tensor in delayed.items())
            copies_of(ctx, HostTransfer)
            is_rounded = precision != Precision(torch.float32)
            for name, tensor in on_device.items():
                assert torch.equal(full[name], tensor), f"{strategy} {precision}: {name}"
                # AdamW rounds the ends of a range in another order, which may round what is stored
                # in bf16 otherwise
                tolerance = (
                    {"rtol": 2**-6, "atol": 1e-3} if is_rounded else {"rtol": 1e-5, "atol": 1e-7}
                )
                torch.testing.assert_close(part[name], tensor, **tolerance)


def test_the_host_waits_for_the_device_before_updates_are_queued_on_it():
    calls: list[str] = []
    host = SimpleNamespace(
        start_grads=lambda: calls.append("copy"), run=lambda rule, step: calls.append("host")
    )
    rule = SimpleNamespace(update=lambda ranges, step: calls.append("device"))
    optimizer = SimpleNamespace(
        _host=host, _rule=rule, _matrix_updates=[], _ranges=[1], _converted=[], _rounded=[]
    )
    step = SimpleNamespace(on_host=lambda: calls.append("wait") or "numbers on the host")
    DistributedOptimizer._run_rules(optimizer, step)  # type: ignore[arg-type]
    assert calls == ["copy", "wait", "device", "host"]
