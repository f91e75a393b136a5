"""The names of Megatron-LM cover every weight of a layer, each once or under both of its names."""

from collections import Counter

import pytest

from nanotrain.config.model import ModelConfig
from nanotrain.interop.megatron.names import (
    BUCKET_ORDERS,
    MAMBA_CONVOLUTIONS,
    TABLES,
    block_modules,
    blocks,
    leaves,
    rotary_pairs,
)
from nanotrain.spec.parameters import declare_model
from nanotrain.spec.shape import ModelShape
from tests.interop.megatron.models import DEEPSEEK, GATED, GPT2, LLAMA, MIXED, MLA, MOE


@pytest.mark.parametrize("model_config", [LLAMA, GPT2, MOE, MIXED, GATED, MLA, DEEPSEEK])
def test_every_weight_of_a_layer_has_a_name(model_config: ModelConfig) -> None:
    shape = ModelShape.of(model_config)
    names = {spec.name for spec in declare_model(shape)}
    for block in blocks(shape):
        counts: Counter[str] = Counter()
        for module, parts in block_modules(shape, block.layer).items():
            for leaf in leaves(module):
                counts.update(f"{block.ours}{part}{leaf}" for part in parts)
        own = {name for name in names if name.startswith(block.ours)}
        assert own <= counts.keys()
        twice = {name for name in own if counts[name] > 1}
        assert all("norm" in name for name in twice)


def test_layers_of_multi_token_prediction_are_not_stacked() -> None:
    last = list(blocks(ModelShape.of(DEEPSEEK)))[-1]
    assert (last.layer, last.stacked) == (2, None)
    assert (last.ours, last.theirs) == ("mtp.0.block.", "mtp.layers.0.transformer_layer.")


def test_rotary_channels_of_mla_alone_have_another_order() -> None:
    shape = ModelShape.of(DEEPSEEK)
    pairs = rotary_pairs(shape, "attention.kv_down.", layer=0)
    assert pairs is not None and (pairs.plain, pairs.rotary) == (8, 4)
    assert rotary_pairs(shape, "attention.kv_up.", layer=0) is None
    assert rotary_pairs(ModelShape.of(LLAMA), "attention.query.", layer=0) is None


def test_every_module_of_a_layer_has_a_place_in_the_buckets() -> None:
    """A missing one would shift all parameters before it: the buckets are filled from the end."""
    found: set[str] = set()
    for order in BUCKET_ORDERS.values():
        assert [names for names in order if names in MAMBA_CONVOLUTIONS] == MAMBA_CONVOLUTIONS
        for names in order:
            found.update(names)
    for table in (*TABLES["mixers"].values(), *TABLES["mlps"].values()):
        experts = {name for name in table if name.startswith("mlp.experts.")}
        assert table.keys() - experts <= found
