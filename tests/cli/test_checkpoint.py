"""Every checkpoint command on a trained run, through the command line."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

from nanotrain.checkpoint.read import read_global_tensors
from nanotrain.cli.main import main
from nanotrain.train.hooks.checkpoint import CheckpointHook
from tests.train.small_run import small_run, train


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 1, 2 and 3, of a family that Hugging Face files can hold."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    with small_run(folder, "--train-iters", "3", "--save-interval", "1") as run:
        train(run, CheckpointHook())
    return folder


def step(run_dir: Path, number: int) -> str:
    return str(run_dir / "checkpoints" / f"step-{number:08d}")


def test_inspect_is_one_screen_and_lists_tensors_when_asked(run_dir, capsys):
    assert main(["checkpoint", "inspect", str(run_dir)]) == 0
    short = capsys.readouterr().out.splitlines()
    assert len(short) < 20 and any("1 layer, hidden 32" in line for line in short)
    assert any("step 3, 48 tokens, 3 samples, loss" in line for line in short)
    assert main(["checkpoint", "inspect", str(run_dir), "--tensors"]) == 0
    assert "model/embedding.word.weight" in capsys.readouterr().out


def test_diff_average_and_verify(run_dir, tmp_path, capsys):
    assert main(["checkpoint", "diff", step(run_dir, 3), str(run_dir)]) == 0
    assert main(["checkpoint", "diff", step(run_dir, 1), step(run_dir, 2)]) == 2
    assert "weight: largest difference" in capsys.readouterr().out
    average = [
        "checkpoint",
        "average",
        step(run_dir, 1),
        step(run_dir, 3),
        "--output",
        str(tmp_path / "mean"),
    ]
    assert main(average) == 0 and main(["checkpoint", "verify", str(tmp_path / "mean")]) == 0
    assert main(average) == 2 and "is not empty" in capsys.readouterr().err
    assert main([*average[:3], *average[4:-1], str(tmp_path / "one")]) == 0
    assert "averaged over 1 checkpoint\n" in capsys.readouterr().out
    for manifest in (tmp_path / "mean").rglob("manifest.json"):
        manifest.write_text("{")
        assert main(["checkpoint", "verify", str(manifest.parent)]) == 2
    assert "checkpoint verify" not in capsys.readouterr().err


def test_hugging_face_out_and_in_is_the_same_model(run_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert (
        main(["checkpoint", "export-hf", str(run_dir), str(tmp_path / "hf"), "--push", "me/model"])
        == 0
    )
    assert "later: hf upload me/model" in capsys.readouterr().out
    assert (
        'AutoModelForCausalLM.from_pretrained("me/model")'
        in (tmp_path / "hf" / "README.md").read_text()
    )
    assert main(["checkpoint", "import-hf", str(tmp_path / "hf"), str(tmp_path / "back")]) == 0
    names = [line.split()[0] for line in _tensors(run_dir, capsys) if line.startswith("model/")]
    for name in names:
        (before,), (after,) = (
            [tensor for _, tensor in read_global_tensors(Path(path), [name])]
            for path in (step(run_dir, 3), tmp_path / "back")
        )
        rows = min(260, len(before)) if "embedding.word" in name or "head" in name else len(before)
        assert torch.equal(before[:rows], after[:rows]), name


def _tensors(run_dir, capsys) -> list[str]:
    capsys.readouterr()
    assert main(["checkpoint", "inspect", str(run_dir), "--tensors"]) == 0
    return capsys.readouterr().out.splitlines()


def test_export_dcp_export_megatron_and_prune(run_dir, tmp_path, capsys, monkeypatch):
    assert main(["checkpoint", "export-dcp", str(run_dir), str(tmp_path / "dcp")]) == 0
    assert (tmp_path / "dcp" / ".metadata").is_file()
    assert main(["checkpoint", "export-megatron", str(run_dir), str(tmp_path / "megatron")]) == 0
    assert (tmp_path / "megatron" / "iter_0000003" / ".metadata").is_file()
    copy = Path(shutil.copytree(run_dir, tmp_path / "run"))
    prune = ["checkpoint", "prune", str(copy), "--keep-last", "1"]
    assert main([*prune, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("would delete") == 2 and Path(step(copy, 1)).is_dir()
    with monkeypatch.context() as patch:
        patch.setattr(
            os,
            "rename",
            lambda *_: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only file system")),
        )
        assert main(prune) == 2
    error = capsys.readouterr().err
    assert "step-00000001, step-00000002 could not be deleted" in error and "deleted: none" in error
    assert main(prune) == 0 and capsys.readouterr().out.count("deleted") == 2
    assert [path.name for path in (copy / "checkpoints").iterdir()] == ["step-00000003"]
