"""Saving from a GPU: a save in the background holds what the tensors were, in pinned host memory."""

from pathlib import Path

import pytest
import torch

from nanotrain.checkpoint.background import StagingBuffers
from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.comm.group import Group
from nanotrain.spec.boxes import TensorBox

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_staged_copy_is_pinned_complete_and_used_again() -> None:
    box = TensorBox.full("model/a", (4096, 1024))
    tensor, staging = torch.randn(1024, 4096, device="cuda").t(), StagingBuffers()
    expected = tensor.clone()
    copy = staging.copy({box: tensor})[box]
    tensor.zero_()
    assert copy.is_pinned() and torch.equal(copy, expected.cpu())
    assert staging.copy({box: tensor})[box].data_ptr() == copy.data_ptr() and not copy.any()


def test_a_save_in_the_background_from_a_gpu_is_read_back(tmp_path: Path) -> None:
    writer = Checkpointer(tmp_path, group=Group.single_rank("world"))
    tensors = {
        TensorBox.full(f"model/{i}", (512, 512)): torch.randn(512, 512, device="cuda")
        for i in range(8)
    }
    expected = {box: tensor.clone() for box, tensor in tensors.items()}
    writer.start_save(1, tensors, objects={}, config={}, topology={})
    for tensor in tensors.values():
        tensor.zero_()
    path = writer.wait()
    assert path is not None
    writer.restore(path, tensors)
    assert all(torch.equal(tensor, expected[box]) for box, tensor in tensors.items())
