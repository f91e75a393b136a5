"""config.json of Mistral and Phi-3: windows, partial rotary positions."""

from dataclasses import replace
from typing import Any

import pytest

from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.canonical import canonical
from nanotrain.interop.hf.families import config_from_hf, config_to_hf, family_of
from tests.interop.hf.reference import LLAMA_SHAPE

MISTRAL = LLAMA_SHAPE | {"model_type": "mistral", "sliding_window": None}
PHI3 = LLAMA_SHAPE | {"model_type": "phi3"}


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (PHI3 | {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_type: 'longrope'"),
        (PHI3 | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type: 'yarn'"),
    ],
)
def test_what_would_compute_something_else_is_refused(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(HuggingFaceError, match=named):
        config_from_hf(raw)


def test_a_window_counts_the_query_itself_in_transformers() -> None:
    model = config_from_hf(MISTRAL | {"sliding_window": 8})
    assert model.window_size == 7 and family_of(model) == "mistral"
    assert config_to_hf(model, family="mistral")["sliding_window"] == 8
    everywhere = replace(model, window_attn_skip_freq="[1]*2")
    assert canonical(everywhere) == canonical(model) != canonical(replace(model, window_attn_skip_freq="2"))


def test_a_window_as_long_as_the_model_hides_nothing() -> None:
    assert config_from_hf(MISTRAL | {"sliding_window": 64}) == config_from_hf(MISTRAL)


def test_a_model_comes_back_equal_and_partial_rotation_is_a_phi3() -> None:
    mistral, phi3 = config_from_hf(MISTRAL), config_from_hf(PHI3 | {"partial_rotary_factor": 0.5})
    assert canonical(config_from_hf(config_to_hf(mistral, family="mistral"))) == canonical(mistral)
    assert canonical(config_from_hf(config_to_hf(phi3, family="phi3"))) == canonical(phi3)
    assert (phi3.rotary_percent, family_of(phi3), family_of(mistral, name="mistral")) == (0.5, "phi3", "mistral")
