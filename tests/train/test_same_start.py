"""Ranks that start with other settings, data or versions than rank 0 end with one message."""

from pathlib import Path

import numpy as np
import pytest

from nanotrain.comm.collectives import barrier
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.load import load
from nanotrain.errors import EnvironmentFault
from nanotrain.plan.plan import plan_run
from nanotrain.train import same_start
from nanotrain.train.inputs import open_inputs
from nanotrain.train.same_start import facts_of_start, require_same_start
from tests.data.conftest import write_documents
from tests.harness import ranks
from tests.train.small_run import arguments


def start(ctx: ParallelContext, folder: Path, *line: str) -> None:
    """The check of a start, with the given command line of this rank."""
    words = [*arguments(folder / "run"), "--global-batch-size", "2", *line]
    config, inputs = open_inputs(load(words))
    require_same_start(plan_run(config, 2, rank=ctx.rank), inputs, context=ctx)


def write_corpus(folder: Path, *, last: int) -> None:
    folder.mkdir(exist_ok=True)
    documents = [np.arange(90) % 100, np.array([*range(99), last])]
    write_documents(folder / "web", documents, dtype="uint16")


def read_corpus(folder: Path) -> list[str]:
    return ["--no-mock-data", "--train-data-path", str(folder / "web")]


@ranks(2, threads=False)
def test_another_setting_is_named_with_both_values(ctx: ParallelContext, tmp_path: Path) -> None:
    message = (
        r"rank 1 on .* has a different setting from rank 0 on .*: "
        r"--seed is 6 there and 5 on rank 0; run the same command line"
    )
    with pytest.raises(EnvironmentFault, match=message):
        start(ctx, tmp_path / str(ctx.rank), "--seed", f"{5 + ctx.rank}", "--run-dir", "runs/same")


@ranks(2, threads=False)
def test_another_corpus_of_the_same_sizes_is_named_with_both_fingerprints(
    ctx: ParallelContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ctx.rank == 0:  # one writer: both ranks read the same files
        write_corpus(tmp_path / "data", last=7)
    barrier(ctx.control)
    if ctx.rank == 1:  # a machine with other bytes under the same name
        real = same_start.fingerprints
        monkeypatch.setattr(
            same_start,
            "fingerprints",
            lambda samples: {name: f"{number}0bad" for name, number in real(samples).items()},
        )
    with pytest.raises(EnvironmentFault, match="different corpus .*web is .*0bad there and") as end:
        start(ctx, tmp_path, *read_corpus(tmp_path / "data"))
    assert "copy it to all machines again" in end.value.fix


@ranks(2, threads=False)
def test_another_version_is_named(
    ctx: ParallelContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ctx.rank == 1:
        real = same_start.package_version
        monkeypatch.setattr(
            same_start, "package_version", lambda name: "0.1" if name == "torch" else real(name)
        )
    with pytest.raises(EnvironmentFault, match="different version .*torch is 0.1 there and 2"):
        start(ctx, tmp_path)
    monkeypatch.undo()
    start(ctx, tmp_path)


def test_facts_are_the_files_that_are_read(tmp_path: Path) -> None:
    def facts(last: int) -> dict[str, dict[str, str]]:
        write_corpus(tmp_path / "data", last=last)
        line = [*read_corpus(tmp_path / "data"), "--notify", "https://host/secret"]
        config, inputs = open_inputs(load(arguments(tmp_path / "run", *line)))
        return facts_of_start(plan_run(config, 1, rank=0), inputs)

    first, other = facts(7), facts(8)
    assert first["corpus"].keys() == other["corpus"].keys() and first["corpus"] != other["corpus"]
    assert {**first, "corpus": None} == {**other, "corpus": None}
    assert {"python", "nanotrain", "torch", "nanotrain's files"} <= first["version"].keys()
    assert "secret" not in str(first)
