"""Operations of kernels/ on a CUDA device against fp64."""

import pytest
import torch

from nanotrain.kernels.grouped import GroupedMM, has_wgrad_kernel
from nanotrain.kernels.linear import GradView, wgrad
from tests.kernels.writing_network import Network, step, wrap

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradients_are_added_in_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    grad, x = (torch.randn(256, size, device="cuda").to(dtype) for size in (64, 48))
    total = torch.randn(64, 48, device="cuda")
    expected = total.double() + grad.double().t() @ x.double()
    assert wgrad(grad, x, add_to=total) is total
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_compiled_and_eager_products_write_the_gradients_that_autograd_returns(
    strategy: str,
) -> None:
    found = []
    for writes, compiles in ((False, False), (True, False), (True, True)):
        torch._dynamo.reset()
        network = Network()
        parallel = wrap(
            network,
            writes=writes,
            dtype=torch.bfloat16,
            strategy=strategy,
            device=torch.device("cuda"),
        )
        block = (
            torch.compile(network.short_block, fullgraph=True) if compiles else network.short_block
        )
        network.block = block  # type: ignore[method-assign]
        step(network, parallel)  # the second step overwrites what the first left behind
        found.append(step(network, parallel))
    for written in found[1:]:
        torch.testing.assert_close(
            written, found[0], rtol=3e-2, atol=3e-2 * found[0].abs().max().item()
        )


@pytest.mark.parametrize("counts", [[300, 0, 77, 512], [0, 0, 0, 0]])
@pytest.mark.parametrize("has_grads", [False, True])
def test_weight_gradients_of_experts_are_added_in_fp32(counts: list[int], has_grads: bool) -> None:
    torch.manual_seed(2)
    rows = sum(counts)
    grad, x = (torch.randn(rows, size, device="cuda").bfloat16() for size in (384, 272))
    if not has_wgrad_kernel(x):
        pytest.skip("Triton compiles nothing here")
    before = torch.randn(len(counts), 384, 272, device="cuda")
    out = before.clone() if has_grads else before * torch.nan
    view = GradView(out.dtype, start_write=lambda: (out, has_grads), mark_ready=lambda: None)
    offs = torch.tensor(counts, device="cuda").cumsum(0).int()
    assert GroupedMM().accumulate_wgrad(grad, x, offs=offs, view=view)
    expected = before.double() if has_grads else torch.zeros_like(before, dtype=torch.float64)
    start = 0
    for expert, count in enumerate(counts):
        tokens = slice(start, start + count)
        expected[expert] += grad[tokens].double().t() @ x[tokens].double()
        start += count
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-3)
