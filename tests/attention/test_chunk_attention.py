"""Merged chunks of attention are attention to all keys, by torch's fused operator and by the eager form."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.attention.chunk_attention import (
    EAGER,
    FUSED,
    AttentionChunk,
    AttentionOps,
    AttentionResult,
    chunk_backward,
    chunk_forward,
    merge_log_sum_exp,
)

FUSED_CPU = FUSED["cpu", False, False]
OPS = {"fused": FUSED_CPU, "eager": EAGER}


def random_chunk(
    *, keys: int, mask: torch.Tensor | None = None, is_causal: bool = False, seed: int = 0
) -> AttentionChunk:
    generator = torch.Generator().manual_seed(seed)

    def random(length: int) -> torch.Tensor:
        return torch.randn(2, 3, length, 8, generator=generator, dtype=torch.float64)

    return AttentionChunk(random(5), random(keys), random(keys), mask, is_causal, scale=0.3)


def random_mask(*, keys: int, seed: int) -> torch.Tensor:
    """Some rows allow all keys, some none."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(2, 1, 5, keys, generator=generator) < torch.rand(2, 1, 5, 1, generator=generator).round()


@given(st.integers(1, 7), st.integers(0, 100))
def test_the_fused_operator_equals_the_eager_form(keys, seed):
    for mask in (None, random_mask(keys=keys, seed=seed)):
        chunk = random_chunk(keys=keys, mask=mask, seed=seed)
        fused, eager = (ops.forward(chunk) for ops in (FUSED_CPU, EAGER))
        has_keys = torch.ones(2, 1, 5, dtype=torch.bool) if mask is None else mask.any(-1)
        torch.testing.assert_close(fused.out * has_keys[..., None], eager.out * has_keys[..., None])
        torch.testing.assert_close(fused.lse, eager.lse)
        # merged with further keys, a chunk's rows have a larger log-sum-exp
        merged = AttentionResult(eager.out, eager.lse.clamp(min=0) + 1)
        gradients = (ops.backward(chunk, merged, grad=torch.ones_like(eager.out)) for ops in (FUSED_CPU, EAGER))
        for one, other in zip(*(vars(result).values() for result in gradients), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
def test_merged_chunks_are_attention_to_all_keys(ops: AttentionOps):
    # Given keys in three chunks, of which the second is masked for every query and the third for some
    full = random_chunk(keys=9, mask=torch.ones(2, 1, 5, 9, dtype=torch.bool))
    full.mask[..., 3:6] = False
    full.mask[:, :, 2:, 6:] = False
    chunks = [
        AttentionChunk(full.query, full.key[:, :, keys], full.value[:, :, keys], full.mask[..., keys], False, 0.3)
        for keys in (slice(0, 3), slice(3, 6), slice(6, 9))
    ]
    # when they are merged one after the other
    total = ops.forward(chunks[0])
    for chunk in chunks[1:]:
        merge_log_sum_exp(total, ops.forward(chunk))
    # then output and log-sum-exp are those of all keys, and so are the gradients.
    expected = EAGER.forward(full)
    torch.testing.assert_close(total.out, expected.out)
    torch.testing.assert_close(total.lse, expected.lse)
    grad = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    parts = [ops.backward(chunk, expected, grad=grad) for chunk in chunks]
    at_once = EAGER.backward(full, expected, grad=grad)
    torch.testing.assert_close(sum(part.query for part in parts), at_once.query)
    torch.testing.assert_close(torch.cat([part.key for part in parts], dim=2), at_once.key)
    torch.testing.assert_close(torch.cat([part.value for part in parts], dim=2), at_once.value)


def test_a_merge_of_some_queries_leaves_the_others_as_they_are():
    first, second = (EAGER.forward(random_chunk(keys=4, seed=seed)) for seed in (0, 1))
    total = AttentionResult(first.out.clone(), first.lse.clone())

    merge_log_sum_exp(total.queries(slice(2, 5)), second.queries(slice(2, 5)))

    assert torch.equal(total.out[:, :, :2], first.out[:, :, :2]) and torch.equal(total.lse[..., :2], first.lse[..., :2])
    assert (total.lse[..., 2:] > first.lse[..., 2:]).all()


@pytest.mark.parametrize("value_head_dim", [4, 8, 12])
def test_gradients_are_those_of_autograd(value_head_dim):
    chunk = random_chunk(keys=5, is_causal=True)
    query, key = (x.clone().requires_grad_() for x in (chunk.query, chunk.key[:, :1]))
    value = torch.randn(2, 1, 5, value_head_dim, dtype=torch.float64, requires_grad=True)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key.expand(2, 3, 5, 8), value.expand(2, 3, 5, -1), is_causal=True, scale=0.3
    )
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, (query, key, value), grad)
    grouped = AttentionChunk(query.detach(), key.detach(), value.detach(), None, True, scale=0.3)
    result = chunk_forward(grouped)
    torch.testing.assert_close(result.out, out.detach())
    gradients = chunk_backward(grouped, result, grad=grad)
    for one, other in zip((gradients.query, gradients.key, gradients.value), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_of_shared_heads_are_summed_in_fp32():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 5, 8, generator=generator).bfloat16() for heads in (4, 2, 2))
    chunk = AttentionChunk(query, key, value, None, is_causal=False, scale=0.3)
    gradients = chunk_backward(chunk, chunk_forward(chunk), grad=torch.ones_like(query))
    assert gradients.key.dtype is gradients.value.dtype is torch.float32
