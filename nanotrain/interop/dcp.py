"""Write a checkpoint in the format of torch.distributed.checkpoint, which `dcp.load` reads on any number of ranks.

    export_dcp      the folder
    export_folder   a folder that is whole or not there, for every export through torch.distributed.checkpoint

The tensors are given to torch on the meta device and read from the checkpoint when it writes them, one at a time. A
tensor keeps its name ("model/layers.0.mlp.up.weight"); counters and configuration are under "objects" and "config".
"""

import errno
import io
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from nanotrain.checkpoint.commit import require_space
from nanotrain.checkpoint.manifest import Manifest
from nanotrain.checkpoint.read import read_box
from nanotrain.checkpoint.store import find_manifest
from nanotrain.errors import CheckpointError
from nanotrain.precision.dtypes import TORCH_DTYPES
from nanotrain.runs.files import disk_fault
from nanotrain.spec.boxes import TensorBox


class _ReadingPlanner(DefaultSavePlanner):
    """Reads a tensor when it is written."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(flatten_state_dict=False)
        self.path, self.manifest = path, manifest

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The values of one item of the plan."""
        if write_item.type == WriteItemType.BYTE_IO:
            data: torch.Tensor | io.BytesIO = super().resolve_data(write_item)
            return data
        name = write_item.index.fqn
        box = TensorBox.full(name, self.manifest.tensors[name].shape)
        return read_box(self.path, self.manifest, box=box)


def export_dcp(path: Path, output: Path) -> str:
    """Write a checkpoint for torch.distributed.checkpoint; returns a summary line.

    Args:
        path: step folder, or run folder for its newest.
        output: the folder to write; must not exist or be empty.

    Raises:
        CheckpointError: no complete checkpoint, a damaged chunk, or `output` has files.
        EnvironmentFault: `output` cannot be written; nothing is left there.
    """
    found, manifest = find_manifest(Path(path))
    state: dict[str, Any] = {
        name: torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype], device="meta")
        for name, entry in manifest.tensors.items()
    }
    state |= {"objects": dict(manifest.objects), "config": dict(manifest.config)}
    nbytes = sum(entry.nbytes for entry in manifest.tensors.values())
    with export_folder(output, nbytes=nbytes) as folder:
        writer = FileSystemWriter(folder, thread_count=1)
        save(state, storage_writer=writer, planner=_ReadingPlanner(found, manifest), no_dist=True)
    return f"{output}: {len(manifest.tensors)} tensors of step {manifest.step}, from {found}"


@contextmanager
def export_folder(output: Path, *, nbytes: int) -> Iterator[Path]:
    """Yield a temporary folder to fill; its content gets its name when the block succeeds, and is removed when not.

    Args:
        output: must not exist or be empty.
        nbytes: of the tensors, for which space is checked.

    Raises:
        CheckpointError: `output` has files, or the error of the block inside torch's wrapper.
        EnvironmentFault: the disk is full, or the folder cannot be written.
    """
    is_new = not os.path.lexists(output)
    if not is_new and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"{output} is not empty", why="nothing is overwritten", fix="name another folder")
    token = secrets.token_hex(4)
    temporary = output.with_name(f".{output.name}.partial-{token}") if is_new else output / f".partial-{token}"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        require_space(temporary, nbytes)
        with _errors_of_torch(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that there are no process groups, which no_dist asks for
            yield temporary
        if is_new:
            os.rename(temporary, output)
        else:
            for child in sorted(temporary.iterdir(), key=_written_at):  # what names other files comes after them
                os.rename(child, output / child.name)
    except OSError as error:
        raise disk_fault(error, output, fix="name another folder") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _written_at(path: Path) -> tuple[int, bool, str]:
    """Sorts files as they were written; of one clock tick, .metadata last, and iter_N before its tracker."""
    return path.stat().st_mtime_ns, path.name.startswith("."), path.name


@contextmanager
def _errors_of_torch() -> Iterator[None]:
    """Raise the error that torch wraps; where its writer of archives fails, that of a full disk."""
    try:
        yield
    except (CheckpointException, RuntimeError) as error:
        wrapped = error.failures if isinstance(error, CheckpointException) else {}
        cause = next((failure for failure, _ in wrapped.values()), error)
        if isinstance(cause, RuntimeError) and "inline_container" in str(cause):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
        raise cause from None
