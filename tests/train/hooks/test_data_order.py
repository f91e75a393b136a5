"""The order of a run is recorded at every start and rollback; requests are taken at logged steps."""

import json
from contextlib import suppress
from pathlib import Path

import pytest

from nanotrain.checkpoint.store import saved_stages
from nanotrain.data.mix import DONE, REQUEST, request_mix
from nanotrain.data.order import ORDER_NAME, DataOrder
from nanotrain.train.hooks import data_order
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.hooks.data_order import DataOrderHook
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.resume.rollback import roll_back
from nanotrain.untrusted import read_rows
from tests.data.conftest import random_documents, write_documents
from tests.train.small_run import Spy, small_run, train

LENGTHS = [60, 70, 80]


def line(folder: Path) -> list[str]:
    prefixes = [
        write_documents(folder / name, random_documents(LENGTHS, seed=seed), dtype="uint16")
        for seed, name in enumerate(("a", "b"))
    ]
    return ["--no-mock-data", "--train-data-path", *map(str, prefixes), "--global-batch-size", "2"]


def test_a_row_is_written_at_the_start_and_after_a_rollback(tmp_path: Path) -> None:
    hook = DataOrderHook()
    steps = ["--train-iters", "4", "--exit-interval", "3"]
    with small_run(tmp_path / "run", *line(tmp_path), *steps) as run:
        train(run, hook)
        run.state.skipped_samples = 4
        hook.after_rollback(run, None)
    rows = list(read_rows(tmp_path / "run" / ORDER_NAME))
    assert [(row["step"], row["consumed_samples"], row["skipped_samples"]) for row in rows] == [
        (0, 0, 0),
        (3, 6, 4),
    ]
    order = DataOrder.read(tmp_path / "run")
    assert {use.sample for use in order.documents(3)} == {4, 5}
    assert {use.sample for use in order.documents(4)} == {10, 11}


def test_a_request_is_taken_at_a_logged_step(tmp_path: Path) -> None:
    taken: list[bool] = []

    class Looks(Spy):
        def after_step(self, run, report):
            taken.append(not (run.folder.path / REQUEST).exists())

    (tmp_path / "run").mkdir()
    request_mix(tmp_path / "run", ["1", "b"], step=None)
    steps = ["--train-iters", "4", "--log-interval", "2"]
    with small_run(tmp_path / "run", *line(tmp_path), *steps) as run:
        train(run, DataOrderHook(), Looks())
    assert taken == [False, True, True, True]
    read = [
        {use.corpus.prefix.name for use in DataOrder.read(tmp_path / "run").documents(step)}
        for step in (1, 3, 4)
    ]
    assert read == [{"a", "b"}, {"b"}, {"b"}]


class Killed(BaseException):
    """The end of a process between two operations."""


class KillsAt:
    """Counts the operations of a change of the blend, and ends the process before one of them."""

    OPERATIONS = ("read_request", "is_recorded", "record_mix", "_upload_record", "remove_request")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, instant: int | None) -> None:
        self.instant, self.names = instant, list[str]()
        for name in self.OPERATIONS:
            monkeypatch.setattr(data_order, name, self._counted(getattr(data_order, name), name))

    def _counted(self, real, name):
        def call(*args, **options):
            if len(self.names) == self.instant:
                raise Killed(name)
            self.names.append(name)
            return real(*args, **options)

        return call


def corpora_read(folder: Path, steps: range) -> list[set[str]]:
    """The corpora that each step has read, by the record of the newest start."""
    order = DataOrder.read(folder)
    return [{use.corpus.prefix.name for use in order.documents(step)} for step in steps]


