"""Boxes of a state whose shards are flattened are those of the state itself.

Megatron-core 0.16.1 does not write the form any more: the folder is made by its description.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from nanotrain.interop.dcp.tensors import TorchDistFolder
from nanotrain.interop.megatron.flattened import is_flattened, read_flattened
from nanotrain.interop.megatron.optimizer_state import find_state
from nanotrain.interop.megatron.placement import Placement
from nanotrain.spec.boxes import Box
from tests.interop.megatron.models import LLAMA, write_checkpoint
from tests.interop.megatron.test_placement import exported


def flattened(values: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
    """[X, Y] as [counts of shards, elements of a shard]."""
    for dim, count in enumerate(counts):
        values = values.unflatten(2 * dim, (count, -1))
    dims = len(counts)
    order = [2 * dim for dim in range(dims)] + [2 * dim + 1 for dim in range(dims)]
    return values.permute(order).flatten(dims)


def test_shards_that_do_not_divide_a_weight_are_another_form() -> None:
    assert is_flattened((2, 1, 16), (8, 4))
    assert not is_flattened((2, 1, 12), (7, 4))


@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 1, 1), (2, 3, 1), (1, 2, 4)])
def test_any_box(tmp_path: Path, counts: tuple[int, ...]) -> None:
    values = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))
    dcp.save({"state": flattened(values, counts)}, checkpoint_id=tmp_path, no_dist=True)
    folder = TorchDistFolder(tmp_path)
    assert is_flattened(folder.tensors["state"].shape, (4, 6, 8))
    for box in (Box.full((4, 6, 8)), Box((1, 2, 3), (3, 5, 7)), Box((3, 0, 0), (4, 6, 8))):
        read = read_flattened(folder, "state", box=box, weight=(4, 6, 8))
        assert torch.equal(read, values[box.slices()])


def test_the_moments_of_a_model(tmp_path: Path) -> None:
    """Layers are stacked, so that a layer is a shard; two tensor-parallel ranks share the rows."""
    write_checkpoint(tmp_path / "run", LLAMA)
    weights = exported(tmp_path, LLAMA)
    state: dict[str, torch.Tensor] = {}
    for key, stored in weights.tensors.items():
        values = weights.read(key, Box.full(stored.shape))
        counts = [2 if key.endswith(".linear_qkv.weight") else 1] * len(stored.shape)
        counts[-1] = 1
        if key.startswith("decoder.layers."):
            counts[0] = 2
        state[key] = values
        for kind, factor in (("fp32_param", 1), ("exp_avg", 10), ("exp_avg_sq", 100)):
            state[f"optimizer.state.{kind}.{key}"] = flattened(values * factor, tuple(counts))
    dcp.save(state, checkpoint_id=tmp_path / "old", no_dist=True)
    folder = TorchDistFolder(tmp_path / "old")
    placement = Placement(LLAMA, folder)
    found = find_state(folder, placement, arguments={})
    assert found is not None
    for key, stored in weights.tensors.items():
        box = Box.full(stored.shape)
        assert torch.equal(found.read(key, box, kind="exp_avg"), weights.read(key, box) * 10)
        assert torch.equal(found.read(key, box, kind="param"), weights.read(key, box))
