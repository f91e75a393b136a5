"""An evaluation equals the mean loss by hand, in every layout, of checkpoints and of Hugging Face
folders.
"""

import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nanotrain.cli.evaluate import evaluation_config
from nanotrain.cli.main import main
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.flags import parse
from nanotrain.config.load import load_line
from nanotrain.config.parallel import ParallelConfig
from nanotrain.data.tokenizer import ByteTokenizer
from nanotrain.errors import DataError
from nanotrain.inference.checkpoint import export_checkpoint, open_model
from nanotrain.plan.plan import plan_run
from nanotrain.prepare.token_writer import TokenWriter
from nanotrain.topology.topology import Topology
from nanotrain.train.evaluate import EvaluateHook, Evaluation, evaluate_model, open_corpus, validate
from tests.harness import run_ranks
from tests.inference.test_checkpoint import EXPERTS, write_run
from tests.inference.tiny_folders import write_folder
from tests.laws.megatron_file import write_tokens
from tests.train.small_run import Spy, small_run, train

TEXT = "The loss per byte compares tokenizers. " * 3 + "é"
TP_2 = "--tensor-model-parallel-size 2"
FLAGS = "--seq-length 16 --micro-batch-size 2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a mixture of experts, a dense run and its Hugging Face folder, a text and its token
    files.
    """
    folder = tmp_path_factory.mktemp("evaluate")
    write_run(folder / "moe", moe=EXPERTS | {"router_enable_expert_bias": True})
    write_run(folder / "dense")
    write_run(folder / "unpadded", make_vocab_size_divisible_by=1)
    export_checkpoint(folder / "dense", folder / "hf")
    (folder / "text.txt").write_text(TEXT)
    (folder / "lines.jsonl").write_text(
        json.dumps({"text": TEXT[:40]}) + "\n" + json.dumps({"text": TEXT[40:]})
    )
    with TokenWriter(folder / "tokens", np.dtype(np.uint16)) as writer:
        writer.add_documents([[*TEXT.encode(), 256]])
    return folder


def evaluate_here(
    ctx: ParallelContext, path: Path, data: str, flags: str = "", max_samples: int | None = None
) -> Evaluation:
    loaded = load_line(parse(f"{FLAGS} {flags}".split()), to_train=False)
    model = open_model(path)
    config = evaluation_config(model.config, loaded, world_size=ctx.topology.world_size)
    plan = plan_run(config, ctx.topology.world_size, rank=ctx.rank)
    return evaluate_model(
        model,
        data,
        plan=plan,
        context=ctx,
        tokenizer=ByteTokenizer(),
        max_samples=max_samples,
    )


def by_hand(path: Path) -> float:
    """The mean loss of windows of 16 tokens."""
    from nanotrain.inference.checkpoint import load_stage

    ids = torch.tensor([*TEXT.encode(), 256])
    stage, total = load_stage(open_model(path)).eval(), 0.0
    for first in range(0, len(ids) - 1, 16):
        window = ids[first : first + 17]
        logits = stage.logits(window[None, :-1])[0].detach()
        total += F.cross_entropy(logits, window[1:], reduction="sum").item()
    return total / (len(ids) - 1)


@pytest.mark.parametrize("name", ["moe", "dense"])
def test_one_process_gives_the_mean_loss_and_bits_per_byte(folder: Path, name: str) -> None:
    (result,) = run_ranks(1, evaluate_here, folder / name, str(folder / "text.txt"))
    num_bytes = len(TEXT.encode())
    # the last token is no text, the first no label
    assert (result.tokens, result.bytes) == (num_bytes, num_bytes - 1)
    assert result.loss == pytest.approx(by_hand(folder / name), rel=1e-6)
    assert result.bits_per_byte == pytest.approx(
        result.loss * result.tokens / math.log(2) / result.bytes
    )


@pytest.mark.parametrize("number", [1, 2, 3, 99])
def test_the_first_windows_predict_all_of_their_tokens(folder: Path, number: int) -> None:
    text = str(folder / "text.txt")
    (result,) = run_ranks(1, evaluate_here, folder / "dense", text, "", number)
    num_bytes = len(TEXT.encode())
    assert result.tokens == min(16 * number, num_bytes)
    assert result.bytes == min(16 * number, num_bytes - 1)


def test_layouts_agree(folder: Path) -> None:
    (expected,) = run_ranks(1, evaluate_here, folder / "moe", str(folder / "tokens"))
    tp_pp = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    cp_ep = "--context-parallel-size 2 --expert-model-parallel-size 2 --data-parallel-sharding-strategy "
    results = [
        *run_ranks(4, evaluate_here, folder / "moe", str(folder / "tokens"), tp_pp, tp=2, pp=2),
        *run_ranks(
            4,
            evaluate_here,
            folder / "moe",
            str(folder / "tokens.idx"),
            cp_ep + "optim_grads_params",
            cp=2,
            ep=2,
            strategy="optim_grads_params",
        ),
    ]
    for result in results:
        assert (result.tokens, result.bytes) == (expected.tokens, expected.bytes)
        assert result.loss == pytest.approx(expected.loss, rel=1e-6)


@pytest.mark.parametrize("name", ["unpadded", "hf"])
def test_more_ranks_than_the_padding_was_made_for_share_the_vocabulary(
    folder: Path, name: str
) -> None:
    (expected,) = run_ranks(1, evaluate_here, folder / name, str(folder / "tokens"))
    for result in run_ranks(2, evaluate_here, folder / name, str(folder / "tokens"), TP_2, tp=2):
        assert result.loss == pytest.approx(expected.loss, rel=1e-6)


def test_the_command_evaluates_a_hugging_face_folder_as_its_checkpoint(
    folder: Path, capsys
) -> None:
    flags = ["--seq-length", "16", "--json"]
    for path in ("dense", "hf"):
        data = ["--data", str(folder / "text.txt"), "--tokenizer", "bytes"]
        assert main(["evaluate", str(folder / path), *data, *flags]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines()[-2:])
    assert first == second and first["perplexity"] == pytest.approx(math.exp(first["loss"]))


def test_the_sum_over_a_long_corpus_is_not_rounded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of fp32 losses, as the sum of a schedule is; added in fp32, a small one would be lost beside
    the first.
    """
    losses = [2.0**26]

    def forward(*_: object, **__: object) -> torch.Tensor:
        losses.append(1.0)
        return torch.tensor(losses[-2])

    monkeypatch.setattr("nanotrain.train.evaluate.run_forward", forward)
    context = ParallelContext.attach(Topology.of(ParallelConfig(), 1))
    result = evaluate_here(context, folder / "dense", str(folder / "tokens"))
    assert len(losses) > 2
    assert result.loss == sum(losses[:-1]) / result.tokens


