"""Modeling code is read as text: its classes, the order of a block, its norms and biases."""

from pathlib import Path

import pytest

from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.derive.source import (
    MAX_SOURCE_BYTES,
    ModelingSource,
    block_order,
    read_source,
)

BLOCK = """
import os
os.abort()

class MineNorm(nn.Module):
    def forward(self, x):
        return (1.0 + self.weight) * x

class MineAttention(nn.Module):
    def __init__(self, config):
        self.q_proj = nn.Linear(config.hidden_size, 8, bias=config.attention_bias)
        self.o_proj = nn.Linear(8, config.hidden_size, bias=False)
        self.scaling = getattr(config, "scale", 1.0)

class MineLayer(nn.Module):
    def __init__(self, config):
        self.self_attn = MineAttention(config)
        self.first = MineNorm(config.hidden_size, eps=config.eps)

    def forward(self, hidden_states, encoder_hidden_states=None):
        residual = hidden_states
        hidden_states = self.self_attn(self.norm_1(hidden_states))
        hidden_states = residual + self.dropout(hidden_states)
        if encoder_hidden_states is not None:
            hidden_states = self.cross_attn(hidden_states)
        return hidden_states + self.experts(self.norm_2(hidden_states)) + self.shared_mlp(x)

class MineForCausalLM(nn.Module):
    def __init__(self, config):
        self.layers = [MineLayer(config)]

class Unused(nn.Module):
    def __init__(self, config):
        self.size = config.unused
"""


def source_of(folder: Path, text: str = BLOCK) -> ModelingSource:
    (folder / "modeling_mine.py").write_text(text)
    source = read_source(folder, kind="mine", architecture="MineForCausalLM")
    assert source is not None
    return source


def test_a_block_is_norms_attention_mlp_and_additions_in_order(tmp_path: Path) -> None:
    """Arguments come before calls; code for an encoder and dropout are left out."""
    assert block_order(source_of(tmp_path)) == [
        ("norm", "norm_1"),
        ("attention", "self_attn"),
        ("add", ""),
        ("norm", "norm_2"),
        ("mlp", "experts"),
        ("add", ""),
        ("mlp", "shared_mlp"),
        ("add", ""),
    ]


def test_entries_that_the_used_classes_read_have_their_place(tmp_path: Path) -> None:
    reads = source_of(tmp_path).reads
    assert reads.keys() == {"hidden_size", "attention_bias", "scale", "eps"}
    assert reads["scale"] == "MineAttention, line 13 of modeling_mine.py"


def test_biases_and_constructors_are_expressions(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    assert source.biases("q_proj") == {"config.attention_bias"}
    assert source.biases("o_proj") == {"False"}
    assert source.constructor("first") == "MineNorm(config.hidden_size, eps=config.eps)"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("x[..., ::2]", True),
        ("x[..., 0::2]", True),
        ("x[..., : x.shape[-1] // 2]", False),
    ],
)
def test_pairs_of_the_rotation_are_in_its_code(tmp_path: Path, code: str, expected: bool) -> None:
    text = f"def rotate_half(x):\n    return {code}\n" + BLOCK.replace(
        "getattr(config, ", "rotate_half(config, "
    )
    assert source_of(tmp_path, text).has_neighbour_pairs is expected


@pytest.mark.parametrize(
    "text",
    [
        "class MineForCausalLM(:",
        "class MineForCausalLM: pass\n\0",
        "class MineForCausalLM: x = " + "(" * 5000 + ")" * 5000,
        "class MineForCausalLM: x = " + "-" * 200_000 + "1",
        "class Other: pass",
        "# class MineForCausalLM" + " " * MAX_SOURCE_BYTES,
    ],
    ids=["syntax", "null", "nested", "deep", "absent", "large"],
)
def test_code_that_cannot_be_parsed_is_one_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(HuggingFaceError, match=r"cannot parse|has no class"):
        source_of(tmp_path, text)


def test_code_behind_a_link_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "code.py").write_text(BLOCK)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "modeling_mine.py").symlink_to(tmp_path / "elsewhere" / "code.py")
    with pytest.raises(HuggingFaceError, match="symbolic link"):
        read_source(tmp_path / "folder", kind="mine", architecture="MineForCausalLM")


def test_installed_code_is_found_by_its_class_and_not_imported(tmp_path: Path) -> None:
    source = read_source(tmp_path, kind="exaone", architecture="LlamaForCausalLM")
    assert source is not None and source.path.name == "modeling_llama.py"
    assert read_source(tmp_path, kind="mine", architecture="MineForCausalLM") is None
