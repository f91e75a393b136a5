"""Tensors of a folder and their modules."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nanotrain.interop.hf.derive.folder import derive_family
from nanotrain.interop.hf.families import FAMILIES
from tests.interop.hf.derive.folders import restored_tables, write_folder


@pytest.fixture(autouse=True)
def tables() -> Iterator[None]:
    with restored_tables():
        yield


def layers_of(folder: Path, name: str) -> dict[str, object]:
    write_folder(folder, name)
    del FAMILIES[name]
    layers: dict[str, object] = derive_family(folder).row["layers"]
    return layers


def test_norms_are_known_by_their_place_and_not_by_their_name(tmp_path: Path) -> None:
    """Trinity has the name of Llama's second norm for the norm of the output of attention."""
    layers = layers_of(tmp_path, "afmoe")
    assert layers["attention_post_norm"] == "post_attention_layernorm"
    assert layers["mlp_norm"] == "pre_mlp_layernorm"


def test_a_router_and_its_bias_are_known_by_their_shapes(tmp_path: Path) -> None:
    layers = layers_of(tmp_path, "hy_v3")
    assert layers["mlp.router"] == "mlp.router.gate"
    assert layers["mlp.router.expert_bias"] == {"name": "mlp.expert_bias", "is_full": True}


def test_sinks_are_known_by_their_shape_and_the_code(tmp_path: Path) -> None:
    offset = layers_of(tmp_path, "flint")["attention.softmax_offset"]
    assert offset == {"name": "self_attn.softmax_offset", "is_full": True}


def test_rows_of_heads_are_read_from_the_code(tmp_path: Path) -> None:
    query = layers_of(tmp_path, "persimmon")["attention.query"]
    assert isinstance(query, dict) and query["groups"] == "num_heads"


def test_constants_of_a_known_activation_come_with_it(tmp_path: Path) -> None:
    write_folder(tmp_path, "apertus1p5_text")
    del FAMILIES["apertus1p5_text"]
    constants = derive_family(tmp_path).row["constants"]
    assert constants == FAMILIES["apertus"].constants
