"""`evaluate` and `generate` on one rank or on a layout."""

import pytest

from nanotrain.cli.parser import CommandParser
from nanotrain.cli.trained import ModelCommand, add_model
from nanotrain.errors import ConfigError


def test_options_of_torchrun_and_settings_may_be_anywhere(tmp_path) -> None:
    parser = CommandParser("evaluate", print)
    add_model(parser)
    argv = ["--nproc_per_node=2", str(tmp_path), "--tensor-model-parallel-size", "2", "--ema"]
    command = ModelCommand.parse("evaluate", parser, argv=argv)
    assert command.options == ["--nproc-per-node=2"]
    assert command.args.path == tmp_path and command.args.ema
    assert command.loaded.config.parallel.tensor_model_parallel_size == 2


def test_one_of_several_tasks_of_mpirun_is_refused(tmp_path, monkeypatch) -> None:
    parser = CommandParser("evaluate", print)
    add_model(parser)
    command = ModelCommand.parse("evaluate", parser, argv=[str(tmp_path)])
    monkeypatch.delenv("RANK", raising=False)
    assert command.run(lambda args, loaded: 3, check=print) == 3
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="mpirun started 2 tasks"):
        command.run(lambda args, loaded: 3, check=print)
