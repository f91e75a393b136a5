"""A network whose products write weight gradients, its data-parallel wrapper and one step of it."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.comm.group import Group
from nanotrain.kernels.deferred_wgrad import WgradQueue, accumulate_wgrads
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.parallel.dp.layout import LayoutRules, plan_layout
from nanotrain.parallel.dp.options import STRATEGIES, DataParallelOptions, ReduceGroups
from nanotrain.parallel.tp.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    column_parallel,
)
from nanotrain.parallel.tp.loss import Targets, Vocabulary, vocab_parallel_cross_entropy
from nanotrain.precision.dtypes import Precision
from tests.parallel.dp.toys import local_params
from tests.parallel.tp.networks import draw

T, I, O, V = 5, 8, 12, 20  # noqa: E741
SMALL_BUCKETS = LayoutRules(bucket_size=150)
SINGLE = Group.single_rank("tp")
GROUPS = ReduceGroups(Group.single_rank("dp_shard"), Group.single_rank("dp_replicate"))


class Network(nn.Module):
    """first and second read one input; last's weight is used twice, and head's also by an
    embedding.
    """

    def __init__(self, queue: WgradQueue | None = None) -> None:
        super().__init__()
        parallel = TensorParallel(SINGLE, wgrad_queue=queue)
        self.first, self.second = (
            ColumnParallelLinear(
                nn.Parameter(draw(name, O, I)),
                nn.Parameter(draw(name, O)),
                tensor_parallel=parallel,
            )
            for name in ("first", "second")
        )
        self.last = RowParallelLinear(
            nn.Parameter(draw("last", I, O)), None, tensor_parallel=parallel
        )
        self.head = nn.Parameter(draw("head", V, I))

    def block(self, hidden: Tensor) -> Tensor:
        gate, up = column_parallel(hidden, (self.first, self.second))
        again, _ = column_parallel(self.last(torch.tanh(gate) * up), (self.first, self.second))
        out: Tensor = self.last(torch.tanh(again))
        return out

    def short_block(self, hidden: Tensor) -> Tensor:
        """Every weight is used once."""
        gate, up = column_parallel(hidden, (self.first, self.second))
        out: Tensor = self.last(torch.tanh(gate) * up)
        return out

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.block(F.embedding(tokens, self.head)).flatten(0, 1)
        targets = Targets(tokens.flatten(), torch.ones(tokens.numel(), device=tokens.device))
        return vocab_parallel_cross_entropy(
            hidden, self.head, targets=targets, vocabulary=Vocabulary(V - 2), group=SINGLE
        )


def wrap(
    network: nn.Module,
    *,
    writes: bool,
    dtype: torch.dtype = torch.float32,
    strategy: str = "optim",
    device: torch.device | None = None,
    rules: LayoutRules = SMALL_BUCKETS,
) -> DataParallel:
    """The network on a device, by default the CPU, in buckets of a parameter or two; all but the
    head are one unit.
    """
    weights = {name: param.detach().clone() for name, param in network.named_parameters()}
    options = DataParallelOptions(
        STRATEGIES[strategy], overlap_grad_reduce=True, writes_wgrads=writes
    )
    params = [
        replace(
            local, spec=replace(local.spec, unit="head" if local.spec.name == "head" else "block")
        )
        for local in local_params(network, tied=["head"])
    ]
    layout = plan_layout(params, rules)
    device = device or torch.device("cpu")
    parallel = DataParallel(
        network,
        layout,
        groups=GROUPS,
        options=options,
        precision=Precision(params=dtype),
        device=device,
    )
    assert len(parallel.buckets) >= (2 if rules.gathers_by_unit else 3) and any(
        b.layout.stop > b.layout.params[-1].stop for b in parallel.buckets
    )
    with torch.no_grad():
        for name, param in network.named_parameters():
            param.copy_(weights[name])
    return parallel


def microbatch(seed: int) -> Tensor:
    return torch.randint(V - 2, (2, T), generator=torch.Generator().manual_seed(seed))


def step(network: nn.Module, parallel: DataParallel, *, queue: WgradQueue | None = None) -> Tensor:
    """The gradients of a step of two microbatches; with a queue its weight gradients are deferred."""
    parallel.begin_step()
    device = parallel.param_buffer.device
    for seed in (0, 1):
        loss, params = network(microbatch(seed).to(device)), list(network.parameters())
        if queue is None:
            parallel.backward_begins(is_last=seed == 1)
            loss.backward(torch.tensor(3.0, device=device))
        else:
            with queue.defer():
                grads = torch.autograd.grad(
                    loss, params, torch.tensor(3.0, device=device), allow_unused=True
                )
            ready = [
                (param, grad) for param, grad in zip(params, grads, strict=True) if grad is not None
            ]
            parallel.backward_begins(is_last=seed == 1)
            accumulate_wgrads(queue.take(), ready=ready)
        assert all(param.grad is None for param in params)
        if seed == 1:
            assert all(bucket.is_ready for bucket in parallel.buckets), (
                "their reduction overlaps the backward"
            )
        parallel.backward_ended()
    parallel.finish_grad_reduce()
    return torch.cat([bucket.grads.main for bucket in parallel.buckets])
