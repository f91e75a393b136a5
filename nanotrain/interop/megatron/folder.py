"""Find the checkpoint of one step in a folder of Megatron-LM, and its common state.

    FOLDER/latest_checkpointed_iteration.txt    the step, or "release"
    FOLDER/iter_0000300/metadata.json           the names of the formats
    FOLDER/iter_0000300/common.pt               arguments, step, schedules, optimizer; since
                                                megatron-core 0.19 an object among the tensors
    FOLDER/iter_0000300/mp_rank_00/             of the format `torch`, in place of both; legacy.py

`find_step_folder` takes FOLDER, for its newest step, or the folder of a step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from nanotrain.errors import CheckpointError
from nanotrain.interop.dcp.pickles import attributes_of, load_archive, unreadable_file
from nanotrain.interop.dcp.tensors import METADATA, TensorFolder, TorchDistFolder
from nanotrain.untrusted import (
    object_of,
    parse_json,
    plain_text,
    read_file,
    shown,
    text_of,
    unreadable,
    whole_number,
)

TRACKER = "latest_checkpointed_iteration.txt"
FORMATS = "metadata.json"
COMMON = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"  # its key where it is an object among the tensors
RANKS = "mp_rank_*"  # folders of model-parallel ranks in the format `torch`
RANK_FILE = "model_optim_rng.pt"  # in each of them
MAX_TEXT_BYTES = 1 << 16
FIX = "name a folder of --save of Megatron-LM, or one iter_NNNNNNN of it"


@dataclass(frozen=True)
class CommonState:
    """Values that all ranks of a checkpoint share: its common state."""

    arguments: Mapping[str, Any]  # of the run, by their names in the program; empty: not stored
    step: int
    state: Mapping[str, Any]  # all of them


def find_step_folder(path: Path) -> Path:
    """The folder of a step that a path names: itself, or the newest in it.

    Raises:
        CheckpointError: there is none.
    """
    if (path / FORMATS).is_file() or (path / COMMON).is_file() or any(path.glob(RANKS)):
        return path
    tracker = path / TRACKER
    if not tracker.is_file():
        why = f"it has neither {FORMATS} nor {TRACKER}"
        if not path.is_dir():
            why = "there is no such folder"
        raise CheckpointError(f"{path} is no checkpoint of Megatron-LM", why=why, fix=FIX)
    try:
        text = read_file(tracker, most=MAX_TEXT_BYTES).decode().strip()
    except (OSError, ValueError) as error:
        raise unreadable_file(str(tracker), unreadable(error)) from None
    name = text
    if text != "release":
        if not text.isascii() or not text.isdecimal() or len(text) > 18:
            raise CheckpointError(
                f"{tracker} is {shown(text)}", why="it takes a step, or release", fix=FIX
            )
        name = f"iter_{int(text):07d}"
    folder = path / name
    if not folder.is_dir():
        raise CheckpointError(
            f"{path} has no folder {name}", why=f"{TRACKER} names it as the newest", fix=FIX
        )
    return folder


def require_torch_dist(folder: Path) -> None:
    """Check that the tensors of a step are in the format torch_dist.

    Raises:
        CheckpointError: they are in another format.
    """
    file = folder / FORMATS
    if not file.is_file():
        raise CheckpointError(f"{folder} has no {FORMATS}", why="a save writes it last", fix=FIX)
    try:
        formats = object_of(parse_json(read_file(file, most=MAX_TEXT_BYTES)), "the file")
    except (OSError, ValueError) as error:
        raise unreadable_file(str(file), unreadable(error)) from None
    backend = formats.get("sharded_backend")
    if backend != "torch_dist":
        raise CheckpointError(
            f"{folder} has the format {plain_text(backend)}",
            why="torch_dist is read",
            fix="load it with Megatron-LM and save it with --ckpt-format torch_dist",
        )


def read_common_state(folder: Path, *, tensors: TensorFolder | None = None) -> CommonState:
    """The common state of a step; in the format `torch`, that in the file of its first rank.

    Args:
        folder: folder of the step.
        tensors: its tensors, in the format `torch_dist`; None: opened here where it takes them.

    Raises:
        CheckpointError: it cannot be read.
    """
    file = folder / COMMON
    files = rank_files(folder)
    if not files and not file.exists() and (folder / METADATA).exists():
        return common_state_among(tensors or TorchDistFolder(folder))
    if files:
        file = files[0]
    state = load_archive(file, shown=str(file), is_mapped=bool(files))
    try:
        return common_state_of(state)
    except ValueError as error:
        raise unreadable_file(str(file), str(error)) from None


def common_state_among(tensors: TensorFolder) -> CommonState:
    """The common state that is an object among the tensors.

    Source: Megatron-LM, `dist_checkpointing/serialization.py`, since core 0.19.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if COMMON_OBJECT not in tensors.objects:
        raise CheckpointError(
            f"{tensors.folder} has no common state",
            why=f"there is neither a file {COMMON} nor an object {COMMON_OBJECT}",
            fix="copy the checkpoint again, or use another step of the run",
        )
    content = tensors.read_object(COMMON_OBJECT)
    if isinstance(content, list) and len(content) == 1:
        content = content[0]
    try:
        return common_state_of(content)
    except ValueError as error:
        raise unreadable_file(f"{tensors.folder}, {COMMON_OBJECT}", str(error)) from None


def rank_files(folder: Path) -> list[Path]:
    """The files of model-parallel ranks in the folder of a step, in the format `torch`."""
    return sorted(folder.glob(f"{RANKS}/{RANK_FILE}"))


def common_state_of(state: Any) -> CommonState:
    """The common state in the content of a file.

    Raises:
        ValueError: it has none.
    """
    content = object_of(state, "it")
    step = whole_number(content.get("iteration", 0), "iteration")
    arguments = attributes_of(content.get("args"))
    for name, value in arguments.items():
        text_of(name, "the name of an argument")
        if isinstance(value, Tensor):
            raise ValueError(f"the argument {shown(name)} is a tensor")
    return CommonState(arguments, step, content)
