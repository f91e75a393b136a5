"""Write a checkpoint from values that are read chunk by chunk: averages and imported weights.

    average            the mean, or an exponential moving average, of the weights of several
                       checkpoints
    write_checkpoint   a step folder from a function that returns any box of any tensor

At most a few chunks of `plan.CHUNK_BYTES` are in memory, whatever the size of the model.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from nanotrain.checkpoint import commit
from nanotrain.checkpoint.compatibility import kind_of
from nanotrain.checkpoint.export_folder import export_folder
from nanotrain.checkpoint.manifest import Manifest, TensorEntry, to_json
from nanotrain.checkpoint.read import read_box
from nanotrain.checkpoint.store import find_manifest
from nanotrain.checkpoint.write import ChunkWrite, shard_name, write_shard
from nanotrain.errors import CheckpointError
from nanotrain.log import progress
from nanotrain.precision.dtypes import TORCH_DTYPES
from nanotrain.quantities import count_of
from nanotrain.spec.boxes import TensorBox

Shapes = Mapping[str, tuple[tuple[int, ...], str]]  # name -> shape and dtype
# kinds of tensors: parameters, and biases of experts, without which a model is not read
AVERAGED = {"model", "router"}


@progress("averaging")
def average(paths: Sequence[Path], output: Path, *, decay: float | None = None) -> Path:
    """Write the average of the weights of checkpoints of one model, oldest first; optimizer state
    is left out.

    Args:
        paths: step folders, or run folders for their newest.
        output: the folder to write; must not exist or be empty.
        decay: weight of a checkpoint relative to the next one, for an exponential moving average;
            None for the mean.

    Returns:
        The folder. Configuration and counters are those of the last checkpoint.

    Raises:
        CheckpointError: the checkpoints are of different models, or damaged.
    """
    folders = []
    manifests = []
    for path in paths:
        folder, manifest = find_manifest(Path(path))
        folders.append(folder)
        manifests.append(manifest)
    names = _shared_weights(folders, manifests)
    ratio = 1.0 if decay is None else decay
    weights = [ratio**age for age in reversed(range(len(paths)))]
    total_weight = sum(weights)
    shares = [weight / total_weight for weight in weights]

    def read(chunk: ChunkWrite) -> torch.Tensor:
        """The weighted average of a chunk over the checkpoints; integers are from the last."""
        box = TensorBox(chunk.source.name, chunk.source.shape, chunk.box)
        dtype = TORCH_DTYPES[chunk.dtype]
        values = [
            read_box(folder, manifest, box=box)
            for folder, manifest in zip(folders, manifests, strict=True)
        ]
        if not dtype.is_floating_point:
            return values[-1]
        total = torch.zeros(values[0].shape, dtype=torch.float64)
        for share, value in zip(shares, values, strict=True):
            total.add_(value.double(), alpha=share)  # fp32 would round each product
        return total.to(dtype)

    shapes = {name: (entry.shape, entry.dtype) for name, entry in names.items()}
    return write_checkpoint(output, shapes, read=read, manifest=manifests[-1])


def write_checkpoint(
    output: Path,
    shapes: Shapes,
    *,
    read: Callable[[ChunkWrite], torch.Tensor],
    manifest: Manifest,
    files: Mapping[str, str] | None = None,
) -> Path:
    """Write a checkpoint of one shard.

    Args:
        output: the folder to make; must not exist or be empty.
        shapes: shape and dtype of every tensor by name.
        read: the values of a chunk, called on several threads.
        manifest: step, objects, config and topology.
        files: texts of further files by name.

    Raises:
        CheckpointError: `output` has files.
        EnvironmentFault: it cannot be written; nothing is left there.
    """
    tensors = {}
    nbytes = 0
    for name, (shape, dtype) in shapes.items():
        tensor = torch.empty(shape, dtype=TORCH_DTYPES[dtype], device="meta")
        tensors[TensorBox.full(name, shape)] = tensor
        nbytes += tensor.nbytes
    with export_folder(output, nbytes=nbytes) as folder:
        for name, text in (files or {}).items():
            (folder / name).write_bytes(text.encode("utf-8", "backslashreplace"))
        shard = write_shard(folder / shard_name(0, 1), tensors, manifest=manifest, read=read)
        commit.write_manifest(folder, to_json(commit.merge_shards(manifest, [shard])))
    return output


def _shared_weights(
    folders: Sequence[Path], manifests: Sequence[Manifest]
) -> dict[str, TensorEntry]:
    """The weights and expert biases, which all checkpoints hold in the same shape."""
    first = _weights(manifests[0])
    for folder, manifest in zip(folders[1:], manifests[1:], strict=True):
        other = _weights(manifest)
        differing = []
        for name in sorted(first.keys() | other.keys()):
            if _form(first, name) != _form(other, name):
                differing.append(name)
        if differing:
            name = differing[0]
            tensors = count_of(len(differing), "tensor", verb="differs")
            raise CheckpointError(
                f"{tensors} in shape between the checkpoints",
                why=f"{name} is {_form(first, name)} in {folders[0]} "
                f"and {_form(other, name)} in {folder}",
                fix="average checkpoints of one run",
            )
    return first


def _weights(manifest: Manifest) -> dict[str, TensorEntry]:
    tensors = manifest.tensors
    return {name: entry for name, entry in tensors.items() if kind_of(name) in AVERAGED}


def _form(tensors: Mapping[str, TensorEntry], name: str) -> str:
    entry = tensors.get(name)
    return "missing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
