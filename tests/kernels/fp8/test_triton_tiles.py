"""Programs find the rows of their expert, in Triton's interpreter.

Run as tests/kernels/test_triton_softmax.py.
"""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from nanotrain.kernels.fp8.triton_tiles import How, locate, num_lanes, plan_source  # noqa: E402

NUM_ROWS, UNIT = 310, 16
OFFS = [130, 130, 300]  # the second expert has no rows, and 10 rows are left out


@triton.jit
def record(source, how, out):
    expert, first, end, padded = locate(source, tl.program_id(0), how)
    row = out + tl.program_id(0) * 4
    tl.store(row, expert)
    tl.store(row + 1, first)
    tl.store(row + 2, end)
    tl.store(row + 3, padded)


def located(offs: torch.Tensor | None) -> list[list[int]]:
    """Expert, first row, end and first row with padding of every program."""
    (num_tiles, _), source = plan_source(torch.zeros(NUM_ROWS, 8), offs)
    out = torch.zeros(num_tiles, 4, dtype=torch.int64)
    how = How(num_lanes(source.num_experts), unit=UNIT).constants()
    record[(num_tiles,)](source, how, out)
    return out.tolist()


def test_every_tile_has_rows_of_one_expert_and_begins_where_its_padding_ends() -> None:
    tiles = located(torch.tensor(OFFS, dtype=torch.int32))
    assert tiles[:4] == [[0, 0, 130, 0], [0, 128, 130, 128], [2, 130, 300, 144], [2, 258, 300, 272]]
    assert len(tiles) == 6 and all(expert >= 3 for expert, *_ in tiles[4:])  # no expert needs them


def test_without_experts_tiles_are_in_order() -> None:
    assert located(None) == [[0, start, NUM_ROWS, start] for start in (0, 128, 256)]


def test_lanes_are_a_power_of_two() -> None:
    assert [num_lanes(experts) for experts in (1, 2, 3, 8, 9)] == [1, 2, 4, 8, 16]
