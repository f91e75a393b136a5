"""config.json of GPT-2."""

from typing import Any

import pytest

from nanotrain.config.config import Activation
from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.families import config_from_hf
from nanotrain.interop.hf.gpt2 import read_gpt2, write_gpt2


def test_missing_entries_have_the_values_of_gpt2_small() -> None:
    model = read_gpt2({})
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, model.vocab_size) == (12, 768, 12, 50257)
    assert (model.ffn_hidden_size, model.max_position_embeddings, model.activation) == (
        3072,
        1024,
        Activation.gelu_tanh,
    )
    assert model.activation is Activation.gelu_tanh and model.add_bias_linear


@pytest.mark.parametrize(("name", "written"), [("gelu", "gelu"), ("gelu_new", "gelu_new"), ("gelu_fast", "gelu_new")])
def test_activations_that_compute_the_same_are_written_as_one(name: str, written: str) -> None:
    model = read_gpt2({"activation_function": name, "n_inner": 100, "n_ctx": 64})
    assert (model.ffn_hidden_size, model.max_position_embeddings) == (100, 64)
    assert write_gpt2(model)["activation_function"] == written
    assert read_gpt2(write_gpt2(model)) == model


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2", "activation_function": "relu"}, "activation_function"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"model_type": "gpt2", "scale_attn_weights": False}, "scale_attn_weights"),
    ],
)
def test_an_unsupported_feature_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(HuggingFaceError, match=named):
        config_from_hf(change)
