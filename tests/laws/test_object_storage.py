"""Runs in an S3 bucket equal runs on a disk, to the bit, over saves, resumes on other machines and
other layouts.
"""

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from nanotrain.checkpoint.stored import fetched
from nanotrain.cli.main import main
from nanotrain.data.tokenizer import load_with_files
from nanotrain.storage.remote import parse
from nanotrain.train.main import main as train
from tests import s3_server
from tests.harness import run_ranks
from tests.laws.command_line import arguments, assert_same_to_the_bit, run_command_lines, steps_of

THREE = "--train-iters 3 --micro-batch-size 3 --save-interval 2"
FOUR = "--train-iters 4 --global-batch-size 6 --micro-batch-size 3 --async-save --keep-last 1"


@pytest.fixture(scope="module")
def bucket() -> str:
    return s3_server.make_bucket("laws")


def stored(run: str, machine: Path, *more: str) -> list[str]:
    """The command line of a run in object storage, started on a machine."""
    return [
        *arguments(machine.parent / "unused", *more),
        f"train.run_dir={run}",
        f"checkpoint.staging_dir={machine}",
    ]


def test_another_layout_resumes_from_a_bucket_as_from_a_disk(bucket: str, tmp_path: Path) -> None:
    """Two ranks write, four with tensor and pipeline parallelism go on, on a machine that has
    nothing.
    """
    local, run = tmp_path / "local", f"{bucket}/layouts/run"
    stop = (FOUR, "--exit-interval 2")
    run_ranks(
        2,
        run_command_lines,
        arguments(local, *stop),
        stored(run, tmp_path / "one", *stop),
        strategy="optim",
    )
    on = (*stop, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2")
    run_ranks(
        4, run_command_lines, arguments(local, *on), stored(run, tmp_path / "two", *on), tp=2, pp=2
    )
    assert_same_to_the_bit(fetched(parse(run), tmp_path / "back"), local)
    loaded = f"checkpoint.load={run}/checkpoints/step-00000004"
    finetuned = [
        [
            *arguments(tmp_path / name, "--train-iters 2 --finetune --micro-batch-size 3"),
            load,
            staging,
        ]
        for name, load, staging in (
            ("a", loaded, f"checkpoint.staging_dir={tmp_path / 'three'}"),
            ("b", f"checkpoint.load={local}", "checkpoint.keep_last=3"),
        )
    ]
    run_ranks(1, run_command_lines, *finetuned)
    assert_same_to_the_bit(tmp_path / "a", tmp_path / "b")


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize(
    ("fault", "run", "reason"),
    [
        (
            None,
            "s3://no-such-bucket/run",
            "bucket does not exist; make the bucket, or name another place",
        ),
        ("denied", "s3://laws/refused", "Access Denied; give credentials with this right"),
        ("skewed", "s3://laws/refused", "check the clock of this machine"),
    ],
)
def test_a_place_that_cannot_be_written_is_one_error_before_any_device(
    fault: str | None,
    run: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    s3_server.without_pauses(monkeypatch)
    monkeypatch.setattr(
        "nanotrain.comm.device.pick_device", lambda *args: pytest.fail("a device was touched")
    )
    line = stored(run, tmp_path / "staging", THREE)
    before = sorted(tmp_path.iterdir())
    with s3_server.server().faults(lambda request: fault):
        assert train(line) == 2
    error = capsys.readouterr().err
    assert (
        error.count("error:") == 1
        and f"error: {run}/.writable cannot be written" in error
        and reason in error
    )
    assert "test-secret" not in error and sorted(tmp_path.iterdir()) == before


@pytest.fixture(scope="module")
def trained(bucket: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A run in object storage with two checkpoints, and the same on a disk."""
    folder = tmp_path_factory.mktemp("trained")
    lines = [
        arguments(folder / "local", THREE),
        stored(f"{bucket}/trained", folder / "staging", THREE),
    ]
    run_ranks(1, run_command_lines, *lines)
    return f"{bucket}/trained", folder / "local"


@pytest.mark.parametrize(
    "command",
    [
        "report RUN --output OUT.html",
        "compare RUN LOCAL",
        "checkpoint inspect RUN",
        "checkpoint verify RUN",
        "checkpoint diff RUN/checkpoints/step-00000003 RUN",
        "checkpoint average RUN/checkpoints/step-00000002 RUN --output OUT",
        "checkpoint export-hf RUN OUT",
        "checkpoint export-dcp RUN OUT",
        "evaluate RUN --data TOKENS --max-samples 4",
        "data ledger RUN",
    ],
)
def test_a_command_on_addresses_does_what_it_does_on_folders(
    command: str, trained: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    address, local = trained
    output, tokens = f"{address}-of-{tmp_path.name}", str(local.parent / "tokens")
    replies = []
    for run, out in ((address, output), (str(local), str(tmp_path / "out"))):
        words = (
            command.replace("RUN", run)
            .replace("OUT", out)
            .replace("LOCAL", str(local))
            .replace("TOKENS", tokens)
        )
        assert main(words.split()) == 0, capsys.readouterr().err
        replies.append(capsys.readouterr().out)
    assert f"-{os.getpid()}/" not in replies[0], "a temporary folder is named"
    if "OUT" not in command:
        assert numbers(replies[0]) == numbers(replies[1])
    folder = tmp_path / "back"
    for name, stat in parse(output).sizes().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (parse(output) / name).download(folder / name, stat.size)
    if (tmp_path / "out").is_dir():
        written = {
            path.name: path.read_bytes()
            for path in (tmp_path / "out").iterdir()
            if path.suffix != ".metadata"
        }
        back = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert back.keys() == written.keys()
        assert all(back[name] == written[name] for name in back if name.endswith("safetensors"))
        assert main(["checkpoint", "export-hf", address, output]) == 2
        assert f"{output} is not empty" in capsys.readouterr().err
    assert not [*Path(tempfile.gettempdir()).glob(f"nanotrain-*-{os.getpid()}")]


def numbers(text: str) -> list[str]:
    """The numbers of an output, without those of paths, times and speeds."""
    return re.findall(r"(?<![\w/.-])\d+\.\d{3,}(?![\w/])", text)


def test_a_model_and_a_tokenizer_at_addresses_are_those_of_folders(
    bucket: str, trained: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "tokenizer"
    load_with_files("bytes").save(folder)
    for file in folder.iterdir():
        (parse(bucket) / f"tokenizer/{file.name}").put(file)
    lines = []
    for place, name in ((bucket, "remote"), (str(tmp_path), "local")):
        assert (
            main(
                ["checkpoint", "export-hf", str(trained[1]), f"{place}/model", "--family", "llama"]
            )
            == 0
        )
        start = f"--train-iters 2 --micro-batch-size 3 --pretrained-checkpoint {place}/model"
        with_tokenizer = f"{THREE} --vocab-size 300 --tokenizer-model {place}/tokenizer"
        lines += [
            arguments(tmp_path / name, start),
            arguments(tmp_path / f"{name}-300", with_tokenizer),
        ]
    staging = f"checkpoint.staging_dir={tmp_path / 'staging'}"
    run_ranks(1, run_command_lines, *([*line, staging] for line in lines[:2]), *lines[2:])
    for end in ("", "-300"):
        assert_same_to_the_bit(tmp_path / f"remote{end}", tmp_path / f"local{end}")
    assert (tmp_path / "remote-300/tokenizer/tokenizer.json").exists()
    capsys.readouterr()
    texts = []
    for place in (bucket, str(tmp_path)):
        words = f"generate {tmp_path}/local-300 --prompt a --num-tokens 4 --temperature 0 --tokenizer {place}/tokenizer"
        assert main(words.split()) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("watch RUN", "objects arrive at saves; `nanotrain report` takes it"),
        (
            "timeline RUN",
            "profiles stay on the machines of the ranks; name the run folder below --staging-dir",
        ),
        (
            "data mix RUN --weights 1 a",
            "the job reads requests in its local folder; name the run folder",
        ),
        (
            "train +config=tiny --mock-data --save-fallback-dir RUN",
            "is no path: files are read and written",
        ),
        (
            "train --nproc-per-node 1 --log-dir RUN +config=tiny",
            "is no path: files are read and written",
        ),
        ("prepare --verify RUN", "is no path: files are read and written"),
        (
            "prepare --input x.txt --output y --tokenizer RUN",
            "is no path: files are read and written",
        ),
        (
            "plan +config=tiny --world-size 2 --png RUN.png",
            "is no path: files are read and written",
        ),
        ("runs RUN-of-nobody", "there is no folder of this name"),
    ],
)
def test_an_address_where_it_makes_no_sense_is_one_error_and_no_folder(
    command: str,
    reason: str,
    bucket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.txt").write_text("text")
    assert main(command.replace("RUN", f"{bucket}/run").split()) == 2
    error = capsys.readouterr().err
    assert error.count("error:") == 1 and reason in error and os.listdir() == ["x.txt"], error


def test_runs_are_listed_from_a_bucket(
    bucket: str, trained: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for file, stat in parse(trained[0]).sizes().items():
        (parse(trained[0]) / file).download(tmp_path / "file", stat.size)
        (parse(bucket) / f"listed/one/{file}").put(tmp_path / "file")
    assert main(["runs", f"{bucket}/listed"]) == 0
    assert re.search(r"one +\w+ +3/3 ", capsys.readouterr().out)


def test_checkpoints_are_pruned_at_the_address(
    bucket: str, trained: tuple[str, Path], tmp_path: Path
) -> None:
    run = f"{bucket}/pruned"
    run_ranks(1, run_command_lines, stored(run, tmp_path / "staging", THREE))
    assert main(["checkpoint", "prune", run, "--keep-last", "1"]) == 0
    assert {name.split("/")[1] for name in parse(run).sizes() if name.startswith("check")} == {
        "step-00000003"
    }


def test_a_corpus_is_prepared_into_object_storage_and_trained_on(
    bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(f'{{"text": "{"word " * number}"}}\n' for number in range(1, 60)))
    for output in (f"{bucket}/corpus", str(tmp_path / "corpus")):
        assert (
            main(f"prepare --input {text} --output {output} --tokenizer bytes --workers 1".split())
            == 0
        )
    names = sorted(name for name in parse(bucket).sizes() if name.startswith("corpus"))
    assert names == sorted(
        path.relative_to(tmp_path).as_posix()
        for path in tmp_path.rglob("corpus*")
        if path.is_file()
    )
    assert all(
        (parse(bucket) / name).read() == (tmp_path / name).read_bytes()
        for name in names
        if "json" not in name
    )
    assert main(f"prepare --input {text} --output {bucket}/corpus --tokenizer bytes".split()) == 2
    more, run = (THREE, "--vocab-size 300"), f"{bucket}/with-tokenizer"
    lines = [
        stored(run, tmp_path / "staging", *more, f"--data-path {bucket}/corpus"),
        arguments(tmp_path / "local", *more, f"--data-path {tmp_path / 'corpus'}"),
    ]
    run_ranks(1, run_command_lines, *lines)
    assert steps_of(fetched(parse(run), tmp_path / "back")) == steps_of(tmp_path / "local")
    capsys.readouterr()
    texts = []
    for model in (run, str(tmp_path / "local")):
        assert (
            main(["generate", model, "--prompt", "word", "--num-tokens", "8", "--temperature", "0"])
            == 0
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and "word" in texts[0]
