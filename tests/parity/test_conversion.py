"""Comparison with transformers: it holds for a family, and an error in a conversion shows."""

from dataclasses import replace

import pytest

from nanotrain.config.model import ModelConfig
from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.families import FAMILIES, config_from_hf
from nanotrain.interop.hf.names import HFName
from nanotrain.parity.conversion import check_conversion, twin_config
from tests.interop.hf.configs import LLAMA_SHAPE
from tests.interop.hf.derive.folders import restored_tables

LARGE = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
}


def llama() -> ModelConfig:
    return config_from_hf(LARGE)


def test_a_twin_is_tiny_and_has_the_structure() -> None:
    small = twin_config(llama())
    assert (small.num_layers, small.num_attention_heads, small.num_query_groups) == (2, 8, 2)
    assert small.hidden_size == small.num_attention_heads * small.head_dim == 32
    with_mtp = replace(llama(), mtp=replace(llama().mtp, num_layers=1))
    assert twin_config(with_mtp).mtp.num_layers is None


def test_a_family_computes_what_transformers_does() -> None:
    report = check_conversion(llama(), "llama")
    assert report.holds and report.num_gradients == 21
    assert 0 < report.logits < 1e-13 and 0 < report.gradients < 1e-13
    assert "21 gradients" in report.text and report.to_dict()["holds"]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("attention.query", HFName("self_attn.q_proj", has_neighbour_pairs=True)),
        ("mlp.gate", HFName("mlp.up_proj")),
    ],
)
def test_a_wrong_name_or_order_shows(module: str, name: HFName) -> None:
    with restored_tables():
        layers = {**FAMILIES["llama"].layers, module: name}
        if module == "mlp.gate":
            layers["mlp.up"] = HFName("mlp.gate_proj")
        FAMILIES["llama"] = replace(FAMILIES["llama"], layers=layers)
        report = check_conversion(llama(), "llama")
    assert report.logits > 1e-3 and report.is_round_trip and not report.holds


def test_a_wrong_switch_shows() -> None:
    with restored_tables():
        fixed = {"apply_layernorm_1p": True}
        FAMILIES["llama"] = replace(FAMILIES["llama"], fixed=fixed)
        assert not check_conversion(llama(), "llama").holds


def test_a_family_without_a_class_is_one_error() -> None:
    with restored_tables():
        FAMILIES["mine"] = replace(FAMILIES["llama"], architecture="MineForCausalLM")
        with pytest.raises(HuggingFaceError, match="has no causal language model mine"):
            check_conversion(config_from_hf({"model_type": "llama"} | LLAMA_SHAPE), "mine")
