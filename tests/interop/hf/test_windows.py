"""config.json of families with windows: the query counts itself, and which layers have one."""

from dataclasses import replace

from nanotrain.interop.hf.canonical import canonical
from nanotrain.interop.hf.families import config_from_hf, config_to_hf, family_of
from tests.interop.hf.reference import LLAMA_SHAPE

MISTRAL = LLAMA_SHAPE | {"model_type": "mistral", "sliding_window": None}


def test_a_window_counts_the_query_itself_in_transformers() -> None:
    model = config_from_hf(MISTRAL | {"sliding_window": 8})
    assert model.window_size == 7 and family_of(model) == "mistral"
    assert config_to_hf(model, family="mistral")["sliding_window"] == 8
    everywhere = replace(model, window_attn_skip_freq="[1]*2")
    assert (
        canonical(everywhere)
        == canonical(model)
        != canonical(replace(model, window_attn_skip_freq="2"))
    )


def test_a_window_as_long_as_the_model_hides_nothing() -> None:
    assert config_from_hf(MISTRAL | {"sliding_window": 64}) == config_from_hf(MISTRAL)


def test_a_window_in_every_layer_and_none() -> None:
    both = {"model_type": "olmo3", "num_hidden_layers": 2}
    assert config_from_hf(both | {"layer_types": ["full_attention"] * 2}).window_size is None
    windows = config_from_hf(both | {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9})
    assert (windows.window_size, windows.window_attn_skip_freq) == (8, "0")
