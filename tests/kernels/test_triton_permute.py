"""The Triton kernels of permute and unpermute against fp64, in Triton's interpreter; the bytes they
move.
"""

import os

import pytest
import torch

from nanotrain.kernels import permute, triton_permute
from nanotrain.kernels.permute import TORCH_FORM, plan_permutation

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
T, K, E, H = 6, 3, 4, 37  # three blocks of columns, the last one not full
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-7}  # the interpreter cuts bf16 off


@pytest.fixture
def form(monkeypatch: pytest.MonkeyPatch) -> permute.PermuteForm:
    monkeypatch.setattr(triton_permute, "BLOCK", 16)
    return permute.triton_form()


@pytest.mark.parametrize("omits_dropped", [False, True])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_every_kernel_equals_torch_in_fp64(form, dtype, omits_dropped) -> None:
    torch.manual_seed(0)
    topk_ids = torch.rand(T, E).topk(K).indices
    topk_ids[::2, 1] = E  # dropped
    plan = plan_permutation(topk_ids, E)
    order = plan.order[: int(plan.offs[-1])] if omits_dropped else plan.order
    x, grad, rows = (torch.randn(size, H).to(dtype) for size in (T, T, len(order)))
    weights, close = torch.rand(T, K), {"rtol": ROUNDING[dtype], "atol": ROUNDING[dtype]}

    assert torch.equal(
        form.spread(x, order, inverse=plan.inverse),
        TORCH_FORM.spread(x, order, inverse=plan.inverse),
    )
    for each in (None, weights):
        exact = TORCH_FORM.combine(
            rows.double(), plan.inverse, weights=None if each is None else each.double()
        )
        torch.testing.assert_close(
            form.combine(rows, plan.inverse, weights=each).double(), exact.double(), **close
        )
    given = {"order": order, "inverse": plan.inverse}
    found = form.combine_backward(grad, rows, weights=weights, **given)
    wanted = TORCH_FORM.combine_backward(
        grad.double(), rows.double(), weights=weights.double(), **given
    )
    for actual, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(actual.double(), expected.double(), **close)


def test_without_tokens_nothing_is_launched(form) -> None:
    plan = plan_permutation(torch.zeros(0, K, dtype=torch.int64), E)
    assert form.spread(torch.zeros(0, H), plan.order, inverse=plan.inverse).shape == (0, H)
    assert form.combine(torch.zeros(0, H), plan.inverse, weights=None).shape == (0, H)
