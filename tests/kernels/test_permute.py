"""Permutations have the gradients of plain indexing and sum in fp32."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.kernels.permute import inverse_of, permute, plan_permutation, reorder, unpermute

H = 5


@st.composite
def routings(draw):
    """[T, K] experts with E in place of dropped ones, and E."""
    num_experts, topk = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    rows = draw(
        st.lists(
            st.lists(st.integers(0, num_experts), min_size=topk, max_size=topk),
            min_size=1,
            max_size=12,
        )
    )
    return torch.tensor(rows), num_experts


@given(routings())
def test_permuted_tokens_are_sorted_by_expert_and_every_pair_has_its_position(drawn):
    experts, num_experts = drawn
    plan = plan_permutation(experts, num_experts)
    in_rows = experts.flatten()[plan.order]
    assert in_rows.tolist() == sorted(experts.flatten().tolist())
    assert torch.equal(plan.order[plan.inverse.flatten()], torch.arange(experts.numel()))
    assert plan.tokens_per_expert.tolist() == [
        (experts == expert).sum().item() for expert in range(num_experts)
    ]


@given(routings(), st.booleans())
def test_permute_and_unpermute_have_the_gradients_of_plain_indexing(drawn, omits_dropped):
    # given: tokens, weights, and rows with or without those of dropped choices at their end
    experts, num_experts = drawn
    num_tokens, topk = experts.shape
    plan = plan_permutation(experts, num_experts)
    kept = int((experts < num_experts).sum())
    num_rows = kept if omits_dropped else experts.numel()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, H, generator=generator, dtype=torch.float64).requires_grad_()
    weights = torch.rand(
        num_tokens, topk, generator=generator, dtype=torch.float64
    ).requires_grad_()
    grad = torch.randn(num_tokens, H, generator=generator, dtype=torch.float64)
    is_kept = (experts < num_experts).double()[..., None]
    factor = (experts + 1).double()[..., None]  # what "expert e" does: times e + 1

    # when
    rows = permute(x, plan, num_permuted=num_rows)
    in_rows = experts.flatten()[plan.order][:num_rows]
    outputs = rows * ((in_rows + 1) * (in_rows < num_experts)).double()[:, None]
    out = unpermute(outputs, plan, topk_weights=weights)
    actual = torch.autograd.grad(out, (x, weights), grad)

    # then
    expected = (x[:, None] * factor * is_kept * weights[..., None]).sum(1)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    for value, reference in zip(
        actual, torch.autograd.grad(expected, (x, weights), grad), strict=True
    ):
        torch.testing.assert_close(value, reference, rtol=1e-6, atol=1e-6)


@given(st.permutations(range(7)))
def test_reorder_is_undone_by_the_inverse(numbers):
    order = torch.tensor(numbers)
    rows = torch.arange(14.0).view(7, 2).requires_grad_()
    there = reorder(rows, order, inverse=inverse_of(order))
    assert torch.equal(there, rows[order])
    assert torch.equal(reorder(there, inverse_of(order), inverse=order), rows)
    (grad,) = torch.autograd.grad(there, rows, torch.arange(14.0).view(7, 2))
    assert torch.equal(grad[order], torch.arange(14.0).view(7, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_tokens_are_summed_in_fp32(dtype):
    plan = plan_permutation(torch.tensor([[0, 1, 2]]), 3)
    # one by one, bf16 would lose both ones
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=dtype)
    out = unpermute(rows, plan, topk_weights=torch.ones(1, 3))
    assert out.dtype == dtype
    assert out.item() == 258.0


def test_a_gradient_in_bf16_is_summed_over_the_experts_in_fp32_and_rounded_once() -> None:
    torch.manual_seed(0)
    permutation = plan_permutation(torch.rand(40, 6).topk(4).indices, 6)
    x = torch.randn(40, 16, dtype=torch.bfloat16, requires_grad=True)
    out_grad = torch.randn(160, 16, dtype=torch.bfloat16)
    (grad,) = torch.autograd.grad(permute(x, permutation, num_permuted=160), x, out_grad)
    assert torch.equal(
        grad, sum(out_grad[permutation.inverse[:, k]].float() for k in range(4)).bfloat16()
    )


def test_gradients_of_the_weights_are_products_in_fp32() -> None:
    torch.manual_seed(0)
    permutation = plan_permutation(torch.rand(20, 6).topk(3).indices, 6)
    rows, out_grad = (
        torch.randn(60, 16, dtype=torch.bfloat16),
        torch.randn(20, 16, dtype=torch.bfloat16),
    )
    weights = torch.rand(20, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(
        unpermute(rows, permutation, topk_weights=weights), weights, out_grad
    )
    expected = (rows.double()[permutation.inverse] * out_grad.double()[:, None]).sum(-1)
    torch.testing.assert_close(grad, expected.float())
