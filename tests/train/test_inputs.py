"""What a run opens on disk: vocabulary, data, folder and the checkpoint to start from."""

import errno
import fcntl
import logging
import os
import shutil
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from nanotrain.checkpoint import store
from nanotrain.config.config import Config
from nanotrain.config.load import load
from nanotrain.config.rules.unused import reset_unused
from nanotrain.data.corpus_info import CorpusInfo, write_info
from nanotrain.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EnvironmentFault,
    ErrorCollector,
)
from nanotrain.plan.plan import plan_run
from nanotrain.prepare.token_writer import TokenWriter
from nanotrain.train import inputs as inputs_module
from nanotrain.train.file_lock import file_lock
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.inputs import open_inputs
from nanotrain.train.run import RunInputs
from tests.config.asking import config_of
from tests.train.small_run import QUIET, SEQ_LENGTH, inputs_of, small_run, train


def write_corpus(prefix, *, num_documents: int = 40, largest_id: int = 255):
    with TokenWriter(prefix, np.dtype("uint16")) as writer:
        for index in range(num_documents):
            writer.add_documents([(np.arange(30) * (index + 1)) % (largest_id + 1)])
    return prefix


def open_on(folder, prefix, *more: str) -> tuple[Config, RunInputs]:
    arguments = [
        "--data-path",
        str(prefix),
        "--seq-length",
        str(SEQ_LENGTH),
        "--run-dir",
        str(folder),
        *more,
    ]
    return open_inputs(load(arguments))


def save_steps(folder, *steps: int):
    """Leave checkpoints of these steps in a run folder."""
    for step in steps:
        with small_run(folder, "--train-iters", str(step), "--keep-last", "0") as run:
            train(run, CheckpointHook())


def test_a_new_run_has_a_folder_and_samples_and_no_checkpoint(tmp_path):
    inputs = inputs_of(tmp_path / "run")
    assert inputs.folder.path.is_dir()
    assert inputs.datasets.train is not None
    assert inputs.checkpoint is None and not inputs.is_resumed


def test_the_vocabulary_is_the_tokenizers_where_it_is_not_set(tmp_path):
    prefix = write_corpus(tmp_path / "text")
    config, inputs = open_on(tmp_path / "run", prefix, "--tokenizer-model", "bytes")
    assert config.model.vocab_size == 257  # 256 bytes and the end of a document
    assert inputs.tokenizer == "bytes"


def test_a_vocabulary_that_nobody_knows_is_an_error(tmp_path):
    prefix = write_corpus(tmp_path / "text")
    with pytest.raises(ConfigError, match="--vocab-size"):
        open_on(tmp_path / "run", prefix)


def test_a_corpus_that_does_not_exist_is_named_before_its_vocabulary(tmp_path):
    with pytest.raises(DataError, match="nowhere.*nanotrain prepare"):
        open_on(tmp_path / "run", tmp_path / "nowhere")


def test_each_split_may_have_its_own_corpora(tmp_path):
    first, second = write_corpus(tmp_path / "a"), write_corpus(tmp_path / "b", num_documents=20)
    common = [
        "--seq-length",
        str(SEQ_LENGTH),
        "--run-dir",
        str(tmp_path / "run"),
        "--vocab-size",
        "300",
    ]
    paths = ["--train-data-path", str(first), "--valid-data-path", str(second), "--split", "1,1,1"]
    _, inputs = open_inputs(load([*common, *paths]))
    whole, half = (
        open_on(
            tmp_path / "run",
            prefix,
            "--vocab-size",
            "300",
            "--split",
            "1,0,0",
            "--eval-interval",
            "0",
        )
        for prefix in (first, second)
    )
    for own, other in ((inputs.datasets.train, whole), (inputs.datasets.valid, half)):
        shared = other[1].datasets.train
        assert own is not None and shared is not None
        assert own.samples_per_epoch == shared.samples_per_epoch
        assert np.array_equal(own[0].tokens, shared[0].tokens)
    assert inputs.datasets.test is None
    with pytest.raises(DataError, match="the valid split has no corpus.*set --valid-data-path"):
        open_inputs(load([*common, "--train-data-path", str(first)]))


