"""Weight gradients that products write into the gradient buffer equal those that a hook copies
there.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nanotrain.kernels import linear as linear_module
from nanotrain.kernels.deferred_wgrad import WgradQueue, accumulate_wgrads
from nanotrain.kernels.linear import GradView, grad_view_in_graph, grad_view_of, write_wgrad
from tests.kernels.writing_network import I, Network, O, T, V, draw, microbatch, step, wrap


@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_deferred", [False, True], ids=["at once", "deferred"])
def test_written_gradients_are_those_that_autograd_returns(
    dtype: torch.dtype, is_deferred: bool, strategy: str
) -> None:
    results, is_sharded = [], strategy == "optim_grads"
    for writes in (False, True):
        queue = WgradQueue() if is_deferred else None
        network = Network(queue)
        parallel = wrap(network, writes=writes, dtype=dtype, strategy=strategy)
        assert (grad_view_of(network.last.weight) is not None) == writes
        # A weight of several units would hold full-size storage from its first use to its last.
        assert (grad_view_of(network.head) is not None) == (writes and not is_sharded)
        # the second step overwrites what the first left behind
        step(network, parallel, queue=queue)
        results.append(step(network, parallel, queue=queue))
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(
        results[1], results[0], rtol=tolerance, atol=tolerance * results[0].abs().max().item()
    )


def test_the_next_two_buckets_borrow_memory_and_gradients_of_later_ones_are_kept_until_their_turn() -> (
    None
):
    parallel = wrap(Network(), writes=True, strategy="optim_grads")
    first, second, *later = [bucket.layout.params[0].name for bucket in parallel.buckets]
    for _ in range(2):
        parallel.begin_step()
        parallel.backward_begins(is_last=True)
        assert parallel._start_write(first) and parallel._start_write(second) and later
        assert not any(parallel._start_write(name) for name in later)
        for added in (False, True):  # used twice in a graph
            for name in later:
                view, has_grads = parallel._start_write(name, in_graph=True) or (
                    torch.empty(0),
                    None,
                )
                assert has_grads is added
                view.copy_(view + 1 if added else torch.ones_like(view))
        for name in later:  # and once outside of it
            parallel._bucket_of[name].keep_grad(
                name, torch.ones(parallel._views[name][1].shape).bfloat16()
            )
        parallel.backward_ended()
        parallel.finish_grad_reduce()
        assert all(
            parallel._bucket_of[name].view(name, parallel._bucket_of[name].grads.main).eq(3).all()
            for name in later
        )


def test_a_bucket_is_reduced_after_the_last_use_of_its_weights_and_before_the_backward_ends() -> (
    None
):
    network = Network()
    parallel = wrap(network, writes=True)
    events: list[str] = []
    (bucket,) = (
        b for b in parallel.buckets if any(entry.name == "last.weight" for entry in b.layout.params)
    )
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


def test_gradients_are_returned_outside_of_a_backward_of_the_wrapper() -> None:
    network = Network()
    wrap(network, writes=True)
    grads = torch.autograd.grad(network(microbatch(0)), list(network.parameters()))
    assert all(grad.any() for grad in grads)


def test_second_derivatives_are_refused_where_products_write_gradients() -> None:
    network = Network()
    wrap(network, writes=True)
    with pytest.raises(RuntimeError, match="--no-gradient-accumulation-fusion"):
        torch.autograd.grad(
            network.last(draw("hidden", T, O)).sum(), [network.last.weight], create_graph=True
        )


def test_fp32_products_write_without_a_gradient_beside_the_buffer() -> None:
    network = Network()
    parallel = wrap(network, writes=True)
    sizes = {tuple(param.shape) for param in network.parameters() if param.ndim == 2} - {(V, I)}
    outputs: list[tuple[str, bool]] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and tuple(out.shape) in sizes and not func.is_view:
                buffers = [
                    bucket.grads.full().untyped_storage().data_ptr() for bucket in parallel.buckets
                ]
                outputs.append((str(func), out.untyped_storage().data_ptr() in buffers))
            return out

    parallel.begin_step()
    loss = network(microbatch(0))
    parallel.backward_begins(is_last=True)
    with Record():
        loss.backward()
    names = {name for name, _ in outputs}
    assert names == {"aten.mm.out", "aten.addmm_.default"} and all(
        is_written for _, is_written in outputs
    )


def test_where_cublas_adds_in_fp32_the_first_product_is_written_in_fp32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_module, "adds_wider", lambda device_type: True)
    grad, x = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((T, O), (T, I))
    )
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


def test_the_view_of_a_saved_tensor_is_that_of_its_parameter() -> None:
    network = Network()
    wrap(network, writes=True)
    for param in network.parameters():
        assert grad_view_in_graph(param.detach()) is grad_view_of(param) is not None
