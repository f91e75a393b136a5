"""Does this checkpoint fit this model? Answered from the manifest, before a shard is opened.

    check_fits     every wanted tensor is there, in the wanted shape and a dtype that may become the wanted one
    check_used     no tensor of a wanted kind is left over, over all ranks (a deeper model's layers, say)

The kind of a tensor is its name up to the first "/": "model", "optimizer". Model weights may be cast on loading, float
to float (a bf16 fine-tune of an fp32 run); everything else must have the same dtype, for a rounded moment is no resume.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nanotrain.checkpoint.manifest import Manifest
from nanotrain.errors import CheckpointError
from nanotrain.topology.boxes import TensorBox

MOST_LISTED = 4
CASTABLE = frozenset({"fp64", "fp32", "fp16", "bf16"})
_FIX = "give the model section of the checkpoint's config, or another --load"


def check_fits(manifest: Manifest, wanted: Mapping[TensorBox, str], *, config: Mapping[str, Any] | None = None) -> None:
    """Compare names, shapes and dtypes.

    Args:
        manifest: of the checkpoint.
        wanted: box -> dtype it is wanted in (a key of `manifest.ELEMENT_BYTES`).
        config: the present configuration; with it an error also names the model options that differ.

    Raises:
        CheckpointError: with the first differing names, both sides of each, and the options that explain them.
    """
    differences: dict[str, str] = {}
    casts: dict[str, str] = {}
    for box, dtype in wanted.items():
        entry = manifest.tensors.get(box.name)
        if entry is None:
            differences[box.name] = f"{box.name} is missing there, {list(box.shape)} here"
        elif entry.shape != tuple(box.shape):
            differences[box.name] = f"{box.name} is {list(entry.shape)} there, {list(box.shape)} here"
        elif entry.dtype != dtype and not (kind_of(box.name) == "model" and {entry.dtype, dtype} <= CASTABLE):
            casts[box.name] = f"{box.name} is {entry.dtype} there, {dtype} here"
    if differences:
        raise _another_model(manifest, list(differences.values()), config=config)
    if casts:
        raise CheckpointError(
            f"{len(casts)} tensors of the checkpoint have another dtype: {_listed(list(casts.values()))}",
            why="only float tensors under model/ are cast on loading; a rounded optimizer state is no resume",
            fix="keep the precision section of the checkpoint's config, or load the weights alone",
        )


def used_mask(manifest: Manifest, wanted: Iterable[TensorBox]) -> int:
    """The wanted tensors as bits in the manifest's order: ranks tell each other a bit a tensor, not a name."""
    names = {box.name for box in wanted}
    return sum(1 << place for place, name in enumerate(manifest.tensors) if name in names)


def check_used(manifest: Manifest, masks: Iterable[int], *, config: Mapping[str, Any] | None = None) -> None:
    """Of every kind that some rank wants, all tensors must be wanted by some rank.

    Args:
        manifest: of the checkpoint.
        masks: every rank's `used_mask`.
        config: as in `check_fits`.

    Raises:
        CheckpointError: the checkpoint is of a larger model; loading a part of it in silence would hide that.
    """
    used = 0
    for mask in masks:
        used |= mask
    names = list(manifest.tensors)
    kinds = {kind_of(name) for place, name in enumerate(names) if used >> place & 1}
    unused = [name for place, name in enumerate(names) if not used >> place & 1 and kind_of(name) in kinds]
    if unused:
        lines = [f"{name} is {list(manifest.tensors[name].shape)} there, missing here" for name in unused]
        raise _another_model(manifest, lines, config=config)


def kind_of(name: str) -> str:
    """The kind of a tensor, the first part of its name.

    >>> kind_of("optimizer/exp_avg/final_norm.weight")
    'optimizer'
    """
    return name.split("/", 1)[0]


def _another_model(manifest: Manifest, lines: Sequence[str], *, config: Mapping[str, Any] | None) -> CheckpointError:
    options = _differing_options(manifest.config.get("model"), (config or {}).get("model"))
    why = f"model options differ: {_listed(options)}" if options else "names and shapes must be the same"
    return CheckpointError(
        f"the checkpoint of step {manifest.step} is of another model, {len(lines)} tensors differ: {_listed(lines)}",
        why=why,
        fix=_FIX,
    )


def _differing_options(there: Any, here: Any, *, path: str = "model.") -> list[str]:
    if not isinstance(there, Mapping) or not isinstance(here, Mapping):
        return []
    options = []
    for name in here.keys() & there.keys():
        before, now = there[name], here[name]
        if isinstance(now, Mapping):
            options += _differing_options(before, now, path=f"{path}{name}.")
        elif before != now:
            options.append(f"{path}{name} {before} there, {now} here")
    return sorted(options)


def _listed(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - MOST_LISTED} more" if len(lines) > MOST_LISTED else ""
    return "; ".join(lines[:MOST_LISTED]) + more
