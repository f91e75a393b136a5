"""The weight files of a Hugging Face folder, opened lazily and read by the box.

`WeightFiles` hides how many files there are and of which kind: one or many safetensors (read slice by slice) or
pytorch_model.bin (memory-mapped). Names are given with the family's prefix, whether the file has it or not.
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
        piece: Tensor = self._file.get_slice(name)[box.slices()]
        return piece


class _TorchBin:
    def __init__(self, path: Path) -> None:
        self._tensors: dict[str, Tensor] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, box: Box) -> Tensor:
        return self._tensors[name][box.slices()]


# In order of preference: the index of many files, the single file, and what opens them.
KINDS = (
    ("model.safetensors.index.json", "model.safetensors", _Safetensors),
    ("pytorch_model.bin.index.json", "pytorch_model.bin", _TorchBin),
)


class WeightFiles:
    """All tensors of a folder.

    Args:
        folder: the Hugging Face folder.
        prefix: what every tensor but the head begins with; added to names that lack it.

    Raises:
        HuggingFaceError: no weights, a missing or damaged file.
    """

    def __init__(self, folder: Path, *, prefix: str) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, tuple[_File, str]] = {}
        for path, opener in _weight_files(folder):
            file = _open(path, opener)
            for stored, shape in file.shapes().items():
                has_prefix = stored.startswith((prefix, "lm_head."))
                name = stored if has_prefix else prefix + stored
                self.shapes[name] = shape
                self._places[name] = (file, stored)

    def read(self, name: str, box: Box) -> Tensor:
        """One box of a tensor, on the CPU, in the file's dtype."""
        file, stored = self._places[name]
        return file.read(stored, box)


def _weight_files(folder: Path) -> list[tuple[Path, type[_Safetensors] | type[_TorchBin]]]:
    for index_name, single, opener in KINDS:
        index = folder / index_name
        if index.exists():
            return [(folder / name, opener) for name in _indexed(index)]
        if (folder / single).exists():
            return [(folder / single, opener)]
    raise HuggingFaceError(
        f"{folder} holds no weights",
        why=f"none of {', '.join(name for kind in KINDS for name in kind[:2])} is there",
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
        fix = "fetch the folder again; every file its index names must be there and whole"
        raise HuggingFaceError(f"cannot read {path}", why=reason, fix=fix) from None
