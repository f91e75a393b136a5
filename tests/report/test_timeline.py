"""The timeline of several ranks: which traces, the numbers, the picture, the chart of the report,
the command.
"""

import json

import pytest

from nanotrain.cli.main import main
from nanotrain.errors import EnvironmentFault
from nanotrain.report import timeline
from nanotrain.report.history import RunHistory
from nanotrain.report.page import render
from tests.report.runs import write_run
from tests.report.traces import event, gpu_events, write_trace


@pytest.fixture
def run(tmp_path):
    """A run with two profiled ranks; the second one communicates for 300 us more, 100 of them in
    the step.
    """
    folder = write_run(tmp_path / "run", steps=5)
    write_trace(folder, [event("kernel", "gemm", 0, 10)], last_step=3)
    write_trace(folder, gpu_events())
    write_trace(
        folder, [*gpu_events(), event("kernel", "ncclDevKernel_SendRecv", 1900, 2200)], rank=1
    )
    return folder


def test_the_newest_profile_is_read_and_an_older_one_by_its_step(run):
    assert sorted(timeline.find_traces(run)) == [0, 1]
    assert [path.name for path in timeline.find_traces(run, step=2).values()] == [
        "step-00000003-rank-00000.json"
    ]
    assert len(timeline.find_traces(run, step=4)) == 2


def test_shares_are_of_all_ranks_and_of_each(run):
    read = timeline.read_timeline(run)
    # 100 us of the step
    assert [timeline.hidden_share([lanes]) for lanes in read.ranks] == [0.5, 200 / 500]
    assert timeline.hidden_share(read.ranks) == pytest.approx(400 / 900)
    assert read.title == "step 5: 44% of communication hidden behind compute"
    header, first, second = timeline.rows_of(read)
    assert dict(zip(header, first, strict=True))["hidden"] == "50%"
    assert second[0] == "1" and dict(zip(header, second, strict=True))["exposed"] == "0.3"


def test_ranks_are_chosen(run):
    assert [lanes.rank for lanes in timeline.read_timeline(run, ranks=[1]).ranks] == [1]
    with pytest.raises(
        EnvironmentFault, match="rank 7 has no trace: ranks with one: 0, 1; change --ranks"
    ):
        timeline.read_timeline(run, ranks=[0, 7])


def test_the_report_draws_what_the_command_saved(run, capsys):
    assert timeline.load(run) is None and 'id="timeline"' not in render([RunHistory.read(run)])
    assert main(["timeline", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "44% of communication hidden behind compute" in printed and "timeline.png" in printed
    assert (run / "profile" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    saved = timeline.load(run)
    assert saved == timeline.read_timeline(run)
    assert 'id="timeline"' in render([RunHistory.read(run)])
    figure = timeline.figure_of(saved, name="run")
    bars = [sorted(set(trace["y"])) for trace in figure["data"]]
    assert bars[0] == ["rank 0 compute", "rank 1 compute"] and bars[1] == bars[2] != bars[0]
    hidden = figure["data"][1]
    assert list(zip(hidden["base"], hidden["x"], strict=True))[:2] == [(0.3, 0.1), (0.5, 0.1)]


def test_a_damaged_timeline_is_left_out(run):
    for content in ({}, {"ranks": [], "num_ranks": 1, "on_device": True}, {"ranks": [{"rank": 0}]}):
        (run / "profile" / "timeline.json").write_text(json.dumps(content))
        assert timeline.load(run) is None, content


def test_many_short_spans_are_few_bars_and_exact_numbers(tmp_path):
    events = [event("kernel", "gemm", 2 * moment, 2 * moment + 1) for moment in range(20_000)]
    write_trace(tmp_path, events)
    (lanes,) = timeline.read_timeline(tmp_path).ranks
    assert len(lanes.spans_ms["compute"]) <= timeline.RESOLUTION
    assert lanes.total_ms["compute"] == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{run}/absent"], "there is no profile in"),
        (["{run}", "--step", "9"], "has no step 9: the steps in it: 4, 5; name one with --step"),
        (["{run}", "--step", "x"], "'x' is no whole number"),
        (["{run}", "--ranks", "0-3"], "'0-3' is no list of whole numbers such as 0,1,8"),
        (["{run}", "--png", "{run}/absent/a.png"], "absent does not exist any more"),
        ([], "the following arguments are required: RUN"),
    ],
)
def test_a_mistake_is_one_message(run, capsys, words, message):
    assert main(["timeline", *(word.format(run=run) for word in words)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1


def test_nothing_is_written_through_a_linked_folder(run, tmp_path, capsys):
    """The run may be a stranger's, and the link may lead to files of the user."""
    private = tmp_path / "private"
    (run / "profile").rename(private)
    (run / "profile").symlink_to(private)
    before = sorted(path.name for path in private.iterdir())
    assert main(["timeline", str(run)]) == 2
    assert "profile is a symbolic link" in capsys.readouterr().err
    assert sorted(path.name for path in private.iterdir()) == before


def test_the_first_profile_that_ends_at_a_step_or_later_is_read(tmp_path):
    ends = [3, 4, 9]
    for last_step in ends:
        write_trace(tmp_path, [event("kernel", "gemm", 0, 10)], last_step=last_step)
    for step in (*range(1, 12), None):
        later = [end for end in ends if step is not None and end >= step]
        (path,) = timeline.find_traces(tmp_path, step=step).values()
        assert path.name == f"step-{min(later, default=9):08d}-rank-00000.json", step