def test_lines_are_documents_and_text_needs_a_tokenizer(folder: Path) -> None:
    with open_corpus(str(folder / "lines.jsonl"), ByteTokenizer()) as corpus:
        assert (corpus.num_documents, corpus.num_tokens) == (2, len(TEXT.encode()) + 2)
    with (
        pytest.raises(DataError, match="set --tokenizer"),
        open_corpus(str(folder / "text.txt"), None),
    ):
        pass


EVERY_TWO = ("--eval-interval", "2", "--eval-iters", "3")


def test_it_runs_before_the_first_step_at_every_interval_and_after_the_last(tmp_path, logged):
    spy = Spy()
    with small_run(tmp_path, "--train-iters", "5", *EVERY_TWO) as run:
        train(run, EvaluateHook(), spy)
    assert [report.step for report in spy.reports if report.valid_loss is not None] == [2, 4, 5]
    assert sum("validation loss before training" in line for line in logged) == 1


def test_the_loss_is_the_mean_over_the_first_batches_of_the_validation_split(tmp_path):
    with small_run(tmp_path, *EVERY_TWO, "--global-batch-size", "2") as run:
        losses = [validate(run)[""].loss, validate(run)[""].loss]
        samples = [run.inputs.datasets.valid[number] for number in range(3 * 2)]
        (stage,) = run.stages.values()
        by_hand = [
            torch.nn.functional.cross_entropy(
                stage.logits(torch.from_numpy(sample.tokens)[None])[0].detach().float(),
                torch.from_numpy(sample.labels),
            ).item()
            for sample in samples
        ]
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(sum(by_hand) / len(by_hand), rel=1e-5)


