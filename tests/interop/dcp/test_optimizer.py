"""Settings of AdamW and counters."""

from pathlib import Path

import pytest
import torch

from nanotrain.errors import CheckpointError
from nanotrain.interop.dcp.import_run import describe
from tests.interop.dcp.opened import lines_of, open_state, state_of
from tests.interop.dcp.programs import BATCH_FLAGS, HEADS_FLAG


def test_settings_of_the_optimizer(tmp_path: Path) -> None:
    optim = open_state(tmp_path / "all", state_of("titan_llama")).config.optim
    assert (optim.lr, optim.lr_decay_style, optim.adam_beta2) == (1e-2, "constant", 0.95)
    assert optim.min_lr == 1e-2
    assert optim.apply_wd_to_all_params and optim.weight_decay == 0.1
    changed = dict(state_of("titan_llama"))
    for name in state_of("titan_llama"):
        if name.endswith((".initial_lr", "norm.weight.weight_decay")):
            changed[name] = 0.0
        if name.endswith(".lr"):
            changed[name.replace(".lr", ".initial_lr")] = 0.02
    changed["optimizer.param_groups.tok_embeddings.weight.lr"] = 0.5
    opened = open_state(tmp_path / "changed", changed)
    assert not opened.config.optim.apply_wd_to_all_params
    text = "\n".join(describe(opened))
    assert "lr: 0.01 is taken; some parameters have 0.5" in text
    assert "learning rate: 0.01, that of the next step, stays constant (it began from 0.02)" in text
    text = lines_of(
        tmp_path / "given",
        state_of("titan_llama"),
        f"{HEADS_FLAG} --lr 1e-3 --lr-decay-style cosine",
    )
    assert "the learning rate of the next step was 0.01; the given schedule is taken" in text
    flags = f"{HEADS_FLAG} --adam-beta2 0.999"
    text = lines_of(tmp_path / "other", state_of("titan_llama"), flags)
    assert "--adam-beta2 0.999 is taken; the checkpoint has 0.95" in text


@pytest.mark.parametrize("flag", ["amsgrad", "maximize"])
def test_an_optimizer_of_another_kind_is_an_error(tmp_path: Path, flag: str) -> None:
    name = f"optimizer.param_groups.norm.weight.{flag}"
    with pytest.raises(CheckpointError, match="cannot be read") as error:
        open_state(tmp_path, state_of("titan_llama") | {name: True})
    assert f"'norm.weight' has {flag}" in error.value.why


def test_counters(tmp_path: Path) -> None:
    state = state_of("titan_llama") | {"dataloader.world_size": 4}
    text = lines_of(tmp_path / "tokens", state, f"{HEADS_FLAG} --seq-length 12")
    assert "moments after 1 update, step 2, 64 samples consumed" in text
    assert "from 192 tokens of a rank, 4 data-parallel ranks and --seq-length 12" in text
    text = lines_of(tmp_path / "batch", state, f"{HEADS_FLAG} {BATCH_FLAGS}")
    assert "step 2, 16 samples consumed" in text
    assert "consumed samples: not stored" in lines_of(tmp_path / "none", state)


def test_no_number_of_updates_is_an_error(tmp_path: Path) -> None:
    """As of fused optimizers, which count in their groups."""
    state = {
        name: value
        for name, value in state_of("titan_llama").items()
        if not (name.startswith("optimizer.state.") and name.endswith(".step"))
    }
    with pytest.raises(CheckpointError, match="no parameter has a number of updates"):
        open_state(tmp_path, state)


def test_weights_alone(tmp_path: Path) -> None:
    opened = open_state(tmp_path, state_of("titan_llama"), optim=False)
    assert opened.counters is None and not opened.state
    assert all(name.startswith("model/") for name in opened.shapes)
    assert "the next run begins at step 0" in "\n".join(describe(opened))


def test_state_by_number_is_an_error(tmp_path: Path) -> None:
    state = {
        name: value
        for name, value in state_of("titan_llama").items()
        if not name.startswith("optimizer.")
    }
    for kind in ("exp_avg", "exp_avg_sq", "step"):
        state[f"optimizer.state.0.{kind}"] = torch.zeros(16)
    with pytest.raises(CheckpointError, match="get_optimizer_state_dict"):
        open_state(tmp_path, state)
