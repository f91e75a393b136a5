"""Merged chunks of attention are attention to all keys, by torch's fused operator and by the eager
form.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nanotrain.attention import chunks
from nanotrain.attention.chunk_kernels import (
    FUSED,
    AttentionChunk,
    AttentionOps,
    AttentionResult,
    WeightDropout,
)
from nanotrain.attention.chunks import (
    EAGER,
    ScoreOptions,
    chunk_backward,
    chunk_forward,
    merge_log_sum_exp,
)
from nanotrain.attention.sdpa import SDPAttention
from nanotrain.comm.recorder import Recorder
from nanotrain.kernels.dropout import sample_words
from nanotrain.parallel.cp import CORE_ATTENTIONS, build_core_attention
from nanotrain.parallel.cp.split import local_chunks
from tests.harness import ranks
from tests.parallel.cp.sequences import Shape, full_mask, random_inputs, segments

FUSED_CPU = FUSED["cpu"]
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
    return (
        torch.rand(2, 1, 5, keys, generator=generator)
        < torch.rand(2, 1, 5, 1, generator=generator).round()
    )


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
        gradients = (
            ops.backward(chunk, merged, grad=torch.ones_like(eager.out))
            for ops in (FUSED_CPU, EAGER)
        )
        for gradient, reference in zip(
            *(vars(result).values() for result in gradients), strict=True
        ):
            torch.testing.assert_close(gradient, reference)


@pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
def test_merged_chunks_are_attention_to_all_keys(ops: AttentionOps):
    # Given keys in three chunks, of which the second is masked for every query and the third for
    # some
    full = random_chunk(keys=9, mask=torch.ones(2, 1, 5, 9, dtype=torch.bool))
    full.mask[..., 3:6] = False
    full.mask[:, :, 2:, 6:] = False
    chunks = [
        AttentionChunk(
            full.query,
            full.key[:, :, keys],
            full.value[:, :, keys],
            full.mask[..., keys],
            False,
            0.3,
        )
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

    assert torch.equal(total.out[:, :, :2], first.out[:, :, :2]) and torch.equal(
        total.lse[..., :2], first.lse[..., :2]
    )
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
    for gradient, reference in zip(
        (gradients.query, gradients.key, gradients.value), expected, strict=True
    ):
        torch.testing.assert_close(gradient, reference)


def test_gradients_of_shared_heads_are_summed_in_fp32():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, 5, 8, generator=generator).bfloat16() for heads in (4, 2, 2)
    )
    chunk = AttentionChunk(query, key, value, None, is_causal=False, scale=0.3)
    gradients = chunk_backward(chunk, chunk_forward(chunk), grad=torch.ones_like(query))
    assert gradients.key.dtype is gradients.value.dtype is torch.float32


SHAPE = Shape(heads=4, groups=2, length=16)
WORDS = sample_words(3, torch.arange(SHAPE.batch))
ALL = ScoreOptions(
    torch.linspace(-1, 2, SHAPE.heads).double(), 1.5, WeightDropout(WORDS, 0.3, first_head=8)
)
CASES = {
    "sink": ScoreOptions(ALL.sink),
    "bound": ScoreOptions(softcap=1.5),
    "dropout": ScoreOptions(dropout=ALL.dropout),
    "all": ALL,
}


def formula(
    inputs: list[Tensor], mask: Tensor, options: ScoreOptions, sink: Tensor | None
) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in inputs)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if options.softcap is not None:
        scores = options.softcap * (scores / options.softcap).tanh()
    scores = scores.masked_fill(~mask, -torch.inf)
    if sink is not None:
        scores = torch.cat((scores, sink[:, None, None].expand(*scores.shape[:3], 1)), -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    if options.dropout is not None:
        positions = torch.arange(key.shape[2])
        weights = weights * replace(options.dropout, queries=positions, keys=positions).factors(
            weights.shape[1], weights.dtype
        )
    return (weights @ value).transpose(1, 2)


def run_both(
    core, options: ScoreOptions, *, ids: Tensor | None, window: int | None, shard
) -> list[tuple]:
    """Output and gradients of a core attention on a shard, and those of the formula."""
    inputs = random_inputs(SHAPE, dtype=torch.float64)
    full = [x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    local = [shard(x).clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    sinks = [
        None if options.sink is None else options.sink.clone().requires_grad_() for _ in range(2)
    ]
    mask = full_mask(ids, length=SHAPE.length, window=window)
    expected = formula(full, mask, options, sinks[0])
    expected.backward(inputs.out)
    planned = core.plan_mask(ids, tokens=local[0][..., 0, 0], window=window)
    out = core(
        local[0], key=local[1], value=local[2], mask=planned, scores=replace(options, sink=sinks[1])
    )
    out.backward(shard(inputs.out))
    pairs = [
        (out, shard(expected)),
        *((a.grad, shard(b.grad)) for a, b in zip(local, full, strict=True)),
    ]
    return pairs + ([] if options.sink is None else [(sinks[1].grad, sinks[0].grad)])


@pytest.mark.parametrize("name", CASES)
def test_one_rank_computes_the_formula(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "EAGER_SCORES", 300)  # a few queries at a time
    for ids, window in ((None, None), (segments(SHAPE), 5)):
        for actual, expected in run_both(
            SDPAttention(), CASES[name], ids=ids, window=window, shard=lambda x: x
        ):
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@ranks(2, cp=2)
def test_every_core_attention_computes_the_same(ctx) -> None:
    group = ctx.group("cp")
    for comm_type in CORE_ATTENTIONS:
        core = build_core_attention(comm_type, group)
        for name, options in CASES.items():
            for ids, window in ((None, None), (segments(SHAPE), 5)):
                pairs = run_both(
                    core,
                    options,
                    ids=ids,
                    window=window,
                    shard=lambda x: local_chunks(x, index=group.index, size=group.size),
                )
                if options.sink is not None:  # each rank has the part of its queries or heads
                    torch.distributed.all_reduce(pairs[-1][0])
                for actual, expected in pairs:
                    torch.testing.assert_close(
                        actual, expected, rtol=1e-9, atol=1e-9, msg=f"{comm_type} {name}"
                    )


def test_keys_and_values_are_not_repeated_for_the_flash_operator_of_gpus():
    query, key = (
        torch.empty(1, heads, 16, 64, dtype=torch.bfloat16, device="meta") for heads in (8, 2)
    )
    chunk = AttentionChunk(query, key, key, None, is_causal=True, scale=0.1)
    with Recorder() as recorder:
        result = chunk_forward(chunk)
        assert recorder.allocated < 2 * query.nbytes, (
            "the output and the log-sum-exp; repeated keys would be two more"
        )
        gradients = chunk_backward(chunk, result, grad=torch.empty_like(query))
    assert (
        gradients.query.shape == query.shape
        and gradients.key.shape == gradients.value.shape == key.shape
    )
