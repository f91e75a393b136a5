"""The Triton kernels against fp64, in Triton's interpreter.

Run with `pip install nanotrain[triton]` and `TRITON_INTERPRET=1`, which Triton reads when it is first imported.
"""

import os

import pytest
import torch

from nanotrain.kernels import swiglu as swiglu_module
from nanotrain.kernels import triton_kernels, vocabulary_softmax

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}  # bf16 rounds the results


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels in blocks of 16 elements, chosen for every tensor."""
    monkeypatch.setattr(triton_kernels, "BLOCK", 16)
    for module in (vocabulary_softmax, swiglu_module):
        monkeypatch.setattr(module, "uses_triton", lambda tensor: True)
    return triton_kernels


@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_and_gradient_of_two_shards_equal_fp64(interpreted, dtype):
    torch.manual_seed(1)
    full = (4 * torch.randn(5, 74)).to(dtype)  # 37 columns per shard: three blocks, the last one not full
    labels, exact = torch.tensor([0, 36, 37, 73, 40]), full.double().requires_grad_()
    log_probs = exact.log_softmax(1).gather(1, labels[:, None])[:, 0]
    (-log_probs.sum()).backward()
    shards = [full[:, :37].clone(), full[:, 37:].contiguous()]
    local = torch.cat([interpreted.row_logsumexp(shard) for shard in shards], dim=1)
    total, found = local.logsumexp(1, keepdim=True), []
    for index, shard in enumerate(shards):
        column = labels[:, None] - 37 * index
        is_local = ((column >= 0) & (column < 37)).float()
        found.append(
            vocabulary_softmax.softmax_gradient(
                shard, column=column.clamp(0, 36), is_local=is_local, combine=lambda _: total
            )
        )
        assert found[-1][1].data_ptr() == shard.data_ptr(), "in place"
    torch.testing.assert_close(found[0][0] + found[1][0], log_probs.detach().float(), rtol=1e-5, atol=1e-5)
    gradient = torch.cat([part for _, part in found], dim=1)
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=TOLERANCE[dtype], atol=1e-6)


def test_a_logit_that_is_not_a_number_shows_in_the_loss(interpreted):
    logits = torch.zeros(2, 20)
    logits[1, 3] = float("nan")
    lse = interpreted.row_logsumexp(logits)[:, 0]
    assert lse[0].isfinite() and lse[1].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_and_its_gradients_equal_fp64(interpreted, dtype):
    torch.manual_seed(2)
    gate, up, grad = (torch.randn(3, 19).to(dtype) for _ in range(3))  # two blocks of 16 per row, the last one not full
    exact = [x.double().requires_grad_() for x in (gate, up)]
    expected = torch.nn.functional.silu(exact[0]) * exact[1]
    expected.backward(grad.double())
    inputs = [x.clone().requires_grad_() for x in (gate, up)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = swiglu_module.swiglu(*inputs)
    grads = torch.autograd.grad(out, inputs, grad)
    assert len(saved) == 2  # gate and up
    for found, wanted in ((out, expected), *((x, y.grad) for x, y in zip(grads, exact, strict=True))):
        torch.testing.assert_close(found.double(), wanted.detach(), rtol=TOLERANCE[dtype], atol=1e-6)
