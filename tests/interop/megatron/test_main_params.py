"""Main parameters that are those of the weights in fewer bits, and others."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanotrain.errors import CheckpointError
from nanotrain.interop.megatron.main_params import is_rounded, require_main_of_weights
from nanotrain.spec.boxes import Box

VALUES = torch.randn(6, 8, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_in_fewer_bits(dtype: torch.dtype) -> None:
    main = torch.cat([VALUES, VALUES * 1e-9])
    assert is_rounded(main, main.to(dtype).float())
    assert not is_rounded(main.roll(1), main.to(dtype).float())


def test_a_diverged_run_moves_too() -> None:
    main = torch.tensor([float("nan"), float("inf"), 1.0])
    assert is_rounded(main, main) and not is_rounded(main, torch.ones(3))


@pytest.mark.parametrize("row", [0, 5])
def test_the_first_and_the_last_row_are_read(row: int) -> None:
    main = VALUES.clone()
    main[row] = main[row].roll(1)
    tensors = {"weight": VALUES, "main": main}

    def read(name: str, box: Box, *, read: Any = None) -> torch.Tensor:
        return tensors["main" if read else "weight"][box.slices()]

    folder = SimpleNamespace(folder=Path("iter_0000009"))
    placement: Any = SimpleNamespace(sizes={"model/a": (6, 8)}, read=read, folder=folder)
    state: Any = SimpleNamespace(read=lambda *_, **__: None)
    with pytest.raises(CheckpointError, match=rf"a\[{row}:{row + 1},0:8\] differs"):
        require_main_of_weights(placement, state)
    tensors["main"] = VALUES
    require_main_of_weights(placement, state)
