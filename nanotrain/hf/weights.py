"""The weight files of a Hugging Face folder, opened lazily and read by box.

`WeightFiles` is one view of one or many safetensors files (read slice by slice) or pytorch_model.bin files
(memory-mapped). Names have the family's prefix, whether the file has it or not.
"""

import json
import pickle
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanotrain.errors import HuggingFaceError
from nanotrain.topology.boxes import Box


class _File(Protocol):
    """One open weight file."""

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def read(self, name: str, box: Box) -> Tensor: ...


class _Safetensors:
    def __init__(self, path: Path) -> None:
        self._file: Any = safe_open(path, framework="pt", device="cpu")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(self._file.get_slice(name).get_shape()) for name in self._file.keys()}  # noqa: SIM118

    def read(self, name: str, box: Box) -> Tensor:
        values: Tensor = self._file.get_slice(name)[box.slices()]
        return values


class _TorchBin:
    def __init__(self, path: Path) -> None:
        self._tensors: dict[str, Tensor] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, box: Box) -> Tensor:
        return self._tensors[name][box.slices()]


# In order of preference: the index of many files, the single file, and the class that opens them.
KINDS = (
    ("model.safetensors.index.json", "model.safetensors", _Safetensors),
    ("pytorch_model.bin.index.json", "pytorch_model.bin", _TorchBin),
)


class WeightFiles:
    """All tensors of a folder.

    Args:
        folder: the Hugging Face folder.
        prefix: of every tensor but the head; added to names without it.

    Raises:
        HuggingFaceError: no weights, or a missing or damaged file.
    """

    def __init__(self, folder: Path, *, prefix: str) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, tuple[_File, str]] = {}
        for path, opener in _weight_files(folder):
            file = _open(path, opener)
            for stored, shape in file.shapes().items():
                has_prefix = stored.startswith((prefix, "lm_head."))
                name = stored if has_prefix else prefix + stored
                self.shapes[name] = shape
                self._files[name] = (file, stored)

    def read(self, name: str, box: Box) -> Tensor:
        """One box of a tensor, on the CPU, in the file's dtype."""
        file, stored = self._files[name]
        return file.read(stored, box)


def _weight_files(folder: Path) -> list[tuple[Path, type[_Safetensors] | type[_TorchBin]]]:
    for index_name, single, opener in KINDS:
        index = folder / index_name
        if index.exists():
            return [(folder / name, opener) for name in _indexed(index)]
        if (folder / single).exists():
            return [(folder / single, opener)]
    raise HuggingFaceError(
        f"{folder} contains no weights",
        why=f"none of {', '.join(name for kind in KINDS for name in kind[:2])} exists",
        fix="give a folder as `save_pretrained` writes it",
    )


def _indexed(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise HuggingFaceError(f"{index} is no index of weights", why=why, fix="fetch the folder again") from None


def _open(path: Path, opener: type[_Safetensors] | type[_TorchBin]) -> _File:
    try:
        return opener(path)
    except (OSError, SafetensorError, RuntimeError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        fix = "fetch the folder again; every file of its index has to be there and complete"
        raise HuggingFaceError(f"cannot read {path}", why=reason, fix=fix) from None
