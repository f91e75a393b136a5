"""The folder of a step, its format and its common state."""

import json
from argparse import Namespace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

from nanotrain.errors import CheckpointError
from nanotrain.interop.megatron.folder import (
    find_step_folder,
    read_common_state,
    require_torch_dist,
)

TRACKER = "latest_checkpointed_iteration.txt"


def write_step(folder: Path, backend: str = "torch_dist") -> Path:
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": backend}))
    return folder


@pytest.mark.parametrize(("text", "name"), [("3\n", "iter_0000003"), ("release", "release")])
def test_the_newest_step_or_the_named_one(tmp_path: Path, text: str, name: str) -> None:
    step = write_step(tmp_path / name)
    (tmp_path / TRACKER).write_text(text)
    assert find_step_folder(tmp_path) == find_step_folder(step) == step
    require_torch_dist(step)


@pytest.mark.parametrize("text", ["4", "../../etc", "1e9", "", "9" * 30, "²"])
def test_another_text_in_the_tracker_is_an_error(tmp_path: Path, text: str) -> None:
    write_step(tmp_path / "iter_0000003")
    (tmp_path / TRACKER).write_text(text)
    with pytest.raises(CheckpointError, match="takes a step, or release|has no folder"):
        find_step_folder(tmp_path)


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither metadata.json nor latest"):
        find_step_folder(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        find_step_folder(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="has the format zarr"):
        require_torch_dist(write_step(tmp_path / "zarr", "zarr"))
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "common.pt").touch()
    assert find_step_folder(tmp_path / "killed") == tmp_path / "killed"
    (tmp_path / "old" / "mp_rank_00").mkdir(parents=True)
    assert find_step_folder(tmp_path / "old") == tmp_path / "old"


def test_the_common_state_among_the_tensors(tmp_path: Path) -> None:
    """As megatron-core 0.19 saves it: a list with the state, as an object."""
    key = "common_state/shard_0_1"
    state = {"args": Namespace(num_layers=2), "iteration": 7}
    contents = {"listed": [state], "plain": state, "hostile": [Fraction(1)], "other": [1, 2]}
    for name, content in contents.items():
        # whole objects, not the entries of lists
        planner = DefaultSavePlanner(flatten_state_dict=False)
        dcp.save({key: content}, checkpoint_id=tmp_path / name, planner=planner, no_dist=True)
    for name in ("listed", "plain"):
        common = read_common_state(tmp_path / name)
        assert (common.step, common.arguments) == (7, {"num_layers": 2})
    with pytest.raises(CheckpointError, match=r"fractions\.Fraction"):
        read_common_state(tmp_path / "hostile")
    with pytest.raises(CheckpointError, match="must be an object"):
        read_common_state(tmp_path / "other")
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "none", no_dist=True)
    with pytest.raises(CheckpointError, match="neither a file common.pt nor an object"):
        read_common_state(tmp_path / "none")


def test_the_common_state(tmp_path: Path) -> None:
    torch.save({"args": Namespace(num_layers=2), "iteration": 7}, tmp_path / "common.pt")
    common = read_common_state(tmp_path)
    assert (common.step, common.arguments) == (7, {"num_layers": 2})
    torch.save({"iteration": 7}, tmp_path / "common.pt")
    assert read_common_state(tmp_path).arguments == {}
    for state in ([1], {"iteration": -1}, {"iteration": "x"}):
        torch.save(state, tmp_path / "common.pt")
        with pytest.raises(CheckpointError, match="must be"):
            read_common_state(tmp_path)
