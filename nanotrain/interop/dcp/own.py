"""Read back what `export_dcp` wrote: the same tensors, counters and configuration."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from nanotrain.checkpoint.manifest import Manifest, plain_json
from nanotrain.checkpoint.rewrite import write_checkpoint
from nanotrain.checkpoint.write import ChunkWrite
from nanotrain.config.schema import with_current_keys
from nanotrain.errors import CheckpointError, ConfigError
from nanotrain.interop.dcp.pickles import unreadable_file
from nanotrain.interop.dcp.tensors import TorchDistFolder
from nanotrain.precision.dtypes import TORCH_DTYPES
from nanotrain.quantities import count_of
from nanotrain.untrusted import object_of, shown, whole_number

DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
OBJECTS = ("objects", "config")  # counters and configuration, as `export_dcp` names them


def is_own(folder: TorchDistFolder) -> bool:
    """Whether `export_dcp` wrote a folder."""
    has_weights = any(name.startswith("model/") for name in folder.tensors)
    return has_weights and folder.objects.keys() == set(OBJECTS)


def read_own(folder: TorchDistFolder, output: Path, *, options: Sequence[str]) -> str:
    """Write a folder of `export_dcp` as the checkpoint that it was; returns a summary line.

    Args:
        folder: the folder.
        output: the folder to write; must not exist or be empty.
        options: settings that the user gives; an error, as none of them would have an effect.

    Raises:
        CheckpointError: it is damaged, or `output` has files.
        ConfigError: settings, which would have no effect.
    """
    if options:
        raise ConfigError(
            f"settings have no effect here: {', '.join(options)}",
            why=f"nanotrain wrote {folder.folder}, with the configuration of its run",
            fix="leave them out",
        )
    manifest = read_manifest(folder)
    shapes = {}
    for name, stored in folder.tensors.items():
        if stored.dtype not in DTYPES:
            raise unreadable_file(str(folder.folder), f"{shown(name)} is {stored.dtype}")
        shapes[name] = (stored.shape, DTYPES[stored.dtype])

    def read(chunk: ChunkWrite) -> Tensor:
        return folder.read(chunk.source.name, chunk.box)

    write_checkpoint(output, shapes, read=read, manifest=manifest)
    tensors = count_of(len(shapes), "tensor")
    return (
        f"{output}: {tensors} of step {manifest.step} as nanotrain wrote them, from {folder.folder}"
    )


def read_manifest(folder: TorchDistFolder) -> Manifest:
    """Step, counters and configuration.

    Raises:
        CheckpointError: they are damaged.
    """
    values: dict[str, Mapping[str, Any]] = {}
    try:
        for name in OBJECTS:
            values[name] = object_of(plain_json(folder.read_object(name)), name)
        train = object_of(values["objects"].get("train", {}), "train")
        step = whole_number(train.get("step", 0), "step")
        config = with_current_keys(values["config"])
    except CheckpointError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise unreadable_file(str(folder.folder), str(error)) from None
    return Manifest(step, {}, {}, objects=values["objects"], config=config, topology={})
