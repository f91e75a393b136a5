"""The hooks of a run and their order, and what the first rank writes about a run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.load import load
from nanotrain.data.corpus_info import CorpusInfo, write_info
from nanotrain.data.tokenizer import load_tokenizer
from nanotrain.errors import EnvironmentFault, LocalFault
from nanotrain.plan.plan import plan_run
from nanotrain.train import fit as fit_module
from nanotrain.train import main as entry
from nanotrain.train.evaluate import EvaluateHook
from nanotrain.train.inputs import open_inputs
from nanotrain.train.open_run import choose_hooks, explaining_memory_errors, header, open_run
from tests.train.small_run import SEQ_LENGTH, arguments, metrics_of, train
from tests.train.test_inputs import write_corpus


def names_of(*more: str) -> list[str]:
    config = load(["+config=tiny", *more]).config
    return [type(hook).__name__ for hook in choose_hooks(config, None)]


def test_validation_comes_before_the_log_that_reports_it():
    names = names_of("--eval-interval", "5", "--generate-tokens", "3", "--profile")
    hooks = [
        "Evaluate",
        "Timers",
        "Goodput",
        "Log",
        "DataOrder",
        "Checkpoint",
        "Profile",
        "Sample",
        "Report",
        "Relayout",
        "Summary",
    ]
    assert names == [f"{name}Hook" for name in hooks]


@pytest.mark.parametrize(
    ("flags", "hook"),
    [
        (("--eval-interval", "0"), "EvaluateHook"),
        (("--no-save",), "CheckpointHook"),
        (("--generate-tokens", "0"), "SampleHook"),
        (("--no-report",), "ReportHook"),
    ],
)
def test_a_hook_that_is_switched_off_is_left_out(flags, hook):
    assert hook in names_of() and hook not in names_of(*flags)


def test_a_run_writes_its_configuration_environment_and_tokenizer(tmp_path):
    config, inputs = open_inputs(
        load(arguments(tmp_path, "--train-iters", "1", "--generate-tokens", "0"))
    )
    inputs = replace(inputs, tokenizer="bytes")
    plan = plan_run(config, 1, rank=0)
    with open_run(plan, inputs, context=ParallelContext.attach(plan.topology)) as (run, hooks):
        train(run, *hooks)
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert (
        environment["world_size"] == 1 and environment["origins"]["train.train_iters"] != "default"
    )
    assert load([f"+config={tmp_path / 'config.yaml'}"]).config.train.train_iters == 1
    assert [line["step"] for line in metrics_of(tmp_path)] == [1]
    assert load_tokenizer(str(tmp_path / "tokenizer")).encode("<|endoftext|>é") == [
        *"<|endoftext|>é".encode()
    ]


def allocate_too_much(*_args: object, **_options: object) -> None:
    torch.empty(2**52)


def raise_on_a_gpu() -> None:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation"
    )


@pytest.mark.parametrize(
    ("fail", "why"),
    [
        (allocate_too_much, r"you tried to allocate \d+ bytes"),
        (raise_on_a_gpu, r"CUDA out of memory. Tried to allocate 2.00 GiB\.;"),
        (lambda: bytearray(2**60), "MemoryError"),
    ],
)
def test_the_allocators_of_host_and_gpu_and_of_python(fail, why):
    expected = f"^rank 3 .dp3. ran out of memory: .*{why}.*--micro-batch-size"
    with (
        pytest.raises(LocalFault, match=expected) as raised,
        explaining_memory_errors("rank 3 (dp3)"),
    ):
        fail()
    assert "\n" not in str(raised.value)


def test_an_operator_without_a_deterministic_algorithm_is_one_message():
    reason = "put_ does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True)'"
    expected = "^--deterministic-mode cannot be kept: put_ does not have a deterministic implementation; leave it out"
    with pytest.raises(EnvironmentFault, match=expected), explaining_memory_errors("rank 0"):
        raise RuntimeError(reason)


def test_another_error_keeps_its_traceback():
    with (
        pytest.raises(RuntimeError, match="sizes differ") as raised,
        explaining_memory_errors("rank 0"),
    ):
        raise RuntimeError("sizes differ")
    assert not isinstance(raised.value, LocalFault)


def test_a_step_without_memory_ends_the_run_with_one_message(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(fit_module, "train_step_with_repeats", allocate_too_much)
    assert entry.main(arguments(tmp_path)) == 2
    err = capfd.readouterr().err
    assert err.count("error: rank 0 ran out of memory: ") == 1 and "Traceback" not in err


def test_a_rank_that_is_not_the_first_prints_it_without_waiting(tmp_path, capfd, monkeypatch):
    def fail(*_args):
        raise LocalFault("rank 1 ran out of memory")

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(
        entry.time, "sleep", lambda seconds: pytest.fail(f"it waits for {seconds} s")
    )
    monkeypatch.setattr(entry, "train", fail)
    assert entry.main(arguments(tmp_path)) == 2
    assert capfd.readouterr().err == "error: rank 1 ran out of memory\n"


def lines_of(folder, *more: str, world_size: int = 1) -> dict[str, str]:
    config, inputs = open_inputs(load(arguments(folder, *more)))
    text = header(plan_run(config, world_size, rank=0), inputs, device="cpu")
    return {line[:10].strip(): line[12:] for line in text.splitlines()}


def test_a_run_on_one_rank(tmp_path):
    lines = lines_of(
        tmp_path, "--train-iters", "500", "--global-batch-size", "6", "--micro-batch-size", "2"
    )
    assert list(lines) == ["model", "data", "batch", "layout", "precision", "run folder", "watch"]
    assert lines["model"].endswith("1 layer, hidden size 32, vocabulary 260")
    assert lines["data"] == f"synthetic, {500 * 6 * SEQ_LENGTH / 1000:.3g} k tokens in 500 steps"
    assert lines["batch"].startswith(
        f"6 samples of {SEQ_LENGTH} tokens = 1 data-parallel x 3 microbatches x 2; "
    )
    assert (lines["layout"], lines["precision"]) == ("1 rank on cpu, no_shard", "fp32")
    assert lines["run folder"] == str(tmp_path) and lines["watch"] == f"nanotrain watch {tmp_path}"


def test_trained_parameters_are_counted_where_others_are_frozen(tmp_path):
    lines = lines_of(tmp_path, "--train-only", "final_norm.*", "*_norm.weight")
    # three norms of 32
    assert lines["model"].endswith("vocabulary 260; 96 trained, in 3 tensors")


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
    aware = [
        "--bf16",
        "--use-precision-aware-optimizer",
        "--use-distributed-optimizer",
        "--exp-avg-dtype",
        "bf16",
    ]
    assert (
        lines_of(tmp_path, *aware)["precision"]
        == "bf16, main params in fp32, moments in bf16 and fp32"
    )
    both = lines_of(tmp_path, *aware, "--exp-avg-sq-dtype", "bf16", "--main-grads-dtype", "bf16")
    assert both["precision"] == "bf16, main params in fp32, moments in bf16, main grads in bf16"


def test_a_warmup_longer_than_the_run(tmp_path):
    schedule = ["--lr", "1e-3", "--lr-warmup-iters", "30", "--train-iters"]
    remark = "at most 3.67e-04 of 1.00e-03: the run ends within the warmup of 30 steps"
    assert lines_of(tmp_path, *schedule, "12")["lr"] == remark
    assert "lr" not in lines_of(tmp_path, *schedule, "31")
    grows = ["--rampup-batch-size", "4", "4", "4000", "--global-batch-size", "400"]
    # before the third step: 8 samples
    assert lines_of(tmp_path, *schedule, "3", *grows)["lr"].startswith("at most 6")


def test_layers_whose_compressed_keys_are_longer_than_a_sequence_are_named(tmp_path):
    flags = "--sparse-attention-type compressed --window-size 7 --num-query-groups 1"
    flags += " --compressed-output-groups 2 --compressed-heavy-ratio 128 --num-layers 4"
    remark = "3 layers without compressed keys: one has 128 tokens, a sequence "
    assert lines_of(tmp_path, *flags.split())["attention"] == f"{remark}{SEQ_LENGTH}"
    short = flags.replace("128", str(SEQ_LENGTH))
    assert "attention" not in lines_of(tmp_path, *short.split())


def test_attention_has_a_line_of_its_own(tmp_path):
    config, inputs = open_inputs(load(arguments(tmp_path)))
    text = header(
        plan_run(config, 1, rank=0),
        inputs,
        device="cpu",
        attention="varlen flash (bf16, documents)",
    )
    assert "attention   varlen flash (bf16, documents)\n" in text


def test_recomputation_has_a_line_of_its_own(tmp_path):
    lines = lines_of(tmp_path, "--recompute-granularity", "full")
    assert lines["memory"].startswith(
        "recompute full: uniform, groups of 1 layer (--recompute-method"
    )


def test_epochs_of_a_corpus(tmp_path):
    prefix = write_corpus(tmp_path / "text")
    config, inputs = open_inputs(
        load([*arguments(tmp_path / "run"), "--no-mock-data", "--data-path", str(prefix)])
    )
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
        assert (
            f"the tokenizer of {prefix} has {size} tokens, the model 260: a higher id" in text
        ) == is_named


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
    # Launch scripts of Megatron-LM say --split 100,0,0 and leave the interval of validations at its
    # default.
    line = [
        *arguments(tmp_path / "run"),
        "--no-mock-data",
        "--data-path",
        str(write_corpus(tmp_path / "text")),
    ]
    config, inputs = open_inputs(load([*line, "--eval-interval", "5", "--split", "100,0,0"]))
    text = header(plan_run(config, 1, rank=0), inputs, device="cpu", width=200)
    assert "; no validation, --split 100,0,0 leaves no documents for it\n" in text
    assert not any(isinstance(hook, EvaluateHook) for hook in choose_hooks(config, None))


def test_machines_are_tested_before_the_model_is_built(tmp_path, capfd):
    line = arguments(tmp_path / "run", "--train-iters", "1", "--preflight", "--no-save")
    assert entry.main(line) == 0
    log = capfd.readouterr().err
    assert 0 <= log.index("preflight: no outlier among 1 rank") < log.index("\nmodel ")
