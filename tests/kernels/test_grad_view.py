"""Weight gradients that products write into the gradient buffer equal those that a hook copies there."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nanotrain.comm.group import Group
from nanotrain.kernels import linear as linear_module
from nanotrain.kernels.deferred_wgrad import WgradQueue, accumulate_wgrads
from nanotrain.kernels.grad_view import GradView, grad_view_of
from nanotrain.kernels.linear import write_wgrad
from nanotrain.parallel.dp.data_parallel import DataParallel, DataParallelOptions
from nanotrain.parallel.dp.reduction import ReduceGroups
from nanotrain.parallel.dp.strategy import STRATEGIES
from nanotrain.parallel.tp.layers import ColumnParallelLinear, RowParallelLinear, column_parallel
from nanotrain.parallel.tp.loss import Targets, Vocabulary, vocab_parallel_cross_entropy
from nanotrain.parallel.tp.tensor_parallel import TensorParallel
from nanotrain.precision.policy import Precision
from tests.parallel.dp.toys import layout_of
from tests.parallel.tp.networks import draw

T, I, O, V = 5, 8, 12, 20  # noqa: E741
SINGLE = Group.single_rank("tp")
GROUPS = ReduceGroups(Group.single_rank("dp_shard"), Group.single_rank("dp_replicate"))


class Network(nn.Module):
    """first and second read one input; last's weight is used twice, and head's also by an embedding."""

    def __init__(self, queue: WgradQueue | None = None) -> None:
        super().__init__()
        parallel = TensorParallel(SINGLE, wgrad_queue=queue)
        self.first, self.second = (
            ColumnParallelLinear(nn.Parameter(draw(name, O, I)), nn.Parameter(draw(name, O)), tensor_parallel=parallel)
            for name in ("first", "second")
        )
        self.last = RowParallelLinear(nn.Parameter(draw("last", I, O)), None, tensor_parallel=parallel)
        self.head = nn.Parameter(draw("head", V, I))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = F.embedding(tokens, self.head)
        gate, up = column_parallel(hidden, (self.first, self.second))
        again, _ = column_parallel(self.last(torch.tanh(gate) * up), (self.first, self.second))
        hidden = self.last(torch.tanh(again)).flatten(0, 1)
        targets = Targets(tokens.flatten(), torch.ones(tokens.numel()))
        return vocab_parallel_cross_entropy(
            hidden, self.head, targets=targets, vocabulary=Vocabulary(V - 2), group=SINGLE
        )


def wrap(
    network: Network, *, writes: bool, dtype: torch.dtype = torch.float32, strategy: str = "optim"
) -> DataParallel:
    weights = {name: param.detach().clone() for name, param in network.named_parameters()}
    options = DataParallelOptions(STRATEGIES[strategy], overlap_grad_reduce=True, writes_wgrads=writes)
    layout = layout_of(network, bucket_size=150)
    cpu = torch.device("cpu")
    parallel = DataParallel(
        network, layout, groups=GROUPS, options=options, precision=Precision(params=dtype), device=cpu
    )
    assert len(parallel.buckets) >= 3 and any(b.layout.numel > b.layout.unpadded_numel for b in parallel.buckets)
    with torch.no_grad():
        for name, param in network.named_parameters():
            param.copy_(weights[name])
    return parallel


def microbatch(seed: int) -> Tensor:
    return torch.randint(V - 2, (2, T), generator=torch.Generator().manual_seed(seed))


def step(network: Network, parallel: DataParallel, *, queue: WgradQueue | None = None) -> Tensor:
    """The gradients of a step of two microbatches; with a queue its weight gradients are deferred."""
    parallel.begin_step()
    for seed in (0, 1):
        loss, params = network(microbatch(seed)), list(network.parameters())
        if queue is None:
            parallel.backward_begins(is_last=seed == 1)
            loss.backward(torch.tensor(3.0))
        else:
            with queue.defer():
                grads = torch.autograd.grad(loss, params, torch.tensor(3.0), allow_unused=True)
            ready = [(param, grad) for param, grad in zip(params, grads, strict=True) if grad is not None]
            parallel.backward_begins(is_last=seed == 1)
            accumulate_wgrads(queue.take(), ready=ready)
        assert all(param.grad is None for param in params)
        if seed == 1:
            assert all(bucket.is_ready for bucket in parallel.buckets), "their reduction overlaps the backward"
        parallel.backward_ended()
    parallel.finish_grad_reduce()
    return torch.cat([bucket.grads.main for bucket in parallel.buckets])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_deferred", [False, True], ids=["at once", "deferred"])
def test_written_gradients_are_those_that_autograd_returns(dtype: torch.dtype, is_deferred: bool) -> None:
    found = []
    for writes in (False, True):
        queue = WgradQueue() if is_deferred else None
        network = Network(queue)
        parallel = wrap(network, writes=writes, dtype=dtype)
        assert (grad_view_of(network.head) is not None) == writes
        step(network, parallel, queue=queue)  # the second step overwrites what the first left behind
        found.append(step(network, parallel, queue=queue))
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=tolerance * found[0].abs().max().item())


def test_a_bucket_is_reduced_after_the_last_use_of_its_weights_and_before_the_backward_ends() -> None:
    network = Network()
    parallel = wrap(network, writes=True)
    events: list[str] = []
    (bucket,) = (b for b in parallel.buckets if any(entry.name == "last.weight" for entry in b.layout.params))
    start, write = bucket.start_reduce, bucket.start_write

    def record_start(*, is_last: bool) -> None:
        events.append("reduce")
        start(is_last=is_last)

    def record_write(name: str) -> tuple[Tensor, bool]:
        events.append(name)
        return write(name)

    bucket.start_reduce, bucket.start_write = record_start, record_write  # type: ignore[method-assign]
    step(network, parallel)
    of_weight = [event for event in events if event in ("last.weight", "reduce")]
    assert of_weight == ["last.weight"] * 4 + ["reduce"], "two uses in each of two microbatches"


def test_gradients_are_returned_outside_of_a_backward_of_the_wrapper_and_where_they_are_sharded_at_once() -> None:
    network = Network()
    wrap(network, writes=True)
    grads = torch.autograd.grad(network(microbatch(0)), list(network.parameters()))
    assert all(grad.any() for grad in grads)
    sharded = Network()
    wrap(sharded, writes=True, strategy="optim_grads")
    assert all(grad_view_of(param) is None for param in sharded.parameters())


def test_second_derivatives_are_refused_where_products_write_gradients() -> None:
    network = Network()
    wrap(network, writes=True)
    with pytest.raises(RuntimeError, match="--no-gradient-accumulation-fusion"):
        torch.autograd.grad(network.last(draw("hidden", T, O)).sum(), [network.last.weight], create_graph=True)


def test_fp32_products_write_without_a_gradient_beside_the_buffer() -> None:
    network = Network()
    parallel = wrap(network, writes=True)
    sizes = {tuple(param.shape) for param in network.parameters() if param.ndim == 2} - {(V, I)}
    outputs: list[tuple[str, bool]] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and tuple(out.shape) in sizes and not func.is_view:
                buffers = [bucket.grads.full().untyped_storage().data_ptr() for bucket in parallel.buckets]
                outputs.append((str(func), out.untyped_storage().data_ptr() in buffers))
            return out

    parallel.begin_step()
    loss = network(microbatch(0))
    parallel.backward_begins(is_last=True)
    with Record():
        loss.backward()
    names = {name for name, _ in outputs}
    assert names == {"aten.mm.out", "aten.addmm_.default"} and all(is_written for _, is_written in outputs)


def test_where_cublas_adds_in_fp32_the_first_product_is_written_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "adds_wider", lambda device_type: True)
    grad, x = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((T, O), (T, I)))
    buffer, called = torch.empty(O, I, device="meta"), []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if not func.is_view:
                called.append((str(func), kwargs["out"] is buffer))
            return func(*args, **(kwargs or {}))

    with Record():
        write_wgrad(grad, x, out=buffer)
    assert called == [("aten.mm.dtype_out", True)]


def test_a_written_gradient_is_ready_once_after_its_last_deferred_use() -> None:
    weight, events = nn.Parameter(torch.zeros(2)), []
    weight.grad_view = GradView(torch.float32, lambda: None, lambda: events.append("ready"))  # type: ignore[attr-defined]

    class Written:
        params = (weight,)

        def start(self) -> None:
            pass

        def compute(self) -> tuple[None]:
            events.append("written")
            return (None,)

    accumulate_wgrads([Written(), Written()])
    assert events == ["written", "written", "ready"] and weight.grad is None
