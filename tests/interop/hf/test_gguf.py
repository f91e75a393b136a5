"""Exported folders in llama.cpp's format: names by its own table, values as transformers reads them.

llama.cpp's converter copies tensors under the names of `gguf`'s table, rotates rows of queries and
keys for the family llama, and writes sizes as metadata. This does the same for exported folders,
and transformers, which has a reader of its own for GGUF, must find the exported model in the file.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from nanotrain.interop.hf.export import export_weights
from nanotrain.interop.hf.families import FAMILIES, model_from_hf
from nanotrain.interop.hf.names import map_parameters, tensor_shapes
from tests.interop.hf.configs import CONFIGS
from tests.interop.hf.reference import load, reference

gguf = pytest.importorskip("gguf")

# families whose tensors llama.cpp takes by name, and its name of the architecture
BY_NAME = {
    "gpt2": "gpt2",
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "smollm3": "smollm3",
    "mistral": "llama",
    "ministral3": "mistral3",
    "phi3": "phi3",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmoe": "olmoe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "glm4": "glm4",
    "seed_oss": "seed_oss",
    "arcee": "arcee",
    "cwm": "llama",
    "granite": "granite",
    "ernie4_5": "ernie4_5",
    "exaone4": "exaone4",
    "hunyuan_v1_dense": "hunyuan-dense",
}
# class names of transformers where capital letters alone do not give them
CLASSES = {
    "gpt2": "GPT2",
    "smollm3": "SmolLM3",
    "gemma3_text": "Gemma3",
    "ernie4_5": "Ernie4_5",
    "hunyuan_v1_dense": "HunYuanDenseV1",
    "seed_oss": "SeedOss",
    "qwen3_moe": "Qwen3Moe",
}
ARCHITECTURES = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
FIRST_CONFIG = {reference_family: name for name, (reference_family, _) in reversed(CONFIGS.items())}
# families that transformers reads from GGUF files without further conversion
READ_BY_TRANSFORMERS = ("llama", "qwen2", "qwen3")


def first_reference(family: str) -> torch.nn.Module:
    """The first model of a family in the tables of tests."""
    name = CLASSES.get(family, family.capitalize())
    return reference(FIRST_CONFIG[name])


def gguf_names(architecture: str, num_layers: int, names: list[str]) -> dict[str, str | None]:
    """The name in a GGUF file of every tensor of a Hugging Face folder; None where there is none."""
    table = gguf.get_tensor_name_map(ARCHITECTURES[architecture], num_layers)
    return {name: table.get_name(name, try_suffixes=(".weight", ".bias")) for name in names}


@pytest.mark.parametrize("family", BY_NAME)
def test_every_tensor_has_a_name_in_llama_cpp(family: str, tmp_path: Path) -> None:
    source = first_reference(family)
    source.config.save_pretrained(tmp_path)
    model_config = model_from_hf(tmp_path)
    names = list(tensor_shapes(map_parameters(model_config, FAMILIES[family])))
    renamed = gguf_names(BY_NAME[family], source.config.num_hidden_layers, merged_experts(names))
    assert not [name for name, converted in renamed.items() if converted is None]
    assert len(set(renamed.values())) == len(renamed)


def merged_experts(names: list[str]) -> list[str]:
    """Names with the weights of all experts of a layer as one, as llama.cpp stacks them."""
    return list(dict.fromkeys(re.sub(r"experts\.\d+\.", "experts.", name) for name in names))


@pytest.mark.parametrize("family", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_exported_model_from_a_gguf_file(
    family: str, tmp_path: Path
) -> None:
    source = first_reference(family)
    source.save_pretrained(tmp_path / "source")
    stage = load(tmp_path / "source")
    out = tmp_path / "out"
    tensors = [(name, parameter.detach()) for name, parameter in stage.named_parameters()]
    export_weights(out, stage.model_config, tensors=tensors, family=family)
    write_gguf(out / "model.gguf", source.config, architecture=family, folder=out)
    back = AutoModelForCausalLM.from_config(source.config).eval()
    read = load_gguf_checkpoint(out / "model.gguf", return_tensors=True, model_to_load=back)
    back.load_state_dict(read["tensors"])
    tokens = torch.arange(12)[None] % source.config.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(back(tokens).logits, source(tokens).logits)


def write_gguf(file: Path, config: Any, *, architecture: str, folder: Path) -> None:
    """Write a folder's weights as llama.cpp's converter does: fp32, its names, its metadata."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    tensors = load_file(folder / "model.safetensors")
    renamed = gguf_names(architecture, config.num_hidden_layers, list(tensors))
    for name, tensor in tensors.items():
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = interleaved(tensor, head_dim)
        writer.add_tensor(renamed[name], tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of rotary pairs side by side: llama.cpp rotates neighbours, Hugging Face halves."""
    heads = weight.reshape(-1, 2, head_dim // 2, weight.shape[-1])
    return heads.transpose(1, 2).reshape(weight.shape).contiguous()
