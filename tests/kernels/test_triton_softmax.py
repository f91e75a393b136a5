"""The Triton kernels against fp64, in Triton's interpreter.

Run with `pip install nanotrain[triton]` and `TRITON_INTERPRET=1`, which Triton reads when it is
first imported.
"""

import os

import pytest
import torch

from nanotrain.kernels import triton_softmax
from nanotrain.parallel.tp import loss

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}  # bf16 rounds the results


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels in blocks of 16 elements, chosen for every tensor."""
    monkeypatch.setattr(triton_softmax, "BLOCK", 16)
    monkeypatch.setattr(loss, "_softmax_gradient_by_torch", loss._softmax_gradient_by_triton)
    return triton_softmax


@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_and_gradient_of_two_shards_equal_fp64(interpreted, dtype):
    torch.manual_seed(1)
    # 37 columns per shard: three blocks, the last one not full
    full = (4 * torch.randn(5, 74)).to(dtype)
    labels, exact = torch.tensor([0, 36, 37, 73, 40]), full.double().requires_grad_()
    log_probs = exact.log_softmax(1).gather(1, labels[:, None])[:, 0]
    (-log_probs.sum()).backward()
    shards = [full[:, :37].clone(), full[:, 37:].contiguous()]
    local = torch.cat([interpreted.row_logsumexp(shard) for shard in shards], dim=1)
    total, actual = local.logsumexp(1, keepdim=True), []
    for index, shard in enumerate(shards):
        column = labels[:, None] - 37 * index
        local_mask = ((column >= 0) & (column < 37)).float()
        actual.append(
            loss.softmax_gradient(
                shard, column=column.clamp(0, 36), local_mask=local_mask, combine=lambda _: total
            )
        )
        assert actual[-1][1].data_ptr() == shard.data_ptr(), "in place"
    torch.testing.assert_close(
        actual[0][0] + actual[1][0], log_probs.detach().float(), rtol=1e-5, atol=1e-5
    )
    gradient = torch.cat([part for _, part in actual], dim=1)
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=TOLERANCE[dtype], atol=1e-6)


def test_a_logit_that_is_not_a_number_shows_in_the_loss(interpreted):
    logits = torch.zeros(2, 20)
    logits[1, 3] = float("nan")
    lse = interpreted.row_logsumexp(logits)[:, 0]
    assert lse[0].isfinite() and lse[1].isnan()