def test_a_validation_split_is_required_only_where_there_is_validation(tmp_path):
    prefix = write_corpus(tmp_path / "text")
    # of so few documents none is left for validation
    few = ("--vocab-size", "256", "--split", "999,1")
    assert open_on(tmp_path / "run", prefix, *few, "--eval-interval", "0")[1].datasets.valid is None
    with pytest.raises(DataError, match="eval-interval 0"):
        open_on(tmp_path / "run", prefix, *few, "--eval-interval", "5")
    none = ("--vocab-size", "256", "--split", "1,0,0")
    assert (
        open_on(tmp_path / "run", prefix, *none, "--eval-interval", "5")[1].datasets.valid is None
    )


def test_a_run_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        inputs_of(tmp_path / "file" / "run")


def test_a_run_goes_on_from_its_newest_checkpoint_unless_told_otherwise(tmp_path):
    save_steps(tmp_path / "run", 2, 3)
    resumed = inputs_of(tmp_path / "run")
    assert resumed.checkpoint.name == "step-00000003" and resumed.is_resumed
    anew = inputs_of(tmp_path / "run", "--no-auto-resume")
    assert anew.checkpoint is None and not anew.is_resumed


def test_a_named_checkpoint_comes_before_the_runs_own(tmp_path):
    save_steps(tmp_path / "one", 2)
    save_steps(tmp_path / "other", 3)
    loaded = inputs_of(tmp_path / "other", "--load", str(tmp_path / "one"))
    assert loaded.checkpoint == tmp_path / "one" / "checkpoints" / "step-00000002"
    assert not loaded.is_resumed
    with pytest.raises(CheckpointError, match="nowhere"):
        inputs_of(tmp_path / "other", "--load", str(tmp_path / "nowhere"))


def test_the_quick_start_corpus_lies_in_the_run_folder_and_the_configuration_stays_as_asked(
    tmp_path, monkeypatch
):
    calls = []

    def prepare(folder, vocab_size, *, cache):
        calls.append((folder, vocab_size))
        write_info(tmp_path / "text", CorpusInfo("bytes"))
        return write_corpus(tmp_path / "text")

    monkeypatch.setattr(inputs_module, "prepare_quickstart", prepare)
    flags = "--vocab-size 256 --seq-length 16 --eval-interval 0"
    config, inputs = open_inputs(load(["--run-dir", str(tmp_path / "run"), *flags.split()]))
    assert calls == [(tmp_path / "run" / "data", 8192)]
    assert config.data.data_path == []
    assert inputs.tokenizer == "bytes"


def test_a_file_system_without_locks_is_one_error(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(
        EnvironmentFault, match=r"\.preparing cannot be locked: No locks available: .*--run-dir"
    ):
        open_inputs(load(["+config=tiny", "--run-dir", str(tmp_path / "run")]))


def test_file_lock_rank_of_a_machine_prepares_at_a_time(tmp_path):
    events = []

    def second():
        with file_lock(tmp_path / "lock", "write the corpus"):
            events.append("second")

    waiting = threading.Thread(target=second)
    with file_lock(tmp_path / "lock", "write the corpus"):
        waiting.start()
        time.sleep(0.1)
        events.append("first is done")
    waiting.join()
    assert events == ["first is done", "second"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--pipeline-schedule interlaeved", "did you mean --pipeline-schedule interleaved?"),
        ("--optimizer adan", "did you mean --optimizer adam?"),
        ("--pipeline-schedule interleaved", "set --num-virtual-stages-per-pipeline-rank 2"),
    ],
)
def test_names_and_schedules_are_checked_by_the_plan(arguments, message):
    line = f"--mock-data --vocab-size 64 --pipeline-model-parallel-size 2 {arguments}"
    with pytest.raises(ConfigError, match=message):
        plan_run(load(line.split()).config, 2, rank=0)


