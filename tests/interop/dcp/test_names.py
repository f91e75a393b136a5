"""The tensors of every parameter under torchtitan's names."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanotrain.errors import CheckpointError
from nanotrain.interop.dcp.names import choose_mappings, read_parameter, torchtitan_namings
from nanotrain.interop.hf.names import tensor_shapes
from nanotrain.spec.boxes import Box
from tests.interop.dcp.opened import open_state, state_of
from tests.interop.dcp.programs import HEADS_FLAG
from tests.interop.hf.test_names import MODELS


def test_rows_of_padding_are_zero(tmp_path: Path) -> None:
    flags = f"{HEADS_FLAG} --vocab-size 40 --make-vocab-size-divisible-by 32"
    opened = open_state(tmp_path, state_of("titan_llama"), flags)
    assert opened.shapes["model/embedding.word.weight"][0] == (64, 16)
    keys = opened.run.weights
    values = read_parameter(
        opened.mappings["embedding.word.weight"],
        Box((39, 0), (64, 16)),
        read=lambda name, box: opened.run.folder.read(keys[name], box),
    )
    assert (
        torch.equal(values[0], state_of("titan_llama")["tok_embeddings.weight"][39])
        and not values[1:].any()
    )


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "mixtral"])
def test_parameters_tile_the_tensors(name: str) -> None:
    namings = torchtitan_namings(MODELS[name])
    mappings = choose_mappings(MODELS[name], namings, present={})
    written = {tensor: torch.zeros(shape) for tensor, shape in tensor_shapes(mappings).items()}
    for mapping in mappings.values():
        for part in mapping.slices(Box.full(mapping.shape)):
            written[part.tensor][part.stored.slices()] += 1
    assert all(bool((count == 1).all()) for count in written.values())


def test_a_newer_name_comes_first_and_an_older_one_is_found() -> None:
    namings = torchtitan_namings(MODELS["llama"])
    newest = choose_mappings(MODELS["llama"], namings, present={})["layers.0.attention.key.weight"]
    assert newest.tensor == "layers.0.attention.qkv_linear.wk.weight"
    old = {"layers.0.attention.wk.weight": newest.shape}
    found = choose_mappings(MODELS["llama"], namings, present=old)["layers.0.attention.key.weight"]
    assert found.tensor == "layers.0.attention.wk.weight"


def test_neighbours_change_places_but_not_with_norms_of_queries() -> None:
    for name, is_complex in {"llama": True, "qwen3": False}.items():
        mappings = choose_mappings(MODELS[name], torchtitan_namings(MODELS[name]), present={})
        rows = mappings["layers.0.attention.query.weight"].rows
        assert (rows is not None) == is_complex
        assert mappings["layers.0.attention.value.weight"].rows is None
    head_dim = MODELS["llama"].hidden_size // MODELS["llama"].num_attention_heads
    mappings = choose_mappings(MODELS["llama"], torchtitan_namings(MODELS["llama"]), present={})
    rows = mappings["layers.0.attention.query.weight"].rows
    assert rows is not None
    assert rows[:head_dim] == (*range(0, head_dim, 2), *range(1, head_dim, 2))


def test_a_part_without_a_name_is_an_error() -> None:
    model = replace(MODELS["llama"], attention_output_gate=True)
    with pytest.raises(CheckpointError, match="attention.gate.weight has no name"):
        choose_mappings(model, torchtitan_namings(model), present={})
