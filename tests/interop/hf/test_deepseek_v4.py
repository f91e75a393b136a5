"""DeepSeek-V4: entries that are refused, and files with the names of the published ones."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4Config

from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.families import config_from_hf, model_from_hf
from tests.interop.hf.hybrid_shapes import DEEPSEEK_V4
from tests.interop.hf.reference import load, reference, tensors_of

RAW = json.loads(DeepseekV4Config(**DEEPSEEK_V4).to_json_string()) | {"model_type": "deepseek_v4"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def test_kinds_of_layers_and_positions_are_read() -> None:
    model = config_from_hf(RAW)
    assert model.mixers == ("sliding", "hca", "csa", "csa")
    assert model.hash_layers == (True, True, False, False)
    assert (model.window_size, model.rotary_base, model.rotary_base_local) == (5, 160000.0, 1e4)
    assert model.moe is not None and model.moe.shared_expert_intermediate_size == 24
    scaled = config_from_hf(RAW | {"rope_parameters": YARN})
    assert scaled.yarn is not None and scaled.yarn.rotary_mscale == 1.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"n_shared_experts": 2}, "n_shared_experts: 2"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"num_key_value_heads": 2}, "num_key_value_heads: 2"),
        ({"rope_parameters": YARN | {"attention_factor": 1.2}}, "attention_factor of compress"),
    ],
)
def test_features_we_lack_are_refused_by_name(change: dict, named: str) -> None:
    with pytest.raises(HuggingFaceError, match=named):
        config_from_hf(RAW | change)


def test_files_with_the_names_of_the_published_ones_load(tmp_path: Path) -> None:
    theirs = reference("deepseek_v4")
    theirs.save_pretrained(tmp_path)
    expected = tensors_of(load(tmp_path))
    path = tmp_path / "model.safetensors"
    renamed = {}
    for name, tensor in load_file(path).items():
        name = name.removeprefix("model.").replace("embed_tokens.", "embed.")
        name = name.replace("lm_head.", "head.").replace("hc_head.hc_", "hc_head_")
        renamed[name] = tensor
    assert {"embed.weight", "head.weight", "norm.weight", "hc_head_fn"} <= renamed.keys()
    path.unlink()
    save_file(renamed, path)
    assert model_from_hf(tmp_path).num_layers == 4
    actual = tensors_of(load(tmp_path))
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
