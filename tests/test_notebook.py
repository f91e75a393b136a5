"""The programming interface: the cells of examples/notebook.ipynb run, and Python gives the run of
the command line.
"""

import json
from pathlib import Path

import numpy as np
import pytest

import nanotrain
from nanotrain.config.config import Config
from nanotrain.config.load import configure, load_config, load_object
from nanotrain.errors import ConfigError
from nanotrain.train.main import main
from tests.train.conftest import logging_as_before  # noqa: F401
from tests.train.small_run import arguments, metrics_of

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook.ipynb"
pytestmark = pytest.mark.usefixtures("logging_as_before")


def test_the_cells_of_the_notebook_run(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    cells = [
        cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]
    assert not any(cell["outputs"] for cell in cells)
    names: dict[str, object] = {}
    for cell in cells:
        exec(compile("".join(cell["source"]), str(NOTEBOOK), "exec"), names)
    losses = names["history"].column("loss")
    assert len(losses) == 8 and np.isfinite(losses).all() and losses[-1] < losses[0]
    assert (tmp_path / "runs" / "notebook" / "report.html").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"data", "runs"}, "which git ignores"
    out = capfd.readouterr().out
    assert "step 8/8" in out and "\ndef " in out


def test_a_configuration_in_python_gives_the_run_of_the_command_line_to_the_bit(
    tmp_path, monkeypatch
):
    """Dtype, schedule, clipping and two buckets are set, in three ways."""
    more = [
        "--train-iters",
        "3",
        "--bf16",
        "--clip-grad",
        "0.5",
        "--lr",
        "1e-2",
        "--global-batch-size",
        "2",
    ]
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(arguments(tmp_path / "line", *more)) == 0
    nanotrain.pretrain(load_config(arguments(tmp_path / "object", *more)))
    written = configure(str(tmp_path / "line" / "config.yaml"), run_dir=str(tmp_path / "python"))
    history = nanotrain.pretrain(written)
    rows = [metrics_of(tmp_path / name) for name in ("line", "object", "python")]
    assert (
        len({tuple((row["loss"], row["grad_norm"], row["lr"]) for row in run) for run in rows}) == 1
    )
    assert history.column("loss").tolist() == [row["loss"] for row in rows[0]]


def test_configure_takes_the_names_of_the_flags():
    config = configure(
        "tiny", train_iters=7, lr=1e-3, shuffle=False, data_path=["a", "b"], moe_router_topk=2
    )
    argv = "+config=tiny --train-iters 7 --lr 1e-3 --no-shuffle --data-path a b --moe-router-topk 2"
    assert config == load_config(argv.split()) and isinstance(config, Config)
    assert configure(vocab_size=100, lr_decay_iters=None) == load_config(["--vocab-size", "100"])


def test_all_mistakes_of_configure_are_one_error():
    with pytest.raises(ConfigError, match="2 mistakes") as caught:
        configure("tiny", learning_rate=1, hidden_size="wide")
    assert "--lr" in str(caught.value) and "wide" in str(caught.value)


def test_an_object_is_checked_as_a_file_is():
    config = configure("tiny", vocab_size=100)
    assert load_object(config).config == config
    with pytest.raises(ConfigError, match="num_attention_heads"):
        load_object(
            nanotrain.Config(
                model=type(config.model)(hidden_size=30, num_attention_heads=4, vocab_size=64)
            )
        )
