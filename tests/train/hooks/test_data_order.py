"""The order of a run is recorded at every start and rollback; requests are taken at logged steps."""

from pathlib import Path

from nanotrain.data.mix import REQUEST, request_mix
from nanotrain.data.order import ORDER_NAME, DataOrder
from nanotrain.train.hooks.data_order import DataOrderHook
from nanotrain.untrusted import read_rows
from tests.data.conftest import random_documents, write_documents
from tests.train.small_run import Spy, small_run, train

LENGTHS = [60, 70, 80]


def line(folder: Path) -> list[str]:
    prefixes = [
        write_documents(folder / name, random_documents(LENGTHS), dtype="uint16")
        for name in ("a", "b")
    ]
    return ["--no-mock-data", "--train-data-path", *map(str, prefixes), "--global-batch-size", "2"]


def test_a_row_is_written_at_the_start_and_after_a_rollback(tmp_path: Path) -> None:
    hook = DataOrderHook()
    with small_run(tmp_path / "run", *line(tmp_path), "--train-iters", "3") as run:
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
