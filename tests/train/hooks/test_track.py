"""TensorBoard's event files are read back, and a tracker that fails is left out."""

import errno
from types import SimpleNamespace

import pytest

from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.hooks.track import TrackHook
from nanotrain.train.trackers.table import TRACKERS, TrackerRow
from nanotrain.train.trackers.tensorboard import TensorBoardTracker
from nanotrain.train.trackers.wandb import WandbTracker
from tests.harness import ranks
from tests.train.small_run import Failing, metrics_of, report_of, small_run, train


def read_scalars(folder) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    assert all(len({event.step for event in each}) == len(each) for each in scalars.values()), (
        "a step twice"
    )
    return {tag: {event.step: event.value for event in each} for tag, each in scalars.items()}


def test_tensorboard_has_every_number_of_every_step(tmp_path):
    from nanotrain.train.hooks.log import LogHook

    with small_run(tmp_path, "--train-iters", "3", "--tensorboard") as run:
        train(run, LogHook(), TrackHook())
    scalars, lines = read_scalars(tmp_path), metrics_of(tmp_path)
    assert set(scalars) == {
        name
        for name, value in lines[0].items()
        if name not in ("step", "crc32") and value is not None
    }
    for line in lines:
        assert scalars["loss"][line["step"]] == pytest.approx(line["loss"])
        assert scalars["skipped"][line["step"]] == 0.0


def test_tensorboard_continues_after_a_kill_and_a_rollback(tmp_path, monkeypatch):
    from tensorboard.summary.writer import event_file_writer

    from nanotrain.train.hooks.log import LogHook

    # files of one second are read in the order of the texts of this number
    counter = event_file_writer.AtomicCounter(0)
    monkeypatch.setattr(event_file_writer, "_global_uid", counter)

    # Given a run that saved step 2 and was killed after step 3,
    arguments = ("--save-interval", "2", "--tensorboard")
    with small_run(tmp_path, "--train-iters", "9", *arguments) as run, pytest.raises(RuntimeError):
        train(run, LogHook(), TrackHook(), CheckpointHook(), Failing(3))
    # when it goes on from there, and goes back to step 4 after step 5,
    hook = TrackHook()
    with small_run(tmp_path, "--train-iters", "5", "--tensorboard") as run:
        train(run, LogHook(), hook)
        hook.begin_writing(run, step=run.state.step)
        run.state.step = 4
        hook.after_rollback(run, report_of(6))
        hook.after_read(run, report_of(5, loss=7.0))
        hook.close(failed=False)
    # then every step is there once, as it was taken last.
    losses = read_scalars(tmp_path)["loss"]
    assert sorted(losses) == [1, 2, 3, 4, 5] and losses[5] == 7.0
    assert losses[4] == pytest.approx(metrics_of(tmp_path)[3]["loss"])


class Notebook:
    """A tracker that records its calls."""

    def __init__(self, run) -> None:
        self.run, self.written, self.closed = run, [], []
        notebooks.append(self)

    def write(self, step, values) -> None:
        self.written.append((step, sorted(values)))

    def close(self, *, failed) -> None:
        self.closed.append(failed)


notebooks: list[Notebook] = []
NOTEBOOK = TrackerRow(Notebook, setting="tensorboard")


@pytest.fixture
def notebook(monkeypatch):
    """Puts a notebook in TensorBoard's place."""
    notebooks.clear()
    monkeypatch.setitem(TRACKERS, "tensorboard", NOTEBOOK)
    return notebooks


def test_what_is_not_known_is_not_sent(tmp_path, notebook):
    with small_run(tmp_path, "--train-iters", "1", "--tensorboard") as run:
        train(run, TrackHook())
    ((step, names),) = notebook[0].written
    assert step == 1 and "loss" in names and "mfu" not in names and "step" not in names
    assert notebook[0].closed == [False]


def test_a_tracker_hears_that_the_run_failed(tmp_path, notebook):
    with (
        small_run(tmp_path, "--train-iters", "3", "--tensorboard") as run,
        pytest.raises(RuntimeError),
    ):
        train(run, TrackHook(), Failing(1))
    assert notebook[0].closed == [True]


@pytest.mark.parametrize("fault", ["make", "write", "close"])
def test_a_tracker_that_fails_is_left_out_and_training_goes_on(
    tmp_path, notebook, monkeypatch, logged, fault
):
    def fail(*args, **options):
        raise OSError("no space")

    monkeypatch.setattr(Notebook, {"make": "__init__"}.get(fault, fault), fail)
    with small_run(tmp_path, "--train-iters", "3", "--tensorboard") as run:
        train(run, TrackHook())
        assert run.state.step == 3
    message = "training goes on without tensorboard, metrics.jsonl has every step: no space"
    assert [line for line in logged if "without" in line] == [message]
    assert len(notebook) == (fault != "make") and all(not book.closed for book in notebook)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_on_a_full_disk_ends_no_run(tmp_path, monkeypatch, logged):
    from tensorboard.summary.writer.record_writer import RecordWriter

    written = []

    def write(self, data):
        written.append(data)
        if len(written) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", write)
    with small_run(tmp_path, "--train-iters", "6", "--tensorboard") as run:
        train(run, TrackHook())
        assert run.state.step == 6
    (line,) = [line for line in logged if "without" in line]
    assert "without tensorboard" in line and "No space left" in line


@ranks(2, threads=False)
def test_only_the_first_rank_tracks(ctx, tmp_path):
    TRACKERS["tensorboard"] = NOTEBOOK  # in this rank's process
    with small_run(tmp_path, "--train-iters", "1", "--tensorboard", context=ctx) as run:
        train(run, TrackHook())
    assert len(notebooks) == (ctx.rank == 0)


def test_tokens_per_expert_are_histograms(tmp_path):
    """In both trackers; the numbers beside them stay numbers."""
    written = []
    hook, run = (
        TrackHook(),
        SimpleNamespace(
            folder=SimpleNamespace(path=tmp_path),
            state=SimpleNamespace(step=0),
            config=SimpleNamespace(train=SimpleNamespace(tensorboard_dir=None)),
        ),
    )
    board, wandb = TensorBoardTracker(run), object.__new__(WandbTracker)
    wandb._histogram, wandb._num_repeated = list, 0
    wandb._run = SimpleNamespace(
        log=lambda values, step: written.append(values), finish=lambda exit_code: None
    )
    hook._trackers = {"tensorboard": board, "wandb": wandb}
    hook.after_read(
        run, report_of(1, metrics={"moe": {"max_load": 1.5, "load": {"layers.1": [10, 30, 20, 4]}}})
    )
    hook.close(failed=False)
    assert written[0]["moe_load/layers.1"] == [10, 30, 20, 4] and written[0]["moe_max_load"] == 1.5
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (histogram,) = events.Histograms("moe_load/layers.1")
    assert (
        histogram.histogram_value.min,
        histogram.histogram_value.max,
        histogram.histogram_value.num,
    ) == (4, 30, 4)
