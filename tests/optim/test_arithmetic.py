"""The plain sum of squares: of any shards, in rows of fp32 and fp64 across them."""

import pytest
import torch

from nanotrain.optim.arithmetic import PLAIN_ARITHMETIC, ROW_NUMEL, squared_norm


def test_squares_of_all_shards_are_summed() -> None:
    shards = [torch.full((ROW_NUMEL + 3,), 0.5), torch.full((7,), 2.0)]
    expected = 0.25 * (ROW_NUMEL + 3) + 4.0 * 7
    device = torch.device("cpu")
    assert float(squared_norm(shards, device=device)) == pytest.approx(expected, rel=1e-7)
    local = PLAIN_ARITHMETIC.local(shards, device=device)
    assert local.shape == (1,)
    assert local.dtype is torch.float64
    assert float(PLAIN_ARITHMETIC.join(local)) == float(local)


def test_no_shards_have_no_norm() -> None:
    assert float(squared_norm([], device=torch.device("cpu"))) == 0.0
