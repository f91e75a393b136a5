"""Numbers of other programs, and the files of an import, which appear with the checkpoint."""

from pathlib import Path

import pytest
import torch

from nanotrain.checkpoint.manifest import Manifest
from nanotrain.checkpoint.rewrite import write_checkpoint
from nanotrain.config.config import Config
from nanotrain.config.load import load
from nanotrain.errors import CheckpointError
from nanotrain.interop.imported import CONFIG_FILE, LINES_FILE, files_of, number_of

MANIFEST = Manifest(0, {}, {}, objects={}, config={}, topology={})


def test_numbers_in_tensors_and_floats() -> None:
    for value in (3, 3.0, torch.tensor(3), torch.tensor([3.0])):
        assert number_of(value, "step") == 3
    for value in (3.5, torch.tensor([1, 2]), "3", True, -1, torch.tensor(float("nan"))):
        with pytest.raises(ValueError, match="step"):
            number_of(value, "step")


def test_files_appear_with_the_checkpoint_or_not_at_all(tmp_path: Path) -> None:
    files = files_of(Config(), ["one tensor", "nothing guessed"])
    shapes = {"model/a": ((2,), "fp32")}
    write_checkpoint(
        tmp_path / "whole", shapes, read=lambda _: torch.ones(2), manifest=MANIFEST, files=files
    )
    assert (tmp_path / "whole" / LINES_FILE).read_text() == "one tensor\nnothing guessed\n"
    recipe = f"+config={tmp_path / 'whole' / CONFIG_FILE}"
    assert load([recipe], to_train=False).config.optim == Config().optim

    def fail(_: object) -> torch.Tensor:
        raise CheckpointError("a chunk is damaged", why="", fix="")

    with pytest.raises(CheckpointError):
        write_checkpoint(tmp_path / "broken", shapes, read=fail, manifest=MANIFEST, files=files)
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
