"""Pickles of strangers: known classes become records, everything else is one error."""

import argparse
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.serialization import get_safe_globals, safe_globals

from nanotrain.errors import CheckpointError
from nanotrain.interop.dcp.pickles import (
    MAX_METADATA_BYTES,
    Record,
    attributes_of,
    load_archive,
    load_metadata,
)


class Call:
    """Pickled as a call of a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def test_a_namespace_is_a_record_with_its_attributes(tmp_path: Path) -> None:
    arguments = argparse.Namespace(num_layers=2, dtype=torch.bfloat16, sent=signal.SIGTERM)
    torch.save({"args": arguments, "iteration": 3}, tmp_path / "common.pt")
    state = load_archive(tmp_path / "common.pt", shown="common.pt")
    record = state["args"]
    assert isinstance(record, Record) and not isinstance(record, argparse.Namespace)
    attributes = attributes_of(record)
    assert (attributes["num_layers"], attributes["dtype"]) == (2, torch.bfloat16)
    assert attributes["sent"].arguments == (15,)
    assert attributes_of(state["iteration"]) == {}


def test_a_class_that_the_process_allows_is_a_record_too(tmp_path: Path) -> None:
    """As after an import of megatron-core."""
    torch.save({"args": argparse.Namespace(num_layers=2)}, tmp_path / "common.pt")
    with safe_globals([argparse.Namespace]):
        state = load_archive(tmp_path / "common.pt", shown="common.pt")
        assert argparse.Namespace in get_safe_globals()
    assert attributes_of(state["args"]) == {"num_layers": 2}


@pytest.mark.parametrize("function", [os.system, eval, print, os.putenv, getattr])
def test_a_call_is_refused_and_not_made(tmp_path: Path, function: Any) -> None:
    hostile = Call(function, f"touch {tmp_path / 'made'}")
    torch.save({"args": hostile}, tmp_path / "common.pt")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(hostile))
    name = "getattr" if function is getattr else function.__name__
    with pytest.raises(CheckpointError, match=f"it would call .*{name}"):
        load_archive(tmp_path / "common.pt", shown="common.pt")
    with pytest.raises(CheckpointError, match=f"it would call .*{name}"):
        load_metadata(tmp_path / ".metadata")
    assert not (tmp_path / "made").exists()


def test_known_classes_have_no_behaviour(tmp_path: Path) -> None:
    calls = Call(argparse.Namespace), Call(Path, str(tmp_path / "made"))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(calls))
    assert all(isinstance(record, Record) for record in load_metadata(tmp_path / ".metadata"))


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04", b"\x80\x04.", b"garbage" * 9, pickle.dumps([1])[:-3]]
)
def test_damage_is_one_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_archive(tmp_path / "file", shown="file")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_metadata(tmp_path / "file")


def test_a_file_without_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(MAX_METADATA_BYTES + 1)
    for name in ("pipe", "huge", "absent"):
        with pytest.raises(CheckpointError, match="no regular file|at most|does not exist"):
            load_metadata(tmp_path / name)
