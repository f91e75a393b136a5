"""What is printed when training ends, and the report of the run."""

import json
from dataclasses import replace

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from nanotrain.config.config import TrainConfig
from nanotrain.train import build
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.hooks.end_of_run import (
    PlannedPeak,
    ReportHook,
    SampleHook,
    SummaryHook,
    sample,
)
from nanotrain.train.hooks.log import LogHook
from nanotrain.train.run import Run
from tests.harness import ranks
from tests.train.small_run import Failing, small_run, train


def with_train(run: Run, train: TrainConfig) -> Run:
    return replace(run, plan=replace(run.plan, config=replace(run.config, train=train)))


def with_length(run, num_tokens: int):
    """The run with a sample asked for, which synthetic data does not allow."""
    return with_train(run, replace(run.config.train, generate_tokens=num_tokens))


def test_the_model_writes_a_text_of_the_asked_length_the_same_one_every_time(tmp_path):
    with small_run(tmp_path, "--vocab-size", "257") as run:
        short, long = (sample(with_length(run, length), "bytes") for length in (5, 12))
        again = sample(with_length(run, 12), "bytes")
    assert long == again and long.startswith(short[:2])
    assert len(short) <= len(long) <= 12


def test_compiled_blocks_are_not_compiled_again_for_the_lengths_of_a_text(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "inductor_fault", lambda device_type: "")
    with small_run(tmp_path, "--vocab-size", "257", "--torch-compile") as run:
        from torch._dynamo.utils import counters  # imported by then, and slow to import otherwise

        before = counters["frames"]["total"]
        sample(with_length(run, 4), "bytes")
    assert counters["frames"]["total"] == before


def test_the_sample_is_printed_when_training_ends(tmp_path, capsys):
    with small_run(tmp_path, "--vocab-size", "257", "--train-iters", "1") as run:
        train(with_length(run, 8), SampleHook("bytes"))
    assert "\nSample:\n" in capsys.readouterr().out


def test_without_a_tokenizer_it_says_how_to_get_a_sample(tmp_path, logged):
    with small_run(tmp_path, "--train-iters", "1") as run:
        train(run, SampleHook(None))
    assert any("--tokenizer-model" in line for line in logged)


def test_without_a_token_before_a_document_it_says_how_to_get_a_sample(tmp_path, logged):
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.pre_tokenizer = WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    with small_run(tmp_path / "run", "--train-iters", "1") as run:
        train(with_length(run, 4), SampleHook(str(tmp_path / "tokenizer.json")))
    assert any("no sample: an empty prompt has no tokens" in line for line in logged)


def test_the_summary_says_where_everything_lies(tmp_path, capsys):
    with small_run(tmp_path, "--train-iters", "2") as run:
        train(run, CheckpointHook(), SummaryHook())
    out = capsys.readouterr().out
    for path in (tmp_path, tmp_path / "metrics.jsonl", tmp_path / "checkpoints" / "step-00000002"):
        assert f" {path}\n" in out
    assert "report.html" not in out, "none was written"


def test_the_summary_names_the_report_that_was_written(tmp_path, capsys):
    with small_run(tmp_path, "--train-iters", "1", "--no-save") as run:
        run.folder.report.touch()
        train(run, SummaryHook())
    assert f"report        {tmp_path / 'report.html'}\n" in capsys.readouterr().out


def test_a_sample_that_cannot_be_stored_is_printed_and_a_warning(tmp_path, capsys, logged):
    with small_run(tmp_path, "--vocab-size", "257", "--train-iters", "1", "--no-save") as run:
        run.folder.samples.mkdir()
        train(with_length(run, 4), SampleHook("bytes"))
    assert "Sample:" in capsys.readouterr().out
    assert any(line.startswith(f"the sample is not in {run.folder.samples}: ") for line in logged)


def test_the_summary_says_that_the_plan_does_not_count_trackers(tmp_path, capsys):
    for flags, ends in (
        (("--trackers", "tensorboard", "mlflow"), "count the packages of tensorboard and mlflow\n"),
        ((), "of the process before the model\n"),
    ):
        with small_run(
            tmp_path / str(len(flags)), "--train-iters", "1", "--no-save", *flags
        ) as run:
            train(run, SummaryHook(PlannedPeak(planned=10**8, before=0)))
        assert capsys.readouterr().out.endswith(ends)


def test_without_a_checkpoint_the_summary_says_none(tmp_path, capsys):
    with small_run(tmp_path, "--train-iters", "1", "--no-save") as run:
        train(run, SummaryHook())
    assert "checkpoint    none" in capsys.readouterr().out


@ranks(2, strategy="optim")
def test_every_rank_waits_for_its_parameters_and_the_first_one_prints(ctx, tmp_path):
    arguments = (
        "--train-iters",
        "2",
        "--overlap-param-gather",
        "--data-parallel-sharding-strategy",
        "optim",
    )
    with small_run(tmp_path, *arguments, context=ctx) as run:
        train(run, SampleHook(None), SummaryHook())


@ranks(2, ep=2, strategy="optim")
def test_where_experts_are_on_other_ranks_no_rank_waits_for_a_sample(ctx, tmp_path):
    """The first rank alone cannot run the model: it would wait for the others until the timeout."""
    experts = ("--num-experts", "4", "--expert-model-parallel-size", "2")
    arguments = (
        "--train-iters",
        "1",
        "--data-parallel-sharding-strategy",
        "optim",
        "--vocab-size",
        "257",
        *experts,
    )
    with small_run(tmp_path, *arguments, context=ctx) as run:
        train(with_length(run, 3), SampleHook("bytes"))
        assert not run.folder.samples.exists()


def test_the_sample_goes_on_from_the_prompt(tmp_path):
    with small_run(tmp_path, "--vocab-size", "257") as run:
        requested = replace(run.config.train, generate_tokens=4, generate_prompt="def f(")
        prompted = sample(with_train(run, requested), "bytes")
        new_document = sample(with_length(run, 4), "bytes")
    assert prompted.startswith("def f(") and not new_document.startswith("def f(")
    assert len(prompted) <= len("def f(") + 4


def steps_in(folder) -> str:
    """What the summary says of the steps."""
    return (folder / "report.html").read_text().split('class="cards"')[1].split("</dl>")[0]


def test_the_report_has_the_last_step_and_the_sample(tmp_path):
    with small_run(tmp_path, "--vocab-size", "257", "--train-iters", "2") as run:
        train(with_length(run, 8), LogHook(), SampleHook("bytes"), ReportHook())
    assert "finished" not in steps_in(tmp_path), (
        "there is no config.yaml that says how many steps there are"
    )
    assert "<dd>2 steps<" in steps_in(tmp_path)
    (sample,) = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert sample["step"] == 2 and isinstance(sample["text"], str)
    assert 'id="samples"' in (tmp_path / "report.html").read_text()


def test_a_run_that_fails_leaves_the_report_of_the_last_interval(tmp_path):
    try:
        with small_run(tmp_path, "--train-iters", "9", "--report-interval", "2") as run:
            train(run, LogHook(), ReportHook(), Failing(5))
    except RuntimeError:
        pass
    assert "<dd>4 steps<" in steps_in(tmp_path)


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path, logged):
    with small_run(tmp_path, "--train-iters", "1") as run:
        train(run, ReportHook())
    assert any("no report: " in line for line in logged), "without LogHook there are no metrics"