def test_a_kill_between_any_two_operations_loses_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order is: record, upload, remove. A start afterwards has the change, or carries it out."""
    steps = ["--train-iters", "5", "--log-interval", "1", "--no-auto-resume"]

    def start(run_folder: Path, instant: int | None) -> list[str]:
        with monkeypatch.context() as patch:
            kills = KillsAt(patch, instant)
            words = [*line(tmp_path / "data"), *steps]
            with suppress(Killed), small_run(run_folder, *words) as run:
                train(run, DataOrderHook())
        return kills.names

    (tmp_path / "data").mkdir()
    wanted = None
    instant = 0
    while True:
        folder = tmp_path / f"run-{instant}"
        folder.mkdir()
        request_mix(folder, ["1", "b"], step=4)
        was_killed = len(start(folder, instant)) == instant
        start(folder, None)
        rows = [json.loads(row) for row in (folder / DONE).read_text().splitlines()]
        assert [row["step"] for row in rows] == [4] and not (folder / REQUEST).exists()
        read = corpora_read(folder, range(1, 6))
        wanted = wanted or read
        assert read == wanted and read[3:] == [{"b"}] * 2 and "a" in set.union(*read[:3])
        if not was_killed:
            break
        instant += 1
    assert instant >= 5, "every operation was an instant"


def test_a_checkpoint_has_the_change_for_a_machine_without_the_run_folder(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data = line(tmp_path / "data")
    (tmp_path / "run").mkdir()
    request_mix(tmp_path / "run", ["1", "b"], step=3)
    with small_run(tmp_path / "run", *data, "--train-iters", "2", "--log-interval", "1") as run:
        train(run, DataOrderHook(), CheckpointHook())
    [step] = (tmp_path / "run/checkpoints").glob("step-*[0-9]")
    assert [text.partition("@")[0] for text in saved_stages(step)] == ["start", "mix-1"]
    more = ["--load", str(step), "--train-iters", "5", "--log-interval", "1"]
    with small_run(tmp_path / "other", *data, *more) as run:
        assert run.config.data.stages == saved_stages(step)
        train(run, DataOrderHook())
    assert corpora_read(tmp_path / "other", range(3, 6)) == [{"b"}] * 3


class RollsBack(Hook):
    """Goes back to step 2 after step 4, and asks for another blend then."""

    def __init__(self, hook: DataOrderHook, step: int | None) -> None:
        self.hook = hook
        self.step = step
        self.is_done = False

    def after_step(self, run, report):
        if report.step == 4 and not self.is_done:
            self.is_done = True
            roll_back(run, run.checkpointer.latest(below=3))
            self.hook.after_rollback(run, report)
            request_mix(run.folder.path, ["1", "b"], step=self.step)


@pytest.mark.parametrize("step", [None, 6, 7])
def test_a_change_after_a_rollback_counts_the_skipped_samples(
    tmp_path: Path, step: int | None
) -> None:
    given: list[list[list[int]]] = []

    class Notes(Hook):
        """Notes the tokens of every batch."""

        def before_training(self, run):
            take = run.batch_iterator.next

            def note(**options):
                batch = take(**options)
                given.append([row for part in batch.microbatches for row in part.tokens.tolist()])
                return batch

            run.batch_iterator.next = note

    hook = DataOrderHook()
    flags = ["--train-iters", "8", "--save-interval", "2", "--log-interval", "1"]
    with small_run(tmp_path / "run", *line(tmp_path), *flags) as run:
        train(run, Notes(), CheckpointHook(), RollsBack(hook, step), hook)
        dataset = run.batches.dataset
    # step 4 is rolled back to step 2, so ten batches are read, of which two are skipped
    assert len(given) == 10
    order = DataOrder.read(tmp_path / "run")
    first = step or 3  # unset: the next one
    for number in range(1, 9):
        is_after = number > 2
        batch = given[number + 1 if is_after else number - 1]
        start = 2 * (number - 1 + 2 * is_after)
        samples = range(start, start + 2)
        assert batch == [dataset[sample].tokens.tolist() for sample in samples], number
        uses = list(order.documents(number))
        assert {use.sample for use in uses} == {*samples}, number
        assert ({use.corpus.prefix.name for use in uses} == {"b"}) is (number >= first), number
