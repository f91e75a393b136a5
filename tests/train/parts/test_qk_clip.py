"""QK-clip: clipped rows give the logits times the factor of their head; what counts, and over which
ranks.
"""

from dataclasses import replace

import pytest
import torch

from nanotrain.comm.group import Group
from nanotrain.config.config import OptimConfig
from nanotrain.model.context import BatchContext
from nanotrain.model.transformer import Stage
from nanotrain.spec.shape import ModelShape
from nanotrain.train.parts.qk_clip import collect_factors, logits_of, row_factors
from tests.harness import ranks
from tests.model.building import GPT2, LLAMA, random_batch
from tests.model.test_attention import tracked
from tests.model.test_mla import DIRECT, LATENT

ONE = Group.single_rank("tp")
MODELS = {"grouped": LLAMA, "biases": GPT2, "mla": LATENT, "mla without q_lora_rank": DIRECT}


def largest(stage: Stage, *, seed: int = 0) -> torch.Tensor:
    """The largest logits of a batch, [N]."""
    (logits,) = logits_of(stage).values()
    logits.largest.fill_(-torch.inf)
    stage(None, BatchContext(random_batch(seed=seed)))
    return logits.largest.clone()


@pytest.mark.parametrize("alpha", [0.5, 0.25])
@pytest.mark.parametrize("name", MODELS)
def test_clipped_weights_give_scaled_logits(name: str, alpha: float) -> None:
    stage = tracked(MODELS[name])
    shape = ModelShape.of(stage.model_config)
    before = largest(stage)
    threshold = before.sort().values[-2].item() * 0.9  # exceeded by two heads
    config = OptimConfig(qk_clip=True, qk_clip_alpha=alpha, qk_clip_threshold=threshold)
    factors = collect_factors(stage, config, shape=shape, tp=ONE, dp_cp=ONE)
    assert (next(iter(logits_of(stage).values())).largest == -torch.inf).all(), (
        "the next step counts anew"
    )
    named = dict(stage.named_parameters())
    for param, rows in factors.items():
        assert len(rows) == len(named[param])
        named[param].data.mul_(rows.view(-1, *[1] * (named[param].ndim - 1)))
    for_heads = (threshold / before).clamp(max=1.0)
    if shape.mla is None:
        for_heads = (
            for_heads.view(shape.query_groups, -1)
            .amin(1)
            .repeat_interleave(shape.num_heads // shape.query_groups)
        )
    assert 2 <= (for_heads < 1).sum() < len(for_heads) or shape.query_groups == 2
    torch.testing.assert_close(largest(stage), before * for_heads)


def test_values_and_the_shared_rotary_key_of_mla_stay() -> None:
    shape = ModelShape.of(replace(LATENT, num_layers=1))
    assert shape.mla is not None
    heads = torch.full((shape.num_heads,), 0.25)
    rows = row_factors(heads, shape, alpha=0.5)
    nope, rope, value = shape.mla.qk_head_dim, shape.mla.qk_pos_emb_head_dim, shape.value_head_dim
    assert rows["query_up.weight"].tolist() == ([0.5] * nope + [0.25] * rope) * shape.num_heads
    assert rows["kv_up.weight"].tolist() == ([0.5] * nope + [1.0] * value) * shape.num_heads
    assert "kv_down.weight" not in rows


def test_logits_below_the_threshold_and_those_that_are_not_finite_change_nothing() -> None:
    stage = tracked(LLAMA)
    (logits,) = logits_of(stage).values()
    logits.largest.copy_(torch.tensor([torch.inf, torch.nan, 99.0, -torch.inf]))
    factors = collect_factors(
        stage, OptimConfig(qk_clip=True), shape=ModelShape.of(LLAMA), tp=ONE, dp_cp=ONE
    )
    assert {name.rsplit(".", 2)[1] for name in factors} == {"query", "key"}
    assert all((rows == 1).all() for rows in factors.values())


@ranks(4, tp=2)
def test_the_largest_over_all_ranks_decides(ctx) -> None:
    """Heads are sharded over tp, samples over dp; every rank gets the factors of all heads."""
    stage = tracked(LLAMA)
    (logits,) = logits_of(stage).values()
    tp, dp_cp = ctx.group("tp"), ctx.group("dp_cp")
    largest_of = [200.0, 50.0, 400.0, 100.0]
    logits.largest = torch.tensor(largest_of[2 * tp.index :][:2]) / (1 if dp_cp.index else 10)
    config = OptimConfig(qk_clip=True, qk_clip_alpha=0.5)
    factors = collect_factors(stage, config, shape=ModelShape.of(LLAMA), tp=tp, dp_cp=dp_cp)
    rows = factors["layers.0.attention.key.weight"].view(2, -1)
    torch.testing.assert_close(rows[:, 0], torch.tensor([0.5, 0.25]) ** 0.5)