def test_a_full_validation_has_every_sample_once(tmp_path):
    """Of two corpora with weights, whose samples are no whole batches of 4."""
    with small_run(tmp_path / "run", *full_validation(tmp_path)) as run:
        result = validate(run)[""]
        parts = run.inputs.datasets.valid.datasets
        samples = [part[index] for part in parts for index in range(part.samples_per_epoch)]
        (stage,) = run.stages.values()
        by_hand = 0.0
        for sample in samples:
            logits = stage.logits(torch.from_numpy(sample.tokens)[None])[0].detach().float()
            labels = torch.from_numpy(sample.labels)
            by_hand += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
    assert len(samples) % 4 and result.tokens == len(samples) * len(samples[0].tokens)
    assert result.loss == pytest.approx(by_hand / result.tokens, rel=1e-6)


def full_validation(folder: Path) -> list[str]:
    """Arguments of a validation of two corpora, which are written."""
    draw = np.random.default_rng(3)
    for name, size in {"few": 400, "many": 1000}.items():
        write_tokens(folder / name, draw.integers(0, 256, size).astype(np.uint16))
    blend = ["0.9", str(folder / "few"), "0.1", str(folder / "many")]
    data = ["--no-mock-data", "--train-data-path", blend[1], "--valid-data-path", *blend]
    return [*data, "--full-validation", "--eval-interval", "1", "--global-batch-size", "4"]


def validate_fully(ctx: ParallelContext, folder: Path, flags: list[str]) -> Evaluation:
    with small_run(folder / f"run-{ctx.rank}", *flags, context=ctx) as run:
        return validate(run)[""]


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        (
            "--data-parallel-sharding-strategy optim_grads_params",
            {"strategy": "optim_grads_params"},
        ),
        ("--pipeline-model-parallel-size 2", {"pp": 2}),
    ],
)
def test_a_full_validation_is_that_of_one_rank(tmp_path, layout, sizes):
    flags = [*full_validation(tmp_path), "--micro-batch-size", "1", "--num-layers", "2"]
    (expected,) = run_ranks(1, validate_fully, tmp_path, flags)
    for result in run_ranks(2, validate_fully, tmp_path, [*flags, *layout.split()], **sizes):
        assert result.tokens == expected.tokens
        assert result.loss == pytest.approx(expected.loss, rel=1e-6)


def test_the_sum_over_many_batches_is_not_rounded(tmp_path, monkeypatch):
    losses = iter([2.0**26, 1.0, 1.0])
    monkeypatch.setattr(
        "nanotrain.train.evaluate.run_forward", lambda *_, **__: torch.tensor(next(losses))
    )
    with small_run(tmp_path, *EVERY_TWO) as run:
        num_tokens = 3 * run.config.train.global_batch_size * run.config.data.seq_length
        assert validate(run)[""].loss == (2.0**26 + 2) / num_tokens


def test_validation_changes_nothing_of_the_training(tmp_path):
    losses = []
    for arguments in ((), EVERY_TWO):
        spy = Spy()
        with small_run(tmp_path / str(len(arguments)), "--train-iters", "5", *arguments) as run:
            train(run, *([EvaluateHook()] if arguments else []), spy)
        losses.append([report.output.loss for report in spy.reports])
    assert losses[0] == losses[1]


