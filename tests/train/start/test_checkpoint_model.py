"""The model section from the checkpoint of a run."""

import logging
import shutil
from dataclasses import replace

import pytest

from nanotrain.checkpoint import store
from nanotrain.config.load import load
from nanotrain.config.rules.unused import reset_unused
from nanotrain.errors import CheckpointError, ConfigError, ErrorCollector
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.start.inputs import open_inputs
from tests.config.asking import config_of
from tests.train.small_run import QUIET, SEQ_LENGTH, small_run, train

MODEL = ("--num-query-groups", "1", "--no-rope-freq", "[0]", "--hidden-dropout", "0.25", "--qk-layernorm")


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
    config, _ = opened("--load", str(folder), "--run-dir", str(tmp_path / "run"), "--seq-length", "8")
    assert config.data.seq_length == 8


def test_a_run_folder_has_its_own_checkpoint_and_megatron_needs_no_sizes(saved):
    folder, model = saved
    config, inputs = opened("--save", str(folder), "--load", str(folder), "--megatron-defaults")
    assert config.model == model and inputs.is_resumed


def test_a_rank_that_does_not_load_the_checkpoint_reads_no_record_of_a_chunk(saved, tmp_path, monkeypatch):
    folder, model = saved

    def read_manifest(path):
        raise AssertionError(f"the whole manifest of {path} was read")

    monkeypatch.setattr(store, "read_manifest", read_manifest)
    for line in (["--load", str(folder), "--run-dir", str(tmp_path / "run")], ["--run-dir", str(folder)]):
        config, _ = open_inputs(load([*QUIET, "--use-checkpoint-args", *line]), reads_checkpoint=False)
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
    with caplog.at_level(logging.INFO, logger="nanotrain.train.start.checkpoint_model"):
        config, _ = opened("--load", str(folder), "--run-dir", str(tmp_path / "run"), *line)
    assert config.model == replace(model, make_vocab_size_divisible_by=64)
    assert "--hidden-size is the checkpoint's 32, not 64" in caplog.text
    assert "--hidden-dropout is the checkpoint's 0.25, not 0.5" in caplog.text and "add-bias" not in caplog.text


def test_without_a_checkpoint_the_command_line_has_the_model(tmp_path):
    sizes = ("--num-layers", "2", "--vocab-size", "100")
    config, inputs = opened("--run-dir", str(tmp_path / "run"), *sizes)
    assert (config.model.num_layers, config.model.vocab_size) == (2, 100) and inputs.checkpoint is None
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        opened("--load", str(tmp_path / "none"), "--run-dir", str(tmp_path / "run"), *sizes)


def test_settings_of_experts_wait_for_the_checkpoint_and_pretrained_weights_have_a_model_of_their_own():
    errors = ErrorCollector()
    config, _ = reset_unused(
        config_of(moe_aux_loss_coeff=0.01, use_checkpoint_args=True), explicit=frozenset(), errors=errors
    )
    assert config.model.moe.aux_loss_coeff == [0.01] and not errors.errors
    line = ["--use-checkpoint-args", "--pretrained-checkpoint", "folder"]
    assert not load(line).config.checkpoint.use_checkpoint_args


def test_without_a_checkpoint_settings_without_effect_are_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"moe.router_bias_update_rate = 0.01 has no effect"):
        opened("--run-dir", str(tmp_path / "run"), "--moe-router-bias-update-rate", "0.01")
    opened("--run-dir", str(tmp_path / "run"), "--mtp-loss-scaling-factor", "0.3", "--vocab-size", "64")
