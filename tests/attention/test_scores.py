"""Bound, sink and dropout of attention: against the formula, and the same under every core attention."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanotrain.attention import chunk_attention
from nanotrain.attention.scores import ScoreOptions, WeightDropout
from nanotrain.attention.sdpa import SDPAttention
from nanotrain.kernels.dropout import sample_words
from nanotrain.parallel.cp.attention import CORE_ATTENTIONS, build_core_attention
from nanotrain.parallel.cp.split import local_chunks
from tests.harness import ranks
from tests.parallel.cp.sequences import Shape, full_mask, random_inputs, segments

SHAPE = Shape(heads=4, groups=2, length=16)
WORDS = sample_words(3, torch.arange(SHAPE.batch))
ALL = ScoreOptions(torch.linspace(-1, 2, SHAPE.heads).double(), 1.5, WeightDropout(WORDS, 0.3, first_head=8))
CASES = {
    "sink": ScoreOptions(ALL.sink),
    "bound": ScoreOptions(softcap=1.5),
    "dropout": ScoreOptions(dropout=ALL.dropout),
    "all": ALL,
}


def formula(inputs: list[Tensor], mask: Tensor, options: ScoreOptions, sink: Tensor | None) -> Tensor:
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
        weights = weights * options.dropout.at(positions, positions).factors(weights.shape[1], weights.dtype)
    return (weights @ value).transpose(1, 2)


def run_both(core, options: ScoreOptions, *, ids: Tensor | None, window: int | None, shard) -> list[tuple]:
    """Output and gradients of a core attention on a shard, and those of the formula."""
    inputs = random_inputs(SHAPE, dtype=torch.float64)
    full = [x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    local = [shard(x).clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    sinks = [None if options.sink is None else options.sink.clone().requires_grad_() for _ in range(2)]
    mask = full_mask(ids, length=SHAPE.length, window=window)
    expected = formula(full, mask, options, sinks[0])
    expected.backward(inputs.out)
    planned = core.plan_mask(ids, tokens=local[0][..., 0, 0], window=window)
    out = core(local[0], key=local[1], value=local[2], mask=planned, scores=replace(options, sink=sinks[1]))
    out.backward(shard(inputs.out))
    pairs = [(out, shard(expected)), *((a.grad, shard(b.grad)) for a, b in zip(local, full, strict=True))]
    return pairs + ([] if options.sink is None else [(sinks[1].grad, sinks[0].grad)])


@pytest.mark.parametrize("name", CASES)
def test_one_rank_computes_the_formula(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_attention, "EAGER_SCORES", 300)  # a few queries at a time
    for ids, window in ((None, None), (segments(SHAPE), 5)):
        for found, expected in run_both(SDPAttention(), CASES[name], ids=ids, window=window, shard=lambda x: x):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


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
                for found, expected in pairs:
                    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=f"{comm_type} {name}")
