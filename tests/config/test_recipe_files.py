"""One YAML file: which references it may have, and how a mistake in it is answered."""

from pathlib import Path

import pytest

from nanotrain.config.load import load_config
from nanotrain.config.recipe_files import may_refer, read_yaml
from nanotrain.errors import ConfigError


@pytest.mark.parametrize(
    ("reference", "is_allowed"),
    [
        ("model.hidden_size", True),
        (".hidden_size", True),
        ("oc.env:SCRATCH", True),
        ("oc.env:SCRATCH,/tmp", True),
        ("oc.env:AWS_SECRET_ACCESS_KEY", False),
        ("oc.decode:x", False),
        ("oc.create:x", False),
    ],
)
def test_a_file_refers_to_fields_and_to_variables_that_are_no_secrets(reference, is_allowed):
    assert may_refer(reference) is is_allowed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\n", "line 2"),
        ("a: 1\na: 2\n", "found duplicate key a"),
        ("- a\n", "holds no mapping: a configuration has sections"),
        ("optim:\n  lr: ${oc.env:HF_TOKEN}\n", "lr in {path} refers to ${{oc.env:HF_TOKEN}}"),
        ("train:\n  notify: http://host\n", "notify in {path} is not read"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_cure(tmp_path: Path, text, message):
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    assert message.format(path=path) in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
        + "".join(
            f"{x}: &{x} [{', '.join([f'*{y}'] * 10)}]\n"
            for y, x in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        "a: &a [*a]\n",
        "train: {wandb_tags: [" + "1," * 200_000 + "]}\n",
    ],
)
def test_a_recipe_is_bounded(text: str, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(
        ConfigError, match="it has more than 20,000 values|at most 262,144 are read"
    ):
        read_yaml(path)


def test_a_recipe_may_have_aliases(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("optim: {lr: &lr 1.0e-3, min_lr: *lr}\n")
    assert read_yaml(path) == {"optim": {"lr": 1e-3, "min_lr": 1e-3}}


def test_references_stand_for_bounded_texts(tmp_path: Path) -> None:
    names = ["wandb_project", "wandb_exp_name", "wandb_entity", "generate_prompt", "run_dir"]
    lines = ["wandb_project: " + "x" * 50]
    for before, name in zip(names, names[1:], strict=False):
        lines.append(f"{name}: '" + f"${{train.{before}}}" * 60 + "'")
    (tmp_path / "own.yaml").write_text("train:\n  " + "\n  ".join(lines))
    with pytest.raises(ConfigError, match="the references of the configuration stand for too long"):
        load_config(["--mock-data", f"+config={tmp_path / 'own.yaml'}"])
