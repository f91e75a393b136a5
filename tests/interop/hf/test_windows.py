"""config.json of families with windows: the query counts itself, and which layers have one."""

from dataclasses import replace

import pytest

from nanotrain.config.notation import read_layer_pattern
from nanotrain.interop.hf.canonical import canonical
from nanotrain.interop.hf.families import config_from_hf, config_to_hf, family_of
from nanotrain.interop.hf.windows import WINDOW_PARTS
from tests.interop.hf.configs import LLAMA_SHAPE

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


@pytest.mark.parametrize("num_layers", range(1, 9))
@pytest.mark.parametrize(("step", "first"), [(1, -1), (2, -1), (3, -1), (3, 0), (4, 5), (6, -1)])
def test_every_step_th_layer_of_a_pattern_has_no_window(
    num_layers: int, step: int, first: int
) -> None:
    """Counted from the first of them, or so that each `step` layers end with one."""
    for listed in ([], [0], [num_layers - 1]):
        raw = {"num_hidden_layers": num_layers, "sliding_window_pattern": step}
        raw |= {"first_full_attention": first, "full_layers": listed, "sliding_window": 8}
        values = WINDOW_PARTS["layer_windows"].read(raw)
        windows = [layer % step != first % step for layer in range(num_layers)]
        windows = [has and layer not in listed for layer, has in enumerate(windows)]
        pattern = values.get("window_attn_skip_freq")
        if not any(windows):
            assert values == {}
        elif all(windows):
            assert pattern == "0"
        else:
            got = read_layer_pattern("window_attn_skip_freq", pattern, num_layers=num_layers)
            assert list(got) == windows


@pytest.mark.parametrize("tuning", [True, False, None, 0, 1])
def test_queries_of_llama_4_grow_only_where_the_file_says_so(tuning: object) -> None:
    raw = {"num_hidden_layers": 4, "interleave_moe_layer_step": 1, "intermediate_size": 8}
    raw |= {"attention_chunk_size": 16, "attn_temperature_tuning": tuning}
    values = WINDOW_PARTS["llama4"].read(raw)
    assert ("attn_scale" in values) is (not tuning) and values.get("attn_scale", 0.0) == 0.0
