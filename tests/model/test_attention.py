"""Attention: the rows that a tensor-parallel rank computes, and the scale of the scores."""

from dataclasses import replace

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextConfig

from nanotrain.attention.sdpa import SDPAttention
from nanotrain.config.model import ModelConfig
from nanotrain.memory.recompute import Recompute
from nanotrain.memory.recompute_modules import recompute_modules
from nanotrain.model.context import (
    AttentionInputs,
    BatchContext,
    LayerContext,
    ModelParallel,
    head_channels,
    local_heads,
)
from nanotrain.model.parameters import initialize
from nanotrain.model.rope import RotaryTables
from nanotrain.model.transformer import Stage
from nanotrain.spec.parameters import declare_model
from nanotrain.spec.params import LocalParam
from nanotrain.spec.shape import ModelShape
from nanotrain.spec.stages import StageSpec
from nanotrain.topology.groups import GroupSpec
from tests.model.building import LLAMA, build, give_storage, random_batch, randomize
from tests.model.mixers import assert_near, backward, random_hidden, random_mixer


@pytest.mark.parametrize(
    ("heads", "expected"), [(4, [(0, 8), (8, 16), (16, 24), (24, 32)]), (2, [(0, 8)] * 2)]
)
def test_ranks_compute_their_heads_or_share_one(
    heads: int, expected: list[tuple[int, int]]
) -> None:
    for index, (start, stop) in enumerate(expected):
        local = local_heads(heads, GroupSpec("tp", (0, 1, 2, 3), index))
        assert head_channels(local, ModelShape.of(LLAMA).head_dim) == slice(start, stop)


def test_the_scale_of_the_scores_is_that_of_the_width_by_default() -> None:
    tokens = random_batch().tokens
    plain, same, steep = (
        build(replace(LLAMA, softmax_scale=scale)).logits(tokens) for scale in (None, 8**-0.5, 20.0)
    )
    torch.testing.assert_close(plain, same)
    assert not torch.allclose(plain, steep, atol=1e-3)


def tracked(model_config: ModelConfig, **options) -> Stage:
    """A randomized full model of one layer that tracks its logits."""
    model_config = replace(model_config, num_layers=1)
    params = [LocalParam.unsharded(spec) for spec in declare_model(ModelShape.of(model_config))]
    parallel = replace(ModelParallel.single_rank(), tracks_logits=True, **options)
    stage = give_storage(Stage(model_config, StageSpec.single(1), params=params, parallel=parallel))
    initialize(stage, stage.params, seed=1)
    return randomize(stage)


def test_evaluation_and_recomputation_do_not_count() -> None:
    recompute = Recompute()
    stage = tracked(LLAMA, recompute=recompute)
    recompute_modules(stage.layers["0"], ["core_attn"], recompute=recompute)
    logits = stage.layers["0"].attention.max_logits
    with torch.no_grad():
        stage(None, BatchContext(random_batch()))
    assert (logits.largest == -torch.inf).all()
    loss = stage(None, BatchContext(random_batch()))
    assert logits.largest.isfinite().all()
    logits.largest.fill_(-torch.inf)
    loss.backward()
    assert (logits.largest == -torch.inf).all(), (
        "the backward ran core attention again and counted it"
    )


def test_a_run_without_the_option_keeps_nothing() -> None:
    model_config = replace(LLAMA, num_layers=1)
    params = [LocalParam.unsharded(spec) for spec in declare_model(ModelShape.of(model_config))]
    parallel = ModelParallel.single_rank()
    stage = Stage(model_config, StageSpec.single(1), params=params, parallel=parallel)
    attention = stage.layers["0"].attention
    scores = attention.scores(LayerContext(), sink=None, device=torch.device("cpu"))
    assert attention.max_logits is None and scores is None


def test_a_gated_output_is_that_of_qwen3_next() -> None:
    """With half of the channels rotated; without norms of heads, which transformers computes in
    fp32.
    """
    ours = random_mixer(replace(LLAMA, attention_output_gate=True))
    config = Qwen3NextConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attn_implementation="sdpa",
    )
    theirs = Qwen3NextAttention(config, 0).double()
    pairs = {"k_proj": ours.key, "v_proj": ours.value, "o_proj": ours.output}
    theirs.q_norm = theirs.k_norm = torch.nn.Identity()
    for_heads = torch.stack([each.weight.view(4, 8, 32) for each in (ours.query, ours.gate)], dim=1)
    with torch.no_grad():
        theirs.q_proj.weight.copy_(for_heads.flatten(0, 2))
        for name, module in pairs.items():
            getattr(theirs, name).weight.copy_(module.weight)
    hidden = random_hidden(2, 9, 32)
    rotary = RotaryTables(replace(LLAMA, rotary_percent=0.5)).at(9, like=hidden)
    mask = SDPAttention().plan_mask(None, tokens=torch.zeros(2, 9))
    tables = [x.repeat(1, 1, 2).transpose(0, 1) for x in (rotary.cos, rotary.sin)]
    causal = torch.full((9, 9), -torch.inf, dtype=torch.float64).triu(1)[None, None]

    found = backward(ours(hidden, LayerContext(AttentionInputs(rotary, mask))), hidden, ours)
    expected = backward(theirs(hidden, tuple(tables), causal)[0], hidden, theirs)

    assert_near(found[:2], expected[:2])
    grads = dict(zip([name for name, _ in ours.named_parameters()], found[2:], strict=True))
    query, gate = expected[2].view(4, 2, 8, 32).unbind(1)
    assert_near(
        [grads["query.weight"], grads["gate.weight"]], [query.flatten(0, 1), gate.flatten(0, 1)]
    )


def test_factors_of_a_layer_are_the_same_in_evaluation() -> None:
    """Only dropout and the statistics of routers differ between training and evaluation."""
    model = replace(
        LLAMA,
        attention_output_multiplier=0.3,
        residual_multiplier=0.5,
        softmax_scale=0.2,
        embedding_multiplier=2.0,
        logits_scaling=4.0,
    )
    stage = randomize(build(model))
    tokens = random_batch().tokens
    with torch.no_grad():
        training, evaluation = (each.logits(tokens).clone() for each in (stage, stage.eval()))
    assert torch.equal(training, evaluation)
    plain = randomize(build(replace(model, attention_output_multiplier=1.0)))
    with torch.no_grad():
        assert not torch.allclose(plain.logits(tokens), training)
