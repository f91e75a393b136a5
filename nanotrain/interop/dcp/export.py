"""Write a checkpoint for torch.distributed.checkpoint, whose `dcp.load` reads it on any ranks.

    export_dcp      the folder
    torch_export    the folder of every export through torch.distributed.checkpoint

The tensors are given to torch on the meta device and read from the checkpoint when it writes them,
one at a time. A tensor keeps its name ("model/layers.0.mlp.up.weight"); counters and configuration
are under "objects" and "config".
"""

import errno
import io
import os
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

from nanotrain.checkpoint.export_folder import export_folder
from nanotrain.checkpoint.manifest import Manifest
from nanotrain.checkpoint.read import read_box
from nanotrain.checkpoint.store import find_manifest
from nanotrain.log import progress
from nanotrain.precision.dtypes import TORCH_DTYPES
from nanotrain.spec.boxes import TensorBox


class _ReadingPlanner(DefaultSavePlanner):
    """Reads a tensor when it is written."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(flatten_state_dict=False)
        self.path = path
        self.manifest = manifest

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The values of one item of the plan."""
        if write_item.type == WriteItemType.BYTE_IO:
            data: torch.Tensor | io.BytesIO = super().resolve_data(write_item)
            return data
        name = write_item.index.fqn
        box = TensorBox.full(name, self.manifest.tensors[name].shape)
        return read_box(self.path, self.manifest, box=box)


@progress("exporting")
def export_dcp(path: Path, output: Path) -> str:
    """Write a checkpoint for torch.distributed.checkpoint; returns a summary line.

    Args:
        path: step folder, or run folder for its newest.
        output: the folder to write; must not exist or be empty.

    Raises:
        CheckpointError: no complete checkpoint, a damaged chunk, or `output` has files.
        EnvironmentFault: `output` cannot be written; nothing is left there.
    """
    source, manifest = find_manifest(Path(path))
    state: dict[str, Any] = {}
    for name, entry in manifest.tensors.items():
        state[name] = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype], device="meta")
    state["objects"] = dict(manifest.objects)
    state["config"] = dict(manifest.config)
    nbytes = sum(entry.nbytes for entry in manifest.tensors.values())
    with torch_export(output, nbytes=nbytes) as folder:
        writer = FileSystemWriter(folder, thread_count=1)
        save(state, storage_writer=writer, planner=_ReadingPlanner(source, manifest), no_dist=True)
    return f"{output}: {len(manifest.tensors)} tensors of step {manifest.step}, from {source}"


@contextmanager
def torch_export(output: Path, *, nbytes: int) -> Iterator[Path]:
    """`export_folder` for torch.distributed.checkpoint, whose errors and warnings are wrapped.

    Raises:
        NanotrainError: the error inside torch's wrapper.
        OSError: no space left, where torch's writer fails.
    """
    with export_folder(output, nbytes=nbytes) as folder, warnings.catch_warnings():
        # torch warns that there are no process groups, which no_dist asks for
        warnings.simplefilter("ignore", UserWarning)
        try:
            yield folder
        except (CheckpointException, RuntimeError) as error:
            cause: BaseException = error
            if isinstance(error, CheckpointException) and error.failures:
                cause, _ = next(iter(error.failures.values()))
            if isinstance(cause, RuntimeError) and "inline_container" in str(cause):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
            raise cause from None
