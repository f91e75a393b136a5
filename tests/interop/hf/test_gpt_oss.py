"""gpt-oss: what published files leave to transformers' defaults, and what is refused."""

import pytest

from nanotrain.config.derive import window_layers
from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.families import config_from_hf


def test_the_defaults_are_those_of_the_larger_model() -> None:
    model = config_from_hf({"model_type": "gpt_oss"})
    assert (model.num_layers, model.moe.num_experts, model.moe.router_topk, model.rotary_base) == (36, 128, 4, 150000)
    assert window_layers(model)[:3] == (True, False, True) and model.window_size == 127
    assert (model.rotary_scaling_factor, model.yarn_correction_range_round_to_int) == (32, False)
    assert (model.activation_func_clamp_value, model.glu_linear_offset) == (7, 1)


@pytest.mark.parametrize("entry", [{"attention_bias": False}, {"swiglu_alpha": 1.0}])
def test_what_the_model_lacks_is_refused(entry: dict[str, object]) -> None:
    with pytest.raises(HuggingFaceError, match=next(iter(entry))):
        config_from_hf({"model_type": "gpt_oss"} | entry)
