"""Flat buffers in NCCL's memory: the calls in their order, by objects that stand in for NCCL."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanotrain.comm import registered_memory
from nanotrain.comm.registered_memory import build_registered

CUDA = torch.device("cuda", 0)


class Nccl:
    """A process group of NCCL and its backend, which record their calls."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events
        self.mem_allocator = f"allocator of {name}"

    def _get_backend(self, device: torch.device) -> "Nccl":
        assert device == CUDA
        return self

    def register_mem_pool(self, pool: Any) -> None:
        self.events.append(f"register {pool} with {self.name}")


def run(
    monkeypatch: pytest.MonkeyPatch, backends: dict[str, str], device: torch.device = CUDA
) -> tuple[list[str], Any]:
    """The calls of a build over groups, by name and backend; one of a single rank is among them."""
    events: list[str] = []

    @contextmanager
    def allocating(pool: Any, device: torch.device) -> Iterator[None]:
        events.append(f"allocate in {pool}")
        yield
        events.append("end")

    monkeypatch.setattr(registered_memory, "memory_pool", lambda allocator: f"[{allocator}]")
    monkeypatch.setattr(registered_memory, "allocating_in", allocating)
    monkeypatch.setattr(registered_memory.dist, "get_backend", lambda group: backends[group.name])
    groups: list[Any] = [SimpleNamespace(process_group=Nccl(name, events)) for name in backends]
    groups.append(SimpleNamespace(process_group=None))

    def build() -> str:
        events.append("build")
        return "built"

    built, pool = build_registered(build, groups, device=device)
    assert built == "built"
    return events, pool


def test_buffers_are_registered_once_with_each_group_after_they_are_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events, pool = run(monkeypatch, {"shard": "nccl", "replicate": "nccl"})
    assert pool == "[allocator of shard]"
    assert events == [
        f"allocate in {pool}",
        "build",
        "end",
        f"register {pool} with shard",
        f"register {pool} with replicate",
    ]


def test_without_nccl_buffers_are_built_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, {"shard": "gloo"}) == (["build"], None)
    assert run(monkeypatch, {"shard": "nccl"}, torch.device("cpu")) == (["build"], None)
    assert run(monkeypatch, {}) == (["build"], None)


def test_torch_has_the_methods_of_its_backend() -> None:
    from torch._C import _distributed_c10d

    assert hasattr(_distributed_c10d.Backend, "mem_allocator")
