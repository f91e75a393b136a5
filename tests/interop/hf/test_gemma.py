"""Gemma 3: what published files leave to transformers' defaults, and what is refused."""

import pytest

from nanotrain.config.derive import window_layers
from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.families import config_from_hf
from nanotrain.interop.hf.gemma import write_gemma3

# Entries of google/gemma-3-1b-pt that matter here.
ONE_B = {
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "rope_local_base_freq": 10000,
    "rope_theta": 1000000,
}


def test_the_older_format_of_windows_and_rotary_bases() -> None:
    model = config_from_hf(ONE_B)
    assert (model.rotary_base, model.rotary_base_local, model.window_size) == (1e6, 1e4, 511)
    assert window_layers(model)[:7] == (True,) * 5 + (False, True)
    assert model.softmax_scale is None and not model.untie_embeddings_and_output_weights


def test_a_scale_of_the_scores_other_than_the_heads_is_kept() -> None:
    model = config_from_hf(ONE_B | {"head_dim": 128, "query_pre_attn_scalar": 168})
    assert model.softmax_scale == 168**-0.5 and write_gemma3(model)["query_pre_attn_scalar"] == 168


@pytest.mark.parametrize(
    "entry", [{"attention_bias": True}, {"hidden_activation": "silu"}, {"layer_types": ["linear_attention"]}]
)
def test_what_the_model_lacks_is_refused(entry: dict[str, object]) -> None:
    with pytest.raises(HuggingFaceError, match=next(iter(entry))):
        config_from_hf(ONE_B | entry)
