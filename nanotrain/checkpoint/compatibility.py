"""Compare a checkpoint with the tensors of a run, from its manifest alone.

    check_compatible   every tensor of the run is in the checkpoint, with its shape and a dtype that may be cast
    check_all_loaded   the ranks together load every tensor of a kind (the checkpoint has no further layers)

    vocabulary_rows    the tables with padding, and their tokens
    fit_padding        load tables whose rows are padded to another number

The kind of a tensor is its name up to the first "/": "model" or "optimizer". Float tensors are cast
to the dtype of the run (a bf16 fine-tuning of an fp32 run, moments of `--exp-avg-dtype`); all
others must have the same dtype.

The embedding and the head have one row per token, padded to a multiple of
`--make-vocab-size-divisible-by`. Padding is not part of the softmax and gets no gradient, so its
values never matter: rows that the checkpoint lacks become zero, rows that the run lacks are not
read.

        checkpoint [128, H]      run [192, H]
        0 .. 99    tokens   -->  0 .. 99
        100 .. 127 padding       100 .. 191   zero
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from nanotrain.checkpoint.manifest import Manifest
from nanotrain.config.schema import unnest
from nanotrain.errors import CheckpointError
from nanotrain.quantities import count_of
from nanotrain.spec.boxes import Box, TensorBox
from nanotrain.spec.parameters import declare_model
from nanotrain.spec.params import ParamSpec
from nanotrain.spec.shape import ModelShape

MAX_LISTED = 4
CASTABLE = frozenset({"fp64", "fp32", "fp16", "bf16"})


def check_compatible(
    manifest: Manifest, targets: Mapping[TensorBox, str], *, config: Mapping[str, Any] | None = None
) -> None:
    """Compare names, shapes and dtypes.

    Args:
        targets: box -> dtype to load it in (a key of `precision.dtypes.TORCH_DTYPES`).
        config: the configuration of this run, for errors that list the model options that differ.

    Raises:
        CheckpointError: some differ; it has the first names, both sides of each, and the options
            that explain them.
    """
    differences: dict[str, str] = {}
    casts: dict[str, str] = {}
    for box, dtype in targets.items():
        entry = manifest.tensors.get(box.name)
        if entry is None or entry.shape != tuple(box.shape):
            there = "missing" if entry is None else list(entry.shape)
            differences[box.name] = f"{box.name} is {there} there, {list(box.shape)} here"
        elif entry.dtype != dtype and not {entry.dtype, dtype} <= CASTABLE:
            casts[box.name] = f"{box.name} is {entry.dtype} there, {dtype} here"
    if differences:
        raise _another_model(manifest, list(differences.values()), config=config)
    if casts:
        raise CheckpointError(
            f"another dtype in {count_of(len(casts), 'tensor')} of the checkpoint: {_join(list(casts.values()))}",
            why="only float tensors are cast on loading",
            fix="keep the precision section of the checkpoint's config, or load the weights alone",
        )


def loads(manifest: Manifest, targets: Iterable[TensorBox]) -> list[float]:
    """1 for each tensor of the manifest that this rank loads, else 0, in order; the ranks take the
    maximum.
    """
    names = {box.name for box in targets}
    return [float(name in names) for name in manifest.tensors]


def check_all_loaded(
    manifest: Manifest, loaded: Sequence[float], *, config: Mapping[str, Any] | None = None
) -> None:
    """Check that of every kind that some rank loads, every tensor is loaded by some rank.

    `loaded` is the largest of the `loads` of all ranks, `config` is as in `check_compatible`.

    Raises:
        CheckpointError: the checkpoint is of a larger model; loading a part of it silently would
            hide that.
    """
    kinds = {
        kind_of(name) for name, is_loaded in zip(manifest.tensors, loaded, strict=True) if is_loaded
    }
    unused = [
        name
        for name, is_loaded in zip(manifest.tensors, loaded, strict=True)
        if not is_loaded and kind_of(name) in kinds
    ]
    if unused:
        lines = [
            f"{name} is {list(manifest.tensors[name].shape)} there, missing here" for name in unused
        ]
        raise _another_model(manifest, lines, config=config)


def has_weights_alone(manifest: Manifest) -> bool:
    """Whether a checkpoint has no optimizer state: of --no-save-optim, an average or an import."""
    return "optimizer" not in map(kind_of, manifest.tensors)


def weights_alone(manifest: Manifest) -> CheckpointError:
    """The error of a resume from such a checkpoint."""
    go_on = (
        f", or --no-load-optim to go on at step {manifest.step}"
        if manifest.objects.get("train")
        else ""
    )
    return CheckpointError(
        f"the checkpoint of step {manifest.step} has weights alone",
        why="optimizer state to resume from is not in it: it is of --no-save-optim, an average or an import",
        fix=f"add --finetune to start at step 0 from its weights{go_on}",
    )


def kind_of(name: str) -> str:
    """The kind of a tensor, the first part of its name.

    >>> kind_of("optimizer/exp_avg/final_norm.weight")
    'optimizer'
    """
    return name.split("/", 1)[0]


def _another_model(
    manifest: Manifest, lines: Sequence[str], *, config: Mapping[str, Any] | None
) -> CheckpointError:
    if all(line.startswith("optimizer/") for line in lines) and has_weights_alone(manifest):
        return weights_alone(manifest)
    rules = [(side.get("optim") or {}).get("optimizer") for side in (manifest.config, config or {})]
    if (
        rules[0] != rules[1]
        and None not in rules
        and all(line.startswith("optimizer/") for line in lines)
    ):
        return CheckpointError(
            f"the checkpoint of step {manifest.step} has the state of --optimizer {rules[0]}, not of {rules[1]}",
            why=f"{count_of(len(lines), 'tensor', verb='differs')}: {_join(lines)}",
            fix=f"set --optimizer {rules[0]}, or export its weights and load them with --pretrained-checkpoint",
        )
    there, here = (unnest({"model": side.get("model")}) for side in (manifest.config, config or {}))
    differing = [key for key in here if key in there and there[key] != here[key]]
    options = [f"{key} {there[key]} there, {here[key]} here" for key in differing]
    return CheckpointError(
        f"the checkpoint of step {manifest.step} is of another model, "
        f"{count_of(len(lines), 'tensor', verb='differs')}: {_join(lines)}",
        why=f"model options differ: {_join(options)}"
        if options
        else "names and shapes must be the same",
        fix="set the options as they are there, choose another --run-dir for a new run, or another --load",
    )


def _join(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - MAX_LISTED} more" if len(lines) > MAX_LISTED else ""
    return "; ".join(lines[:MAX_LISTED]) + more


def vocabulary_rows(shape: ModelShape, specs: Iterable[ParamSpec] | None = None) -> dict[str, int]:
    """The number of tokens by the name of every parameter with one row per token of the padded
    vocabulary.

    `specs` are those of the parameters to look at, as of one rank; None: of the whole model.
    """
    specs = declare_model(shape) if specs is None else specs
    return {spec.name: shape.vocab_size for spec in specs if spec.is_embedding_or_output}


def fit_padding(
    manifest: Manifest, targets: Mapping[TensorBox, torch.Tensor], *, rows: Mapping[str, int]
) -> dict[TensorBox, torch.Tensor]:
    """The targets with the padding of the checkpoint, as views; rows beyond the tokens are set to
    zero.

    Args:
        manifest: manifest of the checkpoint.
        targets: box -> tensor of the box's shape.
        rows: number of tokens of every padded table, by the name of the parameter.
    """
    model = manifest.config.get("model")
    vocab_size = model.get("vocab_size") if isinstance(model, Mapping) else None
    fitted: dict[TensorBox, torch.Tensor] = {}
    for box, tensor in targets.items():
        entry, tokens = manifest.tensors.get(box.name), rows.get(box.name.rpartition("/")[2], -1)
        if (
            tokens != vocab_size
            or entry is None
            or not _differs_in_padding(entry.shape, box.shape, tokens=tokens)
        ):
            fitted[box] = tensor
            continue
        tensor.zero_()
        shared = box.box.intersect(Box.full((tokens, *box.shape[1:])))
        if shared is not None:
            fitted[TensorBox(box.name, entry.shape, shared)] = tensor[
                shared.within(box.box).slices()
            ]
    return fitted


def _differs_in_padding(there: tuple[int, ...], here: tuple[int, ...], *, tokens: int) -> bool:
    is_padded = len(there) == len(here) > 0 and min(there[0], here[0]) >= tokens
    return is_padded and there[0] != here[0] and there[1:] == here[1:]