def test_a_signal_ends_a_validation_between_two_batches(tmp_path):
    with small_run(tmp_path, *EVERY_TWO) as run:
        run.stop.signal = 15
        assert validate(run) is None


def test_bits_per_byte_follow_from_the_loss_where_the_tokenizer_is_local(tmp_path):
    spy = Spy()
    with small_run(tmp_path, "--train-iters", "2", *EVERY_TWO) as run:
        train(run, EvaluateHook("bytes"), spy)
        samples = [run.inputs.datasets.valid[number] for number in range(3)]
    labels = torch.cat([torch.from_numpy(sample.labels) for sample in samples])
    # the vocabulary of 260 has four other tokens
    report, num_bytes = spy.reports[-1], int((labels < 256).sum())
    assert 0 < num_bytes < len(labels)
    assert report.valid_bits_per_byte == pytest.approx(
        report.valid_loss * len(labels) / math.log(2) / num_bytes
    )


def test_named_validation_sets_have_a_loss_each_and_one_together(tmp_path):
    write_tokens(tmp_path / "a", (np.arange(2000) % 50).astype(np.uint16))
    write_tokens(tmp_path / "b", np.full(900, 7, dtype=np.uint16))
    sets = [f"a={tmp_path / 'a'}", f"b={tmp_path / 'b'}"]
    spy = Spy()
    flags = (
        "--no-mock-data",
        "--data-path",
        str(tmp_path / "a"),
        "--valid-data-path",
        *sets,
        "--split",
        "1,0,0",
    )
    with small_run(tmp_path / "run", "--train-iters", "4", *EVERY_TWO, *flags) as run:
        train(run, EvaluateHook("bytes"), spy)
    evaluation, report = spy.reports[-1].evaluation, spy.reports[-1]
    assert set(evaluation) == {
        f"valid/{name}/{kind}" for name in "ab" for kind in ("loss", "bits_per_byte")
    }
    losses = [evaluation[f"valid/{name}/loss"] for name in "ab"]
    assert losses[0] > losses[1] and report.valid_loss == pytest.approx(sum(losses) / 2)


def test_validation_sets_of_any_size_are_weighted_by_their_tokens(tmp_path, monkeypatch):
    """The mean over all sets is over target tokens: 3 tokens and 300, not half of each."""
    draw = np.random.default_rng(3)
    counts = {"few": 3, "many": 300}
    with TokenWriter(tmp_path / "train", np.dtype("uint16")) as writer:
        writer.add_documents([draw.integers(0, 256, 900).tolist()])
    for name, count in counts.items():
        mask = np.zeros(901, dtype=np.uint8)
        mask[1 : count + 1] = 1
        with TokenWriter(tmp_path / name, np.dtype("uint16"), has_mask=True) as writer:
            writer.add_documents([draw.integers(0, 256, 901).tolist()], masks=[mask])
    sets = [f"{name}={tmp_path / name}" for name in counts]
    train_data = ["--no-mock-data", "--data-path", str(tmp_path / "train"), "--split", "1,0,0"]
    spy = Spy()
    flags = ["--train-iters", "1", "--eval-interval", "1", "--eval-iters", "14"]
    sizes = ["--global-batch-size", "4", "--init-method-std", "0.5"]
    command = [*train_data, "--valid-data-path", *sets, *flags, *sizes]
    with small_run(tmp_path / "run", *command) as run:
        train(run, EvaluateHook("bytes"), spy)
        results = validate(run)
    assert {name: result.tokens for name, result in results.items()} == counts
    (report,) = spy.reports
    losses = {name: report.evaluation[f"valid/{name}/loss"] for name in counts}
    assert abs(losses["few"] - losses["many"]) > 0.1
    weighted = sum(losses[name] * count for name, count in counts.items()) / 303
    assert report.valid_loss == pytest.approx(weighted, rel=1e-6)
    bits = {name: report.evaluation[f"valid/{name}/bits_per_byte"] for name in counts}
    for name in counts:  # every token is one byte
        assert bits[name] == pytest.approx(losses[name] / math.log(2), rel=1e-6)
    assert report.valid_bits_per_byte == pytest.approx(weighted / math.log(2), rel=1e-6)


