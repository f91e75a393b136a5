"""The header of a run names its sizes as a person would check them."""

from pathlib import Path

import pytest

from nanotrain.config.load import load
from nanotrain.data.corpus_info import CorpusInfo, write_info
from nanotrain.train.hooks.evaluate import EvaluateHook
from nanotrain.train.open_run import choose_hooks
from nanotrain.train.plans.plan import plan_run
from nanotrain.train.start.header import header
from nanotrain.train.start.inputs import open_inputs
from tests.train.small_run import SEQ_LENGTH, arguments
from tests.train.start.test_inputs import write_corpus


def lines_of(folder, *more: str, world_size: int = 1) -> dict[str, str]:
    config, inputs = open_inputs(load(arguments(folder, *more)))
    text = header(plan_run(config, world_size, rank=0), inputs, device="cpu")
    return {line[:10].strip(): line[12:] for line in text.splitlines()}


def test_a_run_on_one_rank(tmp_path):
    lines = lines_of(tmp_path, "--train-iters", "500", "--global-batch-size", "6", "--micro-batch-size", "2")
    assert list(lines) == ["model", "data", "batch", "layout", "precision", "run folder", "watch"]
    assert lines["model"].endswith("1 layer, hidden size 32, vocabulary 260")
    assert lines["data"] == f"synthetic, {500 * 6 * SEQ_LENGTH / 1000:.3g} k tokens in 500 steps"
    assert lines["batch"].startswith(f"6 samples of {SEQ_LENGTH} tokens = 1 data-parallel x 3 microbatches x 2; ")
    assert (lines["layout"], lines["precision"]) == ("1 rank on cpu, no_shard", "fp32")
    assert lines["run folder"] == str(tmp_path) and lines["watch"] == f"nanotrain watch {tmp_path}"


def test_a_dense_model_has_no_expert_axes(tmp_path):
    lines = lines_of(tmp_path, "--tensor-model-parallel-size", "2", world_size=2)
    assert lines["layout"] == "2 ranks on cpu, tp 2, no_shard"


def test_layout_experts_and_mixed_precision(tmp_path):
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 2 --num-experts 4 --bf16"
    lines = lines_of(tmp_path, *layout.split(), "--global-batch-size", "4", world_size=8)
    assert lines["layout"] == "8 ranks on cpu, tp 2, pp 2, etp 2, dp 2, schedule 1f1b, no_shard"
    assert " active per token" in lines["model"]
    assert lines["precision"] == "bf16, main params and optimizer in fp32"


def test_precision_of_the_optimizer(tmp_path):
    aware = ["--bf16", "--use-precision-aware-optimizer", "--use-distributed-optimizer", "--exp-avg-dtype", "bf16"]
    assert lines_of(tmp_path, *aware)["precision"] == "bf16, main params in fp32, moments in bf16 and fp32"
    both = lines_of(tmp_path, *aware, "--exp-avg-sq-dtype", "bf16", "--main-grads-dtype", "bf16")
    assert both["precision"] == "bf16, main params in fp32, moments in bf16, main grads in bf16"


def test_a_warmup_longer_than_the_run(tmp_path):
    schedule = ["--lr", "1e-3", "--lr-warmup-iters", "30", "--train-iters"]
    remark = "at most 3.67e-04 of 1.00e-03: the run ends within the warmup of 30 steps"
    assert lines_of(tmp_path, *schedule, "12")["lr"] == remark
    assert "lr" not in lines_of(tmp_path, *schedule, "31")
    grows = ["--rampup-batch-size", "4", "4", "4000", "--global-batch-size", "400"]
    assert lines_of(tmp_path, *schedule, "3", *grows)["lr"].startswith("at most 6")  # before the third step: 8 samples


def test_attention_has_a_line_of_its_own(tmp_path):
    config, inputs = open_inputs(load(arguments(tmp_path)))
    text = header(plan_run(config, 1, rank=0), inputs, device="cpu", attention="varlen flash (bf16, documents)")
    assert "attention   varlen flash (bf16, documents)\n" in text


