"""`~` and variables mean the same in every path option; an address is one error where no corpus is
named.
"""

import os
from pathlib import Path

import pytest

from nanotrain.cli.main import main
from nanotrain.config.load import load_config
from nanotrain.data.data_path import parse_data_path
from nanotrain.errors import ConfigError
from nanotrain.paths import expanded, is_secret

STORED = ("--run-dir", "--save", "--load")
FLAGS = (
    "--save-fallback-dir",
    "--tensorboard-dir",
    "--exclude-documents",
    "--config-dir",
)
COMMANDS = (
    *(
        "report RUN",
        "runs RUN",
        "watch RUN",
        "compare RUN RUN",
        "timeline RUN",
        "report . --output RUN.html",
    ),
    *("checkpoint inspect RUN", "checkpoint verify RUN", "checkpoint average . --output RUN"),
    *("checkpoint import-hf RUN x", "checkpoint import-hf . RUN", "checkpoint export-hf . RUN"),
    *(
        "checkpoint export-hf . x --tokenizer RUN",
        "checkpoint export-dcp . RUN",
        "checkpoint export-megatron . RUN",
    ),
    *("evaluate RUN --data x", "generate RUN", "topology --schedule 1f1b --png RUN.png"),
    *(
        "prepare --input RUN --output x --tokenizer bytes",
        "prepare --input . --output RUN --tokenizer bytes",
    ),
    *("config +config=RUN.yaml", *(f"config --mock-data {flag} RUN" for flag in FLAGS)),
)


LOCAL = ("watch", "timeline", "topology", "config")
SWEEP = "sweep --over lr=1e-3 --run-dir RUN --mock-data --vocab-size 64"
NO_PATH = tuple(
    f"is no path: {why}" for why in ("files are read", "the page follows files", "profiles stay on")
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("BUCKET", "b")
    monkeypatch.delenv("NOT_SET", raising=False)


def test_home_and_variables_are_replaced(tmp_path: Path) -> None:
    assert [expanded(text) for text in ("~/a", "$BUCKET/a", "${BUCKET}s", "org/model", "0.7")] == [
        *(str(tmp_path / "home/a"), "b/a", "bs", "org/model", "0.7")
    ]
    # a stored blend is taken as it is
    assert str(parse_data_path(["0.7", "~/a", "0.3", "$BUCKET"])[0].prefix) == "~/a"
    config = load_config(
        ["--mock-data", "--run-dir", "~/r", "--load", "${BUCKET}/l", "--tensorboard-dir=$BUCKET"]
    )
    assert config.train.run_dir == str(tmp_path / "home/r")
    assert config.checkpoint.load == "b/l" and config.train.tensorboard_dir == "b"


def test_the_password_of_an_address_is_not_shown() -> None:
    with pytest.raises(ConfigError, match="s3://bucket/x is no path") as caught:
        expanded("s3://me:hidden@bucket/x")
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("$NOT_SET/x", "NOT_SET is not in the environment"),
        ("${MY_TOKEN}", "that of a secret"),
        ("~none-/x", "no user's"),
    ],
)
def test_what_cannot_be_replaced_is_an_error(
    text: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "hidden")
    with pytest.raises(ConfigError) as caught:
        expanded(text)
    assert why in str(caught.value) and "hidden" not in str(caught.value)


def test_secrets_are_told_by_their_names() -> None:
    secrets = (
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "MYSQL_PWD",
        "Password",
        "NANOTRAIN_NOTIFY",
    )
    assert all(map(is_secret, secrets)) and not any(
        map(is_secret, ("HOME", "SCRATCH", "PWD", "TOKENIZER_MODEL"))
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_scheme_is_one_error_in_every_command(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(command.replace("RUN", "ftp://host/run").split()) == 2
    error = capsys.readouterr().err
    known = ("cannot be reached: known are s3://", *NO_PATH)
    assert "error: ftp://host/run" in error and any(map(error.__contains__, known)), error
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command", [*(command for command in COMMANDS if command.split()[0] in LOCAL), SWEEP]
)
def test_an_address_is_one_error_where_files_are_local(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(command.replace("RUN", "s3://bucket/run").split()) == 2
    error = capsys.readouterr().err
    assert "error: s3://bucket/run" in error and any(map(error.__contains__, NO_PATH)), error
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("flag", STORED)
def test_an_address_of_a_run_has_a_known_scheme_and_no_secrets(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(f"config --mock-data {flag} ftp://host/run".split()) == 2
    assert "ftp://host/run cannot be reached: known are s3://" in capsys.readouterr().err
    assert main(f"config --mock-data {flag} s3://me:hidden@bucket/run".split()) == 2
    error = capsys.readouterr().err
    assert "s3://bucket/run is no address" in error and "hidden" not in error
    assert load_config(["--mock-data", flag, "s3://bucket/run"]).checkpoint.async_save == (
        flag != "--load"
    )
    assert not any(tmp_path.iterdir())


def test_a_folder_for_staging_without_object_storage_is_an_error() -> None:
    with pytest.raises(ConfigError, match="staging_dir.*nothing that it concerns is an address"):
        load_config(["--mock-data", "--staging-dir", "x"])


LATIN_1 = os.fsdecode(b"caf\xe9")  # a folder named in Latin-1, as Python reads the argument


@pytest.mark.parametrize(
    "words",
    [
        f"train +config=tiny --mock-data --run-dir {LATIN_1}",
        f"config +config=tiny --mock-data --generate-prompt {LATIN_1}",
        f"config +config=tiny --data-path 0.5 web 0.5 {LATIN_1}",
        f"checkpoint export-hf RUN {LATIN_1}",
    ],
)
def test_a_name_that_no_file_can_record_is_one_error(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    errors = capsys.readouterr().err
    assert r"caf\udce9" in errors and "are not UTF-8" in errors and "LC_ALL" in errors
    assert not list(tmp_path.iterdir())