MODEL = (
    "--num-query-groups",
    "1",
    "--no-rope-freq",
    "[0]",
    "--hidden-dropout",
    "0.25",
    "--qk-layernorm",
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run folder with a checkpoint, and the model that it holds."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    with small_run(folder, *MODEL, "--train-iters", "1") as run:
        train(run, CheckpointHook())
        return folder, run.config.model


def opened(*arguments: str):
    loaded = load([*QUIET, "--use-checkpoint-args", *arguments])
    return open_inputs(loaded)


def test_the_model_and_the_sequence_length_are_those_of_the_checkpoint(saved, tmp_path):
    folder, model = saved
    config, inputs = opened("--load", str(folder), "--run-dir", str(tmp_path / "run"))
    assert config.model == model and config.data.seq_length == SEQ_LENGTH
    assert inputs.checkpoint == folder / "checkpoints" / "step-00000001"
    config, _ = opened(
        "--load", str(folder), "--run-dir", str(tmp_path / "run"), "--seq-length", "8"
    )
    assert config.data.seq_length == 8


def test_a_run_folder_has_its_own_checkpoint_and_megatron_needs_no_sizes(saved):
    folder, model = saved
    config, inputs = opened("--save", str(folder), "--load", str(folder), "--megatron-defaults")
    assert config.model == model and inputs.is_resumed


def test_rotary_positions_of_the_command_line_stay_for_longer_contexts(saved, tmp_path):
    folder, model = saved
    line = ["--rotary-base", "50000", "--max-position-embeddings", "2048"]
    config, _ = opened("--load", str(folder), "--run-dir", str(tmp_path / "run"), *line)
    assert config.model == replace(model, rotary_base=50000.0, max_position_embeddings=2048)


def test_a_fine_tuning_goes_on_from_its_own_checkpoints(saved, tmp_path, logged):
    folder, _ = saved
    tuned = tmp_path / "tuned"
    line = ["--load", str(folder), "--finetune", "--run-dir", str(tuned)]
    _, inputs = opened(*line)
    assert inputs.checkpoint == folder / "checkpoints" / "step-00000001"
    shutil.copytree(folder / "checkpoints", tuned / "checkpoints")
    own = tuned / "checkpoints" / "step-00000001"
    config, inputs = opened(*line)
    assert inputs.checkpoint == own and inputs.is_resumed and not config.checkpoint.finetune
    assert any("goes on from its own step-00000001" in text for text in logged)
    for others in (["--no-auto-resume"], ["--load", str(own)]):
        config, inputs = opened(*line, *others)
        assert config.checkpoint.finetune and not inputs.is_resumed


def test_a_fine_tuning_without_weights_is_an_error(tmp_path):
    line = ["--data-path", str(tmp_path / "none"), "--vocab-size", "260", "--sft"]
    loaded = load([*line, "--run-dir", str(tmp_path / "run")])
    for start in (open_inputs, inputs_module.check_local_files):
        with pytest.raises(ConfigError, match="--sft without weights .* set --load RUN or --pre"):
            start(loaded)


def test_a_fine_tuning_that_goes_on_from_no_own_checkpoint_needs_weights(saved, tmp_path):
    folder, _ = saved
    shutil.copytree(folder, tmp_path / "run")
    line = ["--data-path", str(write_corpus(tmp_path / "text")), "--vocab-size", "260", "--sft"]
    loaded = load([*line, "--run-dir", str(tmp_path / "run"), "--no-auto-resume"])
    for start in (open_inputs, inputs_module.check_local_files):
        with pytest.raises(ConfigError, match="--sft without .* --no-auto-resume goes on from no "):
            start(loaded)
    inputs_module.check_local_files(load([*line, "--run-dir", str(tmp_path / "run")]))


def test_a_launcher_leaves_checkpoints_in_storage_to_the_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a machine without local files of the run
    corpus = ["--data-path", str(write_corpus(tmp_path / "text")), "--vocab-size", "260"]
    line = [*corpus, "--run-dir", "s3://bucket/run"]
    gone = ["--load", str(tmp_path / "gone")]
    # as in the command of its first start, the weights of which the run needs no more
    for more in (["--sft"], ["--use-checkpoint-args", "--rope-scaling-factor", "4"]):
        inputs_module.check_local_files(load([*line, *more]))
        inputs_module.check_local_files(load([*line, *more, *gone, "--finetune"]))
        with pytest.raises(CheckpointError, match="gone"):
            inputs_module.check_local_files(load([*line, *more, *gone]))
    with pytest.raises(ConfigError, match="--sft without weights"):
        inputs_module.check_local_files(load([*line, "--sft", "--no-auto-resume"]))


def test_a_rank_that_does_not_load_the_checkpoint_reads_no_record_of_a_chunk(
    saved, tmp_path, monkeypatch
):
    folder, model = saved

    def read_manifest(path):
        raise AssertionError(f"the whole manifest of {path} was read")

    monkeypatch.setattr(store, "read_manifest", read_manifest)
    for line in (
        ["--load", str(folder), "--run-dir", str(tmp_path / "run")],
        ["--run-dir", str(folder)],
    ):
        config, _ = open_inputs(
            load([*QUIET, "--use-checkpoint-args", *line]), reads_checkpoint=False
        )
        assert config.model == model


def test_a_damaged_first_line_is_reported_or_another_checkpoint_is_taken(saved, tmp_path):
    folder, model = saved
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    newer = copy / "checkpoints" / "step-00000002"
    newer.mkdir()
    (newer / "manifest.json").write_text('{\n"format": "nanotrain-checkpoint",\n')
    with pytest.raises(CheckpointError, match="step-00000002"):
        opened("--load", str(newer), "--run-dir", str(tmp_path / "run"))
    config, inputs = opened("--run-dir", str(copy))
    assert config.model == model and inputs.checkpoint == copy / "checkpoints" / "step-00000001"


def test_the_checkpoint_overrules_the_command_line_and_says_so(saved, tmp_path, caplog):
    folder, model = saved
    line = [
        "--hidden-size",
        "64",
        "--hidden-dropout",
        "0.5",
        "--make-vocab-size-divisible-by",
        "64",
        "--disable-bias-linear",
    ]
    with caplog.at_level(logging.INFO, logger="nanotrain.train.inputs"):
        config, _ = opened("--load", str(folder), "--run-dir", str(tmp_path / "run"), *line)
    assert config.model == replace(model, make_vocab_size_divisible_by=64)
    assert "--hidden-size is the checkpoint's 32, not 64" in caplog.text
    assert (
        "--hidden-dropout is the checkpoint's 0.25, not 0.5" in caplog.text
        and "add-bias" not in caplog.text
    )


def test_without_a_checkpoint_the_command_line_has_the_model(tmp_path):
    sizes = ("--num-layers", "2", "--vocab-size", "100")
    config, inputs = opened("--run-dir", str(tmp_path / "run"), *sizes)
    assert (config.model.num_layers, config.model.vocab_size) == (
        2,
        100,
    ) and inputs.checkpoint is None
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        opened("--load", str(tmp_path / "none"), "--run-dir", str(tmp_path / "run"), *sizes)


def test_settings_of_experts_wait_for_the_checkpoint_and_pretrained_weights_have_a_model_of_their_own():
    errors = ErrorCollector()
    config, _ = reset_unused(
        config_of(moe_aux_loss_coeff=0.01, use_checkpoint_args=True),
        explicit=frozenset(),
        errors=errors,
    )
    assert config.model.moe.aux_loss_coeff == [0.01] and not errors.errors
    line = ["--use-checkpoint-args", "--pretrained-checkpoint", "folder"]
    assert not load(line).config.checkpoint.use_checkpoint_args


def test_without_a_checkpoint_settings_without_effect_are_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"moe.router_bias_update_rate = 0.01 has no effect"):
        opened("--run-dir", str(tmp_path / "run"), "--moe-router-bias-update-rate", "0.01")
    opened(
        "--run-dir", str(tmp_path / "run"), "--mtp-loss-scaling-factor", "0.3", "--vocab-size", "64"
    )