def test_the_total_of_parts_is_over_their_tokens_and_bytes():
    parts = [Evaluation(2.0, 3, 6), Evaluation(1.0, 300, 900)]
    for order in (parts, parts[::-1], [*parts, Evaluation(0.0, 0, 0)]):
        total = Evaluation.total(order)
        assert total == Evaluation(306.0 / 303, 303, 906)
        assert total.bits_per_byte == pytest.approx(306.0 / math.log(2) / 906)
        assert total.perplexity == math.exp(306.0 / 303)
    for order in (parts, parts[::-1]):
        assert Evaluation.total([*order, Evaluation(1.0, 5, None)]).bytes is None
        assert Evaluation.total([Evaluation(1.0, 5, None), *order]).bytes is None


SCHEDULES = {
    "ramp-up": ["--rampup-batch-size", "2", "2", "12", "--global-batch-size", "6"],
    "steps": ["--step-batch-size-schedule", "0:2 128:6", "--global-batch-size", "6"],
    "lengths": ["--step-seq-length-schedule", "0:4 128:16", "--global-batch-size", "6"],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_validation_is_over_the_same_samples_at_every_step_of_a_schedule(tmp_path, schedule):
    """With weights that stay as they are, its loss is that of a run without a schedule."""
    spy = Spy()
    flags = ["--train-iters", "8", "--eval-interval", "1", "--eval-iters", "3", "--lr", "1e-30"]
    still = ["--weight-decay", "0", "--micro-batch-size", "1", "--lr-warmup-iters", "0"]
    with small_run(tmp_path / "plain", *flags, *still, "--global-batch-size", "6") as run:
        expected = validate(run)[""]
    assert expected.tokens == 3 * 6 * 16
    with small_run(tmp_path / "run", *flags, *still, *SCHEDULES[schedule]) as run:
        seen: list[int] = []
        splits = run.inputs.datasets
        noted = replace(splits, valid=Counted(splits.valid, seen))
        run = replace(run, inputs=replace(run.inputs, datasets=noted))
        train(run, EvaluateHook(), spy)
    sizes = [report.global_batch_size for report in spy.reports]
    lengths = {report.seq_length for report in spy.reports}
    assert len({*sizes}) > 1 or len(lengths) > 1, "the schedule changes during the run"
    assert {report.valid_loss for report in spy.reports} == {expected.loss}
    assert Counter(seen) == dict.fromkeys(range(3 * 6), 9), (
        "once before training, eight after steps"
    )


@dataclass(frozen=True)
class Counted:
    """A dataset that notes which samples are read."""

    dataset: Any
    seen: list[int]

    @property
    def samples_per_epoch(self) -> int:
        return self.dataset.samples_per_epoch

    def __getitem__(self, index: int) -> Any:
        self.seen.append(index)
        return self.dataset[index]


@pytest.mark.usefixtures("logging_as_before")
@pytest.mark.parametrize(
    "command",
    ["generate {} --prompt a --num-tokens 1", "evaluate {} --tasks t={}/t.jsonl --seq-length 16"],
)
def test_commands_say_once_how_a_folder_is_read(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder("bos", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "t.jsonl").write_text('{"query": "a", "choices": ["b", "c"], "gold": 0}')
    assert main([word.format(folder) for word in [*command.split(), "--device", "cpu"]]) == 0
    error = capfd.readouterr().err
    assert error.count("config.json names the dtype 'bfloat16'") == 1
    assert error.count("model.safetensors is read, and not the files of") == 1
