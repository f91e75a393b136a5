"""The model card of a published run says what the run's files say, and nothing of its machine."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from nanotrain.report.history import RunHistory
from nanotrain.report.model_card import (
    PublishedModel,
    checksum_lines,
    draw_loss,
    publishing_card,
    recipe_of,
    task_results,
)
from tests.report.runs import write_run

CONFIG = {
    "train": {"train_iters": 40, "run_dir": "/home/someone/runs/a", "notify": "https://x/secret"},
    "data": {"data_path": ["0.5", "/home/someone/data/web", "0.5", "/home/someone/data/code"]},
    "optim": {"lr": 0.1, "min_lr": 0.01},
}
ORIGINS = {
    "optim.lr": "arguments",
    "optim.min_lr": "default",
    "train.train_iters": "arguments",
    "train.run_dir": "arguments",
    "train.notify": "arguments",
    "data.data_path": "arguments",
}


@pytest.fixture
def model(tmp_path: Path) -> PublishedModel:
    """Step 20 of a run of 40 steps, with a task that was scored every ten."""

    def scores(step: int) -> dict[str, Any]:
        if step % 10:
            return {}
        numbers = {"accuracy": step / 100, "questions": 400, "chance": 0.125}
        return {f"task/next/{name}": value for name, value in numbers.items()}

    folder = write_run(tmp_path / "run", config=CONFIG, evaluation=scores)
    environment = json.loads((folder / "environment.json").read_text())
    environment |= {"origins": ORIGINS, "parameters": 1000, "active_parameters": 400}
    (folder / "environment.json").write_text(json.dumps(environment))
    return PublishedModel(
        run=RunHistory.read(folder),
        step=20,
        repository="me/model",
        dtype="bf16",
        family="llama",
        license="apache-2.0",
        has_tokenizer=True,
        tokens_by_corpus={"/home/someone/data/web": (960, 1.5), "/home/someone/code": (320, 0.5)},
    )


def test_values_are_those_of_the_published_step(model: PublishedModel) -> None:
    assert model.value("loss") == pytest.approx(8.0 / 20)
    assert model.value("consumed_tokens") == 20 * 64
    (task,) = task_results(model)
    assert (task.name, task.accuracy, task.questions) == ("next", 0.2, 400)
    assert task.standard_error == pytest.approx(0.02)  # sqrt(0.2 * 0.8 / 400)


def test_the_hub_reads_license_tags_and_results(model: PublishedModel) -> None:
    _, metadata, _ = publishing_card(model).split("---\n", 2)
    values = yaml.safe_load(metadata)
    assert values["license"] == "apache-2.0" and values["tags"] == ["nanotrain", "llama"]
    (result,) = values["model-index"][0]["results"]
    assert result["metrics"] == [{"type": "accuracy", "value": 0.2}]


def test_a_card_has_every_section(model: PublishedModel) -> None:
    card = publishing_card(model)
    for line in (
        "A language model of 1,000 parameters (400 active per token)",
        "| web | 960 | 75.0% | 1.50 |",
        "| code | 320 | 25.0% | 0.50 |",
        "| `optim.lr` | `0.1` |",
        "| training loss, nats per token | 0.4000 |",
        "| next | 400 | 20.0% ± 2.0% | 12.5% |",
        "![Loss by tokens](loss.png)",
        "sha256sum --check SHA256SUMS",
        'AutoTokenizer.from_pretrained("me/model")',
    ):
        assert line in card, card


def test_folders_and_secrets_of_the_machine_stay_out(model: PublishedModel) -> None:
    card = publishing_card(model)
    assert "someone" not in card and "secret" not in card
    recipe = recipe_of(model.run)
    assert recipe["data.data_path"] == "['0.5', 'web', '0.5', 'code']"
    assert "optim.min_lr" not in recipe and "train.run_dir" not in recipe


def test_the_curve_is_a_picture_and_checksums_cover_every_file(
    model: PublishedModel, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    draw_loss(model, folder / "loss.png")
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    (folder / "SHA256SUMS").write_text("an older one")
    (folder / "a.txt").write_bytes(b"text")
    lines = checksum_lines(folder).splitlines()
    assert [line.split("  ")[1] for line in lines] == ["a.txt", "loss.png"]
    assert lines[0].split("  ")[0] == hashlib.sha256(b"text").hexdigest()
