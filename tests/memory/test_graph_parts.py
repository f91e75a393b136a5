"""The parts of the blocks of real models, by scope."""

import pytest

from nanotrain.memory.graph_parts import parts_of
from nanotrain.model.transformer import build_stage
from tests.laws.test_every_axis import MODELS
from tests.laws.test_layer_kinds import MODELS as KINDS
from tests.laws.worlds import Case, config_of

ROUTED = ["attend", "mlp.route", "mlp.shared.forward"]
ROWS = [
    ("llama", [], [["forward"], ["forward"]]),
    ("llama", ["full"], [["forward"], ["forward"]]),
    ("llama", ["attn"], [["attend"], ["attend"]]),
    ("llama", ["attn", "mlp"], [["attend", "feed_forward"], ["attend", "feed_forward"]]),
    ("biased", [], [ROUTED, ROUTED]),
    ("biased", ["moe_router"], [ROUTED[1:], ROUTED[1:]]),
    ("biased", ["attn", "moe_preprocess"], [ROUTED, ROUTED]),
    ("experts", [], [ROUTED[:2], ROUTED[:2]]),
]


@pytest.mark.parametrize(("model", "scope", "paths"), ROWS, ids=str)
def test_the_parts_of_a_scope(model: str, scope: list[str], paths: list[list[str]]) -> None:
    stage = build_stage(config_of(Case().but(model=MODELS[model])).model)
    parts = [[part.path for part in parts_of(block, scope)] for block in stage.layers.values()]
    assert parts == paths


def test_recurrent_layers_are_of_the_scope_mamba() -> None:
    config = config_of(Case().but(model=KINDS["half layers, gated delta net"]))
    blocks = build_stage(config.model).layers.values()
    attention = [len(parts_of(block, ["attn"])) for block in blocks]
    mamba = [len(parts_of(block, ["mamba"])) for block in blocks]
    assert sum(attention) + sum(mamba) == sum(hasattr(block, "attention") for block in blocks)
    assert sum(mamba) > 0
