"""What `nanotrain evaluate` takes from the model's run and what from its command line."""

import sys

import pytest

from nanotrain.cli.evaluate import evaluation_config
from nanotrain.cli.main import main
from nanotrain.config.config import Config, DataConfig
from nanotrain.config.flags import parse
from nanotrain.config.load import load_line
from nanotrain.config.model import ModelConfig
from nanotrain.errors import ConfigError


def config_of(*flags: str, world_size: int = 1) -> Config:
    trained = Config(
        model=ModelConfig(vocab_size=257), data=DataConfig(seq_length=64, eod_mask_loss=True)
    )
    return evaluation_config(
        trained, load_line(parse(flags), to_train=False), world_size=world_size
    )


def test_length_and_masks_are_the_runs_unless_set() -> None:
    assert (config_of().data.seq_length, config_of("--seq-length", "32").data.seq_length) == (
        64,
        32,
    )
    assert config_of().data.eod_mask_loss


def test_a_batch_has_two_microbatches_per_stage_and_data_parallel_rank() -> None:
    flags = ("--pipeline-model-parallel-size", "2", "--micro-batch-size", "3")
    assert config_of(*flags, world_size=4).train.global_batch_size == 3 * 2 * 4


def test_settings_of_training_are_refused() -> None:
    with pytest.raises(ConfigError, match="^--lr has no effect on an evaluation"):
        config_of("--lr", "1", "--bf16")


@pytest.mark.parametrize(
    "flags", [["--overlap-grad-reduce"], ["--ddp-bucket-size", "100"], ["--force-all-reduce"]]
)
def test_settings_of_gradients_are_refused(flags) -> None:
    with pytest.raises(ConfigError, match=f"{flags[0]} has no effect|force_all_reduce"):
        config_of(*flags)


def test_tasks_run_on_one_process_and_need_their_package(tmp_path, capsys, monkeypatch) -> None:
    line = ["evaluate", str(tmp_path), "--tasks", "arc_easy"]
    assert main([*line, "--tensor-model-parallel-size", "2"]) == 2
    assert "--tensor-model-parallel-size has no effect on --tasks" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path), "--data", "x", "--num-fewshot", "2"]) == 2
    assert "--num-fewshot has no effect on --data" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path), "--data", "x", "--chat"]) == 2
    assert "--chat has no effect on --data: it belongs to --tasks" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "nanotrain.inference.lm_eval", None)
    assert main(line) == 2
    assert "pip install nanotrain[lm-eval]" in capsys.readouterr().err


def test_a_missing_checkpoint_and_a_missing_corpus_are_user_errors(tmp_path, capsys) -> None:
    assert main(["evaluate", str(tmp_path / "none"), "--data", "x"]) == 2
    assert "is not a checkpoint" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "--data" in capsys.readouterr().err
