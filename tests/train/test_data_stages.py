"""A run with data stages: the stage of every step, and a stop in the middle that changes nothing."""

import numpy as np

from nanotrain.data.blend import BlendedDataset
from nanotrain.prepare.token_writer import TokenWriter
from nanotrain.report.history import RunHistory
from nanotrain.report.tables import stage_table
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.hooks.log import LogHook
from nanotrain.train.open_run import header
from tests.train.small_run import Spy, metrics_of, small_run, train


class Recording(BlendedDataset):
    """Notes the source and the sample of every read."""

    read: list[tuple[int, int]]

    def __getitem__(self, index):
        self.read.append(self.locate(index))
        return super().__getitem__(index)


def run_stages(folder, *more, stages):
    """Train to the end or the stop: what was read, and the losses."""
    fixed = (
        "--no-mock-data",
        "--train-iters",
        "6",
        "--global-batch-size",
        "4",
        "--save-interval",
        "0",
        "--split",
        "1",
    )
    with small_run(folder, *fixed, "--data-stages", *stages, *more) as run:
        assert "b from step 2: 1 " in header(run.plan, run.inputs, device="cpu")
        dataset, spy = run.batches.dataset, Spy()
        assert isinstance(dataset, BlendedDataset)
        run.batches.dataset = recording = Recording(dataset.datasets, dataset.stages)
        recording.read = []
        run.batches.restart(consumed_samples=run.state.consumed_samples, skipped_samples=0)
        train(run, CheckpointHook(), LogHook(), spy)
        return recording.read, [report.output.loss for report in spy.reports]


def test_stages_change_at_their_steps_and_a_stop_in_the_middle_changes_nothing(tmp_path, logged):
    for name, first in (("web", 0), ("math", 50)):
        with TokenWriter(tmp_path / name, np.dtype("uint16")) as writer:
            writer.add_documents([np.arange(first, first + 700) % 250])
    web, math = tmp_path / "web", tmp_path / "math"
    stages = [f"a@0: {web}", f"b@2: 1 {web} 1 {math}", f"c@5: {math}"]

    read, losses = run_stages(tmp_path / "run", stages=stages)
    sources = [source for source, _ in read]
    assert (
        sources[:8] == [0] * 8
        and sorted(sources[8:20]) == [0] * 6 + [1] * 6
        and sources[20:24] == [1] * 4
    )
    assert len(set(read)) == len(read), "no sample of a source is read twice"
    assert [row["data_stage"] for row in metrics_of(tmp_path / "run")] == [
        "a",
        "a",
        "b",
        "b",
        "b",
        "c",
    ]
    assert [line for line in logged if line.startswith("data stage b from step 3 on")]
    history = RunHistory.read(tmp_path / "run")
    assert history.stages == (("a", 1, 2), ("b", 3, 5), ("c", 6, 6)) and "3 to 5" in stage_table(
        history
    )

    halves = [
        run_stages(tmp_path / "cut", *stop, stages=stages)
        for stop in (["--exit-interval", "3"], [])
    ]
    assert halves[0][0] + halves[1][0] == read and halves[0][1] + halves[1][1] == losses

    # another batch size from step 3 on: the stages start at the same samples as before
    run_stages(tmp_path / "wider", "--exit-interval", "3", stages=stages)
    wider, _ = run_stages(tmp_path / "wider", "--global-batch-size", "8", stages=stages)
    assert wider[:12] == read[12:24]
