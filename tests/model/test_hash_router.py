"""Experts by a table of the tokens."""

from dataclasses import replace

import torch

from nanotrain.config.model import MoEConfig
from nanotrain.data.batch import Batch
from nanotrain.model.context import BatchContext
from nanotrain.model.hash_router import HashRouter, draw_experts
from nanotrain.model.router_stats import router_tensors
from tests.model.building import LLAMA, VOCAB, build, randomize

MOE = MoEConfig(
    6,
    ffn_hidden_size=16,
    router_topk=3,
    router_score_function="sqrtsoftplus",
    router_enable_expert_bias=True,
    hash_layers="[1,0]",
)
MODEL = replace(LLAMA, moe=MOE)


def test_a_table_has_distinct_experts_of_every_token_and_is_the_same_everywhere() -> None:
    table = draw_experts(20_000, MOE, layer=2)
    assert table.shape == (20_000, 3) and table.dtype == torch.float32
    assert all(len({*row}) == 3 for row in table.tolist())
    assert torch.equal(table, draw_experts(20_000, MOE, layer=2))
    assert not torch.equal(table, draw_experts(20_000, MOE, layer=3))
    tokens_per_expert = table.flatten().long().bincount(minlength=6)
    assert (tokens_per_expert - 10_000).abs().max() < 500


def test_the_token_chooses_the_experts_and_the_router_weighs_them() -> None:
    stage = randomize(build(MODEL))
    router = stage.layers["0"].mlp.router
    assert isinstance(router, HashRouter) and router.expert_bias is None
    tokens = torch.arange(12).view(2, 6) * 7 % VOCAB
    context = stage._layer_context(
        BatchContext(Batch.from_tokens(torch.cat((tokens, tokens[:, :1]), dim=1))),
        dropout=None,
        like=torch.zeros(1),
    )
    seen = context.tokens
    assert seen is not None
    hidden = torch.randn(*seen.shape, 32, generator=torch.Generator().manual_seed(1))
    routing = router(hidden, context, positions=lambda: torch.arange(seen.shape[1]))
    expected = router.token_experts[seen].long().flatten(0, 1)
    assert torch.equal(routing.topk_ids, expected)
    scores = torch.nn.functional.softplus(hidden.flatten(0, 1) @ router.weight.T).sqrt()
    weights = scores.gather(1, expected)
    weights = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(routing.topk_weights, weights, rtol=1e-5, atol=1e-6)


def test_tables_and_biases_are_in_checkpoints_by_layer() -> None:
    tensors = {name: tensor.shape for name, tensor in router_tensors(build(MODEL)).items()}
    assert tensors == {
        "router/layers.0.mlp.router.token_experts": (VOCAB, 3),
        "router/layers.1.mlp.router.expert_bias": (6,),
    }