def test_recomputation_has_a_line_of_its_own(tmp_path):
    lines = lines_of(tmp_path, "--recompute-granularity", "full")
    assert lines["memory"].startswith("recompute full: uniform, groups of 1 layer (--recompute-method")


def test_epochs_of_a_corpus(tmp_path):
    prefix = write_corpus(tmp_path / "text")
    config, inputs = open_inputs(load([*arguments(tmp_path / "run"), "--no-mock-data", "--data-path", str(prefix)]))
    samples = inputs.datasets.train.samples_per_epoch
    text = header(plan_run(config, 1, rank=0), inputs, device="cpu")
    assert f"{config.train.train_iters / samples:.2f} epochs" in text


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path):
    prefix = write_corpus(tmp_path / "text")
    line = [*arguments(tmp_path / "run"), "--no-mock-data", "--data-path", str(prefix)]
    for size, is_named in ((260, False), (300, True)):
        write_info(prefix, CorpusInfo(None, size))
        config, inputs = open_inputs(load(line))
        text = header(plan_run(config, 1, rank=0), inputs, device="cpu")
        assert (f"the tokenizer of {prefix} has {size} tokens, the model 260: a higher id" in text) == is_named


SCREENS = {
    80: """\
model       115 k parameters (66.1 k active per token), 2 layers, hidden size
            32, vocabulary 260
data        synthetic, 1.02 k tokens in 16 steps
batch       4 samples of 16 tokens = 2 data-parallel x 2 microbatches x 1; 64
            tokens per step
layout      8 ranks on NVIDIA H100 80GB HBM3, tp 2, pp 2, etp 2, dp 2, schedule
            1f1b, no_shard
precision   bf16, main params and optimizer in fp32
run folder  run
watch       nanotrain watch run""",
    100: """\
model       115 k parameters (66.1 k active per token), 2 layers, hidden size 32, vocabulary 260
data        synthetic, 1.02 k tokens in 16 steps
batch       4 samples of 16 tokens = 2 data-parallel x 2 microbatches x 1; 64 tokens per step
layout      8 ranks on NVIDIA H100 80GB HBM3, tp 2, pp 2, etp 2, dp 2, schedule 1f1b, no_shard
precision   bf16, main params and optimizer in fp32
run folder  run
watch       nanotrain watch run""",
    120: """\
model       115 k parameters (66.1 k active per token), 2 layers, hidden size 32, vocabulary 260
data        synthetic, 1.02 k tokens in 16 steps
batch       4 samples of 16 tokens = 2 data-parallel x 2 microbatches x 1; 64 tokens per step
layout      8 ranks on NVIDIA H100 80GB HBM3, tp 2, pp 2, etp 2, dp 2, schedule 1f1b, no_shard
precision   bf16, main params and optimizer in fp32
run folder  run
watch       nanotrain watch run""",
}


@pytest.mark.parametrize("width", SCREENS)
def test_the_header_at_the_width_of_the_terminal(tmp_path, monkeypatch, width):
    monkeypatch.chdir(tmp_path)
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 2 --num-experts 4 --bf16"
    more = [*layout.split(), "--global-batch-size", "4", "--train-iters", "16"]
    config, inputs = open_inputs(load(arguments(Path("run"), *more)))
    text = header(plan_run(config, 8, rank=0), inputs, device="NVIDIA H100 80GB HBM3", width=width)
    assert text == SCREENS[width] and max(map(len, text.splitlines())) <= width


def test_a_split_without_validation_documents_needs_no_other_flag(tmp_path):
    # Launch scripts of Megatron-LM say --split 100,0,0 and leave the interval of validations at its default.
    line = [*arguments(tmp_path / "run"), "--no-mock-data", "--data-path", str(write_corpus(tmp_path / "text"))]
    config, inputs = open_inputs(load([*line, "--eval-interval", "5", "--split", "100,0,0"]))
    text = header(plan_run(config, 1, rank=0), inputs, device="cpu", width=200)
    assert "; no validation, --split 100,0,0 leaves no documents for it\n" in text
    assert not any(isinstance(hook, EvaluateHook) for hook in choose_hooks(config, None))
