"""The report of a run: written at the interval and at the end; a failure does not end the run."""

import json

from nanotrain.train.hooks.log import LogHook
from nanotrain.train.hooks.report import ReportHook
from nanotrain.train.hooks.sample import SampleHook
from tests.train.hooks.test_sample import with_length
from tests.train.small_run import Failing, small_run, train


def steps_in(folder) -> str:
    """What the summary says of the steps."""
    return (folder / "report.html").read_text().split('id="runs"')[1].split("</table>")[0]


def test_the_report_has_the_last_step_and_the_sample(tmp_path):
    with small_run(tmp_path, "--vocab-size", "257", "--train-iters", "2") as run:
        train(with_length(run, 8), LogHook(), SampleHook("bytes"), ReportHook())
    assert "finished" not in steps_in(tmp_path), "there is no config.yaml that says how many steps there are"
    assert "<td>2</td>" in steps_in(tmp_path)
    (sample,) = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert sample["step"] == 2 and isinstance(sample["text"], str)
    assert 'id="samples"' in (tmp_path / "report.html").read_text()


def test_a_run_that_fails_leaves_the_report_of_the_last_interval(tmp_path):
    try:
        with small_run(tmp_path, "--train-iters", "9", "--report-interval", "2") as run:
            train(run, LogHook(), ReportHook(), Failing(5))
    except RuntimeError:
        pass
    assert "<td>4</td>" in steps_in(tmp_path)


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path, logged):
    with small_run(tmp_path, "--train-iters", "1") as run:
        train(run, ReportHook())
    assert any("no report: " in line for line in logged), "without LogHook there are no metrics"
