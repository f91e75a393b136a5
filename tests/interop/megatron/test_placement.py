"""Every tensor of ours is found in what our export writes: the import is its inverse."""

from pathlib import Path

import pytest
import torch

from nanotrain.config.model import ModelConfig
from nanotrain.errors import CheckpointError
from nanotrain.interop.dcp.tensors import TorchDistFolder
from nanotrain.interop.megatron.export_run import export_megatron
from nanotrain.interop.megatron.placement import Placement, find_prefix
from nanotrain.spec.boxes import Box
from tests.interop.megatron.models import (
    DEEPSEEK,
    GATED,
    GPT2,
    HYBRID,
    LLAMA,
    MIXED,
    MLA,
    MOE,
    write_checkpoint,
)


def exported(tmp_path: Path, model_config: ModelConfig) -> TorchDistFolder:
    export_megatron(tmp_path / "run", tmp_path / "megatron")
    return TorchDistFolder(tmp_path / "megatron" / "iter_0000003")


@pytest.mark.parametrize(
    "model_config",
    [LLAMA, GPT2, MOE, MIXED, GATED, MLA, DEEPSEEK, HYBRID],
    ids=["llama", "gpt2", "moe", "mixed", "gated", "mla", "deepseek", "hybrid"],
)
def test_any_box_of_what_was_exported(tmp_path: Path, model_config: ModelConfig) -> None:
    ours = write_checkpoint(tmp_path / "run", model_config)
    placement = Placement(model_config, exported(tmp_path, model_config))
    assert len(placement.sizes) == len(ours)
    for name, size in placement.sizes.items():
        expected = ours[name.removeprefix("model/")]
        assert torch.equal(placement.read(name, Box.full(size)), expected), name
        start = tuple(length // 3 for length in size)
        stop = tuple(length - length // 4 for length in size)
        box = Box(start, stop)
        assert torch.equal(placement.read(name, box), expected[box.slices()]), name


def test_another_model_is_one_error(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run", LLAMA)
    folder = exported(tmp_path, LLAMA)
    with pytest.raises(CheckpointError, match="missing: .*position_embeddings.*unknown: "):
        Placement(GPT2, folder)
    folder.tensors = {}
    with pytest.raises(CheckpointError, match="a GPT has a word embedding"):
        find_prefix(folder)
