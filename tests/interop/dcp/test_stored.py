"""The parts of a checkpoint by their names."""

from pathlib import Path

import pytest

from nanotrain.errors import CheckpointError
from nanotrain.interop.dcp.stored import StoredRun, find_step_folder
from nanotrain.interop.dcp.tensors import TorchDistFolder
from tests.interop.dcp.opened import open_state, save_state, state_of


def test_wrappers_are_no_part_of_a_name(tmp_path: Path) -> None:
    wrapped = {
        name.replace("attention.", "_orig_mod.attention."): v
        for name, v in state_of("titan_llama").items()
    }
    opened = open_state(tmp_path, wrapped)
    assert opened.run.weights["layers.0.attention.wq.weight"].count("_orig_mod") == 1


def test_the_newest_step_or_the_named_one(tmp_path: Path) -> None:
    for name in ("step-9", "step-10", "step-11", "step-x"):
        (tmp_path / "checkpoint" / name).mkdir(parents=True)
        if name != "step-11":  # not complete
            (tmp_path / "checkpoint" / name / ".metadata").write_text("")
    newest = tmp_path / "checkpoint" / "step-10"
    for path in (tmp_path, tmp_path / "checkpoint", newest):
        assert find_step_folder(path) == newest
    with pytest.raises(CheckpointError, match="neither .metadata nor folders step-N"):
        find_step_folder(tmp_path / "checkpoint" / "step-11")


@pytest.mark.parametrize("prefix", ["", "model.", "app.model."])
def test_what_weights_and_optimizer_have_in_front(tmp_path: Path, prefix: str) -> None:
    state = {}
    for name, value in state_of("titan_llama").items():
        part = name.partition(".")[0]
        others = ("optimizer", "train_state", "dataloader", "lr_scheduler")
        state[name if part in others else prefix + name] = value
    save_state(tmp_path, state)
    run = StoredRun(TorchDistFolder(tmp_path))
    assert (run.prefix, run.embedding, run.optimizer) == (
        prefix,
        "tok_embeddings.weight",
        "optimizer.",
    )
    assert len(run.weights) == len(run.states["exp_avg"]) == 21
    assert run.value("missing", "train_state.step") == 2
    groups = run.param_groups(["lr"])
    assert groups.keys() == run.weights.keys() and groups["norm.weight"] == {"lr": 0.01}


def test_an_average_of_the_weights_is_not_the_model(tmp_path: Path) -> None:
    state = {}
    for name, value in state_of("titan_llama").items():
        if not name.startswith(("optimizer", "train_state", "dataloader", "lr_scheduler")):
            state |= {f"model.{name}": value, f"ema.{name}": value}
    save_state(tmp_path, state)
    assert StoredRun(TorchDistFolder(tmp_path)).prefix == "model."
