"""State per matrix: who holds it, its names in checkpoints, its bytes."""

import torch

from nanotrain.optim.matrices import Coordinate, OwnedMatrix, matrices_of
from nanotrain.optim.rule import WholeMatrixState
from nanotrain.optim.whole_matrix_state import WholeMatrixStates, whole_matrix_bytes
from nanotrain.spec.boxes import Box
from nanotrain.spec.params import LocalParam
from tests.optim.test_matrices import EXPERTS, SPEC, local

ROWS = WholeMatrixState("rows", lambda shape: shape[0])
NORM = WholeMatrixState("norm", lambda shape: 1, is_replicated=True)
FIRST, SECOND = Coordinate(0, 0, 0), Coordinate(0, 1, 0)


def owned_matrices() -> list[OwnedMatrix]:
    """A matrix of the first rank, and experts that both ranks have in turn."""
    experts = local(EXPERTS)
    shifted = LocalParam(EXPERTS, Box((1, *experts.box.start[1:]), experts.box.stop))
    matrices = [
        *matrices_of(local(SPEC), splits_tensors=True),
        *matrices_of(shifted, splits_tensors=True),
    ]
    owners = [FIRST, SECOND]
    return [OwnedMatrix(m, 0, {}, owners[i % 2], 1) for i, m in enumerate(matrices)]


def held(state: WholeMatrixState, rank: Coordinate, *, once: bool) -> dict[str, list[Box]]:
    owned = owned_matrices()
    states = WholeMatrixStates(owned, state, rank=rank, device=torch.device("cpu"))
    assert states.flat.nbytes == whole_matrix_bytes(owned, state, rank=rank)
    boxes: dict[str, list[Box]] = {}
    for box, tensor in states.tensors(once=once):
        assert tuple(tensor.shape) == box.box.shape
        assert tensor.untyped_storage().data_ptr() == states.flat.untyped_storage().data_ptr()
        boxes.setdefault(box.name, []).append(box.box)
    return boxes


def test_the_owner_alone_has_a_row_of_numbers_per_matrix() -> None:
    rows, num_experts = SPEC.shape[0], EXPERTS.shape[0]
    first = held(ROWS, FIRST, once=False)
    second = held(ROWS, SECOND, once=False)
    assert first == held(ROWS, FIRST, once=True)
    assert first[f"optimizer/rows/{SPEC.name}"] == [Box((0, 0), (1, rows))]
    assert f"optimizer/rows/{SPEC.name}" not in second
    name = f"optimizer/rows/{EXPERTS.name}"
    experts = first.get(name, []) + second[name]
    assert {box.start[0] for box in experts} == set(range(1, num_experts))
    assert sum(box.shape[0] for box in experts) == num_experts - 1


def test_state_of_all_ranks_is_saved_by_the_owner() -> None:
    loaded = held(NORM, SECOND, once=False)
    saved = held(NORM, FIRST, once=True), held(NORM, SECOND, once=True)
    assert loaded == held(NORM, FIRST, once=False)
    for name, boxes in loaded.items():
        by_owner = saved[0].get(name, []) + saved[1].get(name, [])
        assert sorted(by_owner, key=lambda box: box.start) == boxes
