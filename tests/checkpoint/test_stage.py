"""Staged tensors are copies in host memory, which the next save uses again."""

import weakref

import pytest
import torch

from nanotrain.checkpoint import stage
from nanotrain.checkpoint.stage import StagingBuffers
from nanotrain.spec.boxes import Box, TensorBox

A, B = TensorBox("model/a", (8, 4), Box((2, 0), (6, 4))), TensorBox.full("model/b", (3,))


def test_copies_do_not_change_with_the_tensors_and_their_memory_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(stage, "synchronize", waited.append)
    monkeypatch.setattr(stage.split_box, "__kwdefaults__", {"limit": 16})  # a row of A
    staging, tensor = StagingBuffers(), torch.arange(16.0).view(4, 4).T
    first = staging.copy({A: tensor, B: torch.ones(3)})
    expected, pointer = tensor.clone(), first[A].data_ptr()
    tensor.zero_()
    assert torch.equal(first[A], expected) and first[A].is_contiguous()
    assert waited == [torch.device("cpu")], "copies from a device are complete on return"
    assert staging.copy({A: tensor, B: torch.ones(3)})[A].data_ptr() == pointer and first[A].count_nonzero() == 0


def test_memory_of_another_dtype_or_of_a_tensor_that_is_gone_is_released() -> None:
    staging = StagingBuffers()
    held = [weakref.ref(tensor) for tensor in staging.copy({A: torch.ones(4, 4), B: torch.ones(3)}).values()]
    copies = staging.copy({B: torch.ones(3, dtype=torch.bfloat16)})
    assert copies[B].dtype is torch.bfloat16
    assert [reference() for reference in held] == [None, None]
