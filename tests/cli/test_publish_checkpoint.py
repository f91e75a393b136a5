"""`nanotrain checkpoint publish`: what is written, what is uploaded, and what is refused before."""

import subprocess
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from transformers import AutoModelForCausalLM

from nanotrain.cli.main import main
from nanotrain.interop.hf import hub
from nanotrain.train.hooks.checkpoint import CheckpointHook
from tests.train.small_run import small_run, train


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps."""
    folder = tmp_path_factory.mktemp("publish") / "run"
    with small_run(folder, "--train-iters", "2", "--save-interval", "1") as run:
        train(run, CheckpointHook())
    (folder / "config.yaml").touch()
    return folder


def test_a_dry_run_writes_a_repository_that_transformers_loads(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    line = ["checkpoint", "publish", str(run_dir), "me/model", "--output", str(out), "--dry-run"]
    assert main([*line, "--license", "mit", "--tokenizer", "none"]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith(f"nothing is uploaded; later: hf upload me/model {out}\n")
    assert "license: mit" in (out / "README.md").read_text()
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=out, check=True)
    assert AutoModelForCausalLM.from_pretrained(out).config.model_type == "llama"
    assert main([*line, "--license", "mit"]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_the_folder_is_uploaded(
    run_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[dict[str, Any]] = []

    class Hub:
        def create_repo(self, name: str, **options: Any) -> None:
            calls.append({"name": name, **options})

        def upload_folder(self, *, repo_id: str, folder_path: Path) -> None:
            names = {path.name for path in folder_path.iterdir()}
            calls.append({"name": repo_id, "names": names})

    monkeypatch.setattr(hub, "go_offline_if_unreachable", lambda: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.chdir(tmp_path)
    line = ["checkpoint", "publish", str(run_dir), "me/model", "--public", "--tokenizer", "none"]
    assert main(line) == 0
    assert "no license was stated" in capsys.readouterr().out
    assert calls[0] == {"name": "me/model", "private": False, "exist_ok": True}
    names = {"README.md", "SHA256SUMS", "config.json", "loss.png", "model.safetensors"}
    assert names <= calls[1]["names"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a/b/c"], "write REPOSITORY OWNER/NAME"),
        (["me/model", "--license", "Apache 2.0!"], "write for example --license apache-2.0"),
        (["me/model", "--license", "mit"], "add --dry-run to write the folder"),
    ],
)
def test_a_mistake_is_found_before_anything_is_written(
    run_dir: Path,
    tmp_path: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    assert main(["checkpoint", "publish", str(run_dir), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_missing_run_is_named_before_the_hub_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["checkpoint", "publish", str(tmp_path / "none"), "me/model"]) == 2
    assert "none is not a checkpoint: there is no such folder" in capsys.readouterr().err
