"""Whether a group shares memory: asked of all ranks, tried on one machine only."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import _symmetric_memory as torch_symmetric

from nanotrain.comm import symmetric_memory
from nanotrain.comm.symmetric_memory import FIRST_BYTES, has_symmetric_memory

CUDA = torch.device("cuda", 0)
GROUP: Any = SimpleNamespace(process_group=SimpleNamespace(group_name="7"))


def found_by_a_rank(
    monkeypatch: pytest.MonkeyPatch,
    *,
    hosts: list[str],
    others: tuple[bool, ...] = (True,),
    fails: bool = False,
    backend: str = "nccl",
    device: torch.device = CUDA,
) -> tuple[bool, list[tuple[str, int]]]:
    """What this rank finds, and the workspaces that it tried."""
    tried: list[tuple[str, int]] = []

    def try_workspace(name: str, num_bytes: int) -> None:
        tried.append((name, num_bytes))
        if fails:
            raise RuntimeError("CUDASymmetricMemory: no peer access")

    def gather(value: Any, group: Any) -> list[Any]:
        return hosts if isinstance(value, str) else [value, *others]

    monkeypatch.setattr(symmetric_memory.dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(symmetric_memory, "all_gather_object", gather)
    monkeypatch.setattr(torch_symmetric, "get_symm_mem_workspace", try_workspace)
    return has_symmetric_memory(GROUP, device), tried


def test_gpus_of_one_machine_share_memory_if_all_ranks_can(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = [("7", FIRST_BYTES)]
    assert found_by_a_rank(monkeypatch, hosts=["a", "a"]) == (True, workspace)
    assert found_by_a_rank(monkeypatch, hosts=["a", "a"], fails=True) == (False, workspace)
    assert found_by_a_rank(monkeypatch, hosts=["a", "a"], others=(False,)) == (False, workspace)


def test_several_machines_and_other_backends_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_by_a_rank(monkeypatch, hosts=["a", "b"]) == (False, [])
    assert found_by_a_rank(monkeypatch, hosts=["a", "a"], backend="gloo") == (False, [])
    assert found_by_a_rank(monkeypatch, hosts=["a", "a"], device=torch.device("cpu")) == (False, [])
