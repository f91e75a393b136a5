"""OLMo 2 and 3: where positions are scaled, and what is refused."""

import pytest

from nanotrain.config.derive import window_layers
from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.families import config_from_hf

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "rope_theta": 500000}


def test_layers_with_a_window_keep_unscaled_positions() -> None:
    model = config_from_hf({"model_type": "olmo3", "num_hidden_layers": 8, "rope_scaling": YARN})
    assert (model.position_embedding_type, model.rotary_base_local) == ("yarn", 500000)
    assert window_layers(model) == (True, True, True, False) * 2


def test_a_window_in_every_layer_and_none() -> None:
    both = {"model_type": "olmo3", "num_hidden_layers": 2}
    assert config_from_hf(both | {"layer_types": ["full_attention"] * 2}).window_size is None
    windows = config_from_hf(both | {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9})
    assert (windows.window_size, windows.window_attn_skip_freq) == (8, "0")


@pytest.mark.parametrize("kind", ["olmo2", "olmo3"])
def test_biases_are_refused(kind: str) -> None:
    with pytest.raises(HuggingFaceError, match="attention_bias"):
        config_from_hf({"model_type": kind, "attention_bias": True})
