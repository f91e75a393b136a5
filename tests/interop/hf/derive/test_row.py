"""Rules of rows, each by a change of Llama's code."""

from pathlib import Path
from typing import Any

import pytest

from nanotrain.interop.hf.derive.findings import Findings
from nanotrain.interop.hf.derive.folder import derive_family
from tests.interop.hf.derive.folders import change_config, write_own_code


def derive(folder: Path, *, old: str = "", new: str = "", **entries: Any) -> Findings:
    """The findings of a Llama whose code has another line."""
    write_own_code(folder)
    change_config(folder, **entries)
    path = folder / "modeling_mine.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return derive_family(folder)


def test_a_llama_needs_no_fixed_setting(tmp_path: Path) -> None:
    row = derive(tmp_path).row
    assert row["from"] == ["llama_layout"] and row["parts"] == ["llama_biases", "rope"]
    assert not row.get("fixed") and not row["entries"]


@pytest.mark.parametrize(
    ("old", "new", "key", "value"),
    [
        ("x[..., : x.shape[-1] // 2]", "x[..., ::2]", "pairs", True),
        ("self.weight * hidden", "(1.0 + self.weight) * hidden", "apply_layernorm_1p", True),
        ("variance = ", "hidden_states - mean\n        variance = ", "normalization", "LayerNorm"),
    ],
)
def test_a_line_of_code_is_a_setting(
    tmp_path: Path, old: str, new: str, key: str, value: Any
) -> None:
    row = derive(tmp_path, old=old, new=new).row
    if key == "pairs":
        assert row["layers"]["attention.query"]["has_neighbour_pairs"]
    else:
        assert row["fixed"][key] == value


def test_norms_have_the_places_that_the_block_gives_them(tmp_path: Path) -> None:
    added = "hidden_states = residual + hidden_states"
    row = derive(
        tmp_path,
        old=added,
        new=f"hidden_states = self.input_layernorm(hidden_states)\n        {added}",
    )
    assert row.missing == [] and row.row["fixed"]["norm_placement"] == "sandwich"


def test_a_scale_of_scores_that_nothing_computes_is_named(tmp_path: Path) -> None:
    findings = derive(tmp_path, old="self.head_dim**-0.5", new="self.head_dim**-0.75")
    assert "self.head_dim ** (-0.75)" in str(findings.missing[0])


def test_an_activation_that_nothing_computes_is_named(tmp_path: Path) -> None:
    findings = derive(tmp_path, hidden_act="mish")
    assert str(findings.missing[0]).startswith("the activation 'mish' of an MLP with a gate")


def test_biases_of_some_matrices_are_named(tmp_path: Path) -> None:
    old = (
        "config.num_attention_heads * self.head_dim, config.hidden_size, bias=config.attention_bias"
    )
    new = old.replace("bias=config.attention_bias", "bias=False")
    assert derive(tmp_path / "off", old=old, new=new).row["entries"] == {
        "attention_bias": "add_qkv_bias"
    }
