"""Hugging Face folders of others: every entry, file and link that is wrong is one error, at once."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nanotrain.errors import HuggingFaceError, NanotrainError
from nanotrain.interop.hf.families import FAMILIES, config_from_hf, read_config
from nanotrain.interop.hf.import_weights import WeightReader
from nanotrain.interop.hf.weights import SINGLE, WeightFiles, fp8_block_size
from nanotrain.spec.boxes import Box
from nanotrain.spec.parameters import declare_model
from nanotrain.spec.shape import ModelShape

HOSTILE: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        2**31,
        10**9,
        2**63,
        10**400,
        0.5,
        1e308,
        float("nan"),
        "",
        "x",
        "1e9",
        "12",
        "a\0b",
        "\ud800",
    ),
    *([], {}, [-1], [[]], {"": None}, [2**40, 2**40], ["a", "b"], {"content": [1]}),
)
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
SMALL |= {
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
}
OTHERS = (
    "quantization_config",
    "rope_scaling",
    "rope_parameters",
    "layer_types",
    "head_dim",
    "tie_word_embeddings",
)
SECONDS = 20  # that one folder may take


def entries_of(family: str) -> list[str]:
    row = FAMILIES[family]
    return sorted({*row.entries, *row.defaults, *row.required, *OTHERS, "model_type"})


@pytest.fixture
def soon() -> Iterator[None]:
    """The test ends within a time, whatever hangs."""
    signal.alarm(8 * SECONDS)
    yield
    signal.alarm(0)


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text", "deepseek_v3"])
def test_every_entry_with_every_hostile_value(family: str, tmp_path: Path, soon: None) -> None:
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / SINGLE)
    good = {"model_type": family, **{k: v for k, v in SMALL.items() if k in entries_of(family)}}
    count = refused = 0
    for entry in entries_of(family):
        for value in HOSTILE:
            count += 1
            (tmp_path / "config.json").write_text(json.dumps(good | {entry: value}))
            try:
                raw = read_config(tmp_path)
                model_config = config_from_hf(raw)
                declared = sum(1 for _ in declare_model(ModelShape.of(model_config)))
                assert declared < 10**6
                if model_config.num_layers == 2:
                    WeightReader(tmp_path, model_config)
            except NanotrainError:
                refused += 1
    assert count >= 400 and refused > count / 4


@pytest.mark.parametrize(
    "quantization",
    ["fp8", ["fp8"], 1, {"quant_method": "fp8"}, {"quant_method": "x"}, {"quant_method": {}}]
    + [
        {"quant_method": "fp8", "weight_block_size": size}
        for size in (["a", "b"], [0, 128], [128], [1.5, 2], "12")
    ],
)
def test_another_quantization_is_refused(quantization: Any) -> None:
    with pytest.raises(HuggingFaceError, match="config.json has quantization_config"):
        fp8_block_size({"quantization_config": quantization})


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("head_dim", "1e9", "Field 'head_dim' with value '1e9' doesn't match any type"),
        (
            "num_hidden_layers",
            10**9,
            "num_hidden_layers is 1000000000, it must be a whole number of at most 1000",
        ),
        ("num_hidden_layers", "2", "num_hidden_layers' expected int, got str"),
    ],
)
def test_numbers_are_no_text_and_what_is_listed_is_bounded(
    entry: str, value: Any, message: str
) -> None:
    with pytest.raises(HuggingFaceError, match=message):
        config_from_hf({"model_type": "llama", **SMALL, entry: value})


@pytest.mark.parametrize("name", [SINGLE, "config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", ["pipe", "link", "device", "folder"])
def test_only_regular_files_of_the_folder_are_read(
    name: str, kind: str, tmp_path: Path, soon: None
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "other").write_text("{}")
    match kind:
        case "pipe":
            os.mkfifo(folder / name)
        case "folder":
            (folder / name).mkdir()
        case _:
            (folder / name).symlink_to(tmp_path / "other" if kind == "link" else "/dev/zero")
    with pytest.raises(
        HuggingFaceError, match=r"no regular file|symbolic link to another folder|[Ii]s a directory"
    ):
        read_config(folder) if name == "config.json" else WeightFiles(folder, prefix="model.")


def test_links_into_the_cache_of_the_hub_are_read(tmp_path: Path) -> None:
    for name in ("blobs", "snapshots/abc"):
        (tmp_path / name).mkdir(parents=True)
    save_file({"model.norm.weight": torch.ones(8)}, tmp_path / "blobs/123")
    (tmp_path / "snapshots/abc" / SINGLE).symlink_to("../../blobs/123")
    assert WeightFiles(tmp_path / "snapshots/abc", prefix="model.").shapes == {
        "model.norm.weight": (8,)
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_named(
    value: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    weight = torch.ones(8, dtype=dtype)
    weight[3] = value
    save_file({"model.norm.weight": weight, "lm_head.weight": torch.ones(4, 8)}, tmp_path / SINGLE)
    files = WeightFiles(tmp_path, prefix="model.")
    with pytest.raises(
        HuggingFaceError, match="model.norm.weight in .* has values that are not finite"
    ):
        files.read("model.norm.weight", Box.full((8,)))
    files.read("lm_head.weight", Box.full((4, 8)))
