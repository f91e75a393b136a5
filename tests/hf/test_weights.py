"""Weight files: one or several, safetensors or torch, with the prefix or without, read by box."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nanotrain.errors import HuggingFaceError
from nanotrain.hf.weights import WeightFiles
from nanotrain.topology.boxes import Box

MATRIX, HEAD = torch.arange(12.0).reshape(3, 4), torch.ones(2, 4)


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_box_is_read_by_the_name_with_the_prefix(prefix: str, kind: str, tmp_path: Path) -> None:
    tensors = {f"{prefix}norm.weight": MATRIX, "lm_head.weight": HEAD}
    if kind == "safetensors":
        save_file(tensors, tmp_path / "model.safetensors")
    else:
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    files = WeightFiles(tmp_path, prefix="model.")
    assert files.shapes == {"model.norm.weight": (3, 4), "lm_head.weight": (2, 4)}
    assert torch.equal(files.read("model.norm.weight", Box((1, 2), (3, 4))), MATRIX[1:, 2:])


def test_an_index_names_the_files_and_is_preferred_to_a_single_one(tmp_path: Path) -> None:
    save_file({"model.a": MATRIX}, tmp_path / "first.safetensors")
    save_file({"model.b": HEAD}, tmp_path / "second.safetensors")
    save_file({"model.c": HEAD}, tmp_path / "model.safetensors")
    index = {"weight_map": {"model.a": "first.safetensors", "model.b": "second.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    files = WeightFiles(tmp_path, prefix="model.")
    assert files.shapes == {"model.a": (3, 4), "model.b": (2, 4)}
    assert torch.equal(files.read("model.b", Box((0, 0), (2, 4))), HEAD)


def test_a_folder_without_weights_lists_the_names_that_it_could_have(tmp_path: Path) -> None:
    with pytest.raises(HuggingFaceError, match=r"model\.safetensors, .*pytorch_model\.bin exists"):
        WeightFiles(tmp_path, prefix="")
