"""Compare a checkpoint with the tensors of a run, from its manifest alone.

    check_compatible   every tensor of the run is in the checkpoint, with its shape and a dtype that
                       may be cast
    check_all_loaded   the ranks together load every tensor of a kind (the checkpoint has no further
                       layers)

    require_model      a model is no larger than a checkpoint
    vocabulary_rows    tables with padding, and their numbers of tokens
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

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nanotrain.checkpoint.manifest import Manifest, damaged
from nanotrain.config.config import Config
from nanotrain.config.model import ModelConfig
from nanotrain.config.rules.check import check_model
from nanotrain.config.schema import config_from_dict, unnest
from nanotrain.errors import CheckpointError, ConfigError
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
        num_casts = count_of(len(casts), "tensor")
        listed = _join(list(casts.values()))
        raise CheckpointError(
            f"another dtype in {num_casts} of the checkpoint: {listed}",
            why="only float tensors are cast on loading",
            fix="keep the precision section of the checkpoint's config, or load the weights alone",
        )


def loads(manifest: Manifest, names: Collection[str]) -> list[float]:
    """1 for each tensor of the manifest that this rank loads, else 0; ranks take the maximum."""
    return [float(name in names) for name in manifest.tensors]


def check_all_loaded(
    manifest: Manifest, loaded: Sequence[float], *, config: Mapping[str, Any] | None = None
) -> None:
    """Check that the ranks together load every tensor of each kind that they load.

    Args:
        manifest: manifest of the checkpoint.
        loaded: maximum of the `loads` of all ranks.
        config: configuration of this run, as in `check_compatible`.

    Raises:
        CheckpointError: the checkpoint is of a larger model; loading a part of it silently would
            hide that.
    """
    names = set()
    for name, is_loaded in zip(manifest.tensors, loaded, strict=True):
        if is_loaded:
            names.add(name)
    kinds = {kind_of(name) for name in names}
    lines = []
    for name, entry in manifest.tensors.items():
        if name not in names and kind_of(name) in kinds:
            lines.append(f"{name} is {list(entry.shape)} there, missing here")
    if lines:
        raise _another_model(manifest, lines, config=config)


def has_weights_alone(manifest: Manifest) -> bool:
    """Whether a checkpoint has no optimizer state, as from --no-save-optim or an import."""
    return "optimizer" not in map(kind_of, manifest.tensors)


def weights_alone(manifest: Manifest) -> CheckpointError:
    """The error of a resume from a checkpoint without optimizer state."""
    fix = "add --finetune to start at step 0 from its weights"
    if manifest.objects.get("train"):
        fix += f", or --no-load-optim to go on at step {manifest.step}"
    return CheckpointError(
        f"the checkpoint of step {manifest.step} has weights alone",
        why="optimizer state to resume from is not in it: "
        "it is of --no-save-optim, an average or an import",
        fix=fix,
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
    """The error for tensors that differ.

    Args:
        manifest: manifest of the checkpoint.
        lines: a text on each tensor, which begins with its name.
        config: configuration of this run; None if unknown.
    """
    current = config or {}
    differs = f"{count_of(len(lines), 'tensor', verb='differs')}: {_join(lines)}"
    if all(line.startswith("optimizer/") for line in lines):
        if has_weights_alone(manifest):
            return weights_alone(manifest)
        saved_rule = _optimizer_of(manifest.config)
        rule = _optimizer_of(current)
        if saved_rule is not None and rule is not None and saved_rule != rule:
            return CheckpointError(
                f"the checkpoint of step {manifest.step} has the state of "
                f"--optimizer {saved_rule}, not of {rule}",
                why=differs,
                fix=f"set --optimizer {saved_rule}, or export its weights "
                "and load them with --pretrained-checkpoint",
            )
    options = _differing_options(manifest.config, current)
    why = "names and shapes must be the same"
    if options:
        why = f"model options differ: {_join(options)}"
    return CheckpointError(
        f"the checkpoint of step {manifest.step} is of another model, {differs}",
        why=why,
        fix="set the options as they are there, choose another --run-dir for a new run, "
        "or another --load",
    )


def _differing_options(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """The model settings that differ between a checkpoint and a run, as text."""
    there = unnest({"model": saved.get("model")})
    here = unnest({"model": current.get("model")})
    options = []
    for key in here:
        if key in there and there[key] != here[key]:
            options.append(f"{key} {there[key]} there, {here[key]} here")
    return options


def _optimizer_of(config: Mapping[str, Any]) -> Any:
    return (config.get("optim") or {}).get("optimizer")


def _join(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - MAX_LISTED} more" if len(lines) > MAX_LISTED else ""
    return "; ".join(lines[:MAX_LISTED]) + more


def vocabulary_rows(shape: ModelShape, specs: Iterable[ParamSpec] | None = None) -> dict[str, int]:
    """Numbers of tokens of the parameters with one row per token of the padded vocabulary, by name.

    Args:
        shape: shape of the model.
        specs: parameters to look at, as of one rank; None for the whole model.
    """
    specs = declare_model(shape) if specs is None else specs
    return {spec.name: shape.vocab_size for spec in specs if spec.is_embedding_or_output}


def config_of(manifest: Manifest, *, path: Path) -> Config:
    """The configuration in a manifest, whose model is a possible one.

    Args:
        manifest: manifest of a checkpoint.
        path: the step folder, for the error.

    Raises:
        CheckpointError: it breaks a rule on models.
        ConfigError: it has unknown fields, or values of the wrong type.
    """
    config = config_from_dict(manifest.config)
    # an imported model has no training data, whose sequences could be too long for it
    longest = min(config.data.seq_length, config.model.max_position_embeddings)
    try:
        check_model(replace(config, data=replace(config.data, seq_length=longest)))
    except ConfigError as error:
        raise CheckpointError(
            f"{path} cannot be used",
            why=f"the configuration in its manifest is of no model: {error.what}: {error.why}",
            fix="load another checkpoint of the run",
        ) from None
    return config


def num_elements(spec: ParamSpec, shape: ModelShape) -> int:
    """Elements of a parameter without the padding of its rows."""
    if spec.is_embedding_or_output:
        return shape.vocab_size * math.prod(spec.shape[1:])
    return math.prod(spec.shape)


def require_model(manifest: Manifest, model_config: ModelConfig, *, path: Path) -> None:
    """Check that a model is no larger than a checkpoint, before anything is allocated.

    Args:
        manifest: manifest of the checkpoint.
        model_config: a model to fill from it; another padding of the vocabulary may differ.
        path: the step folder, for the error.

    Raises:
        DamagedCheckpoint: its configuration is of a larger model.
    """
    held = sum(math.prod(entry.shape) for entry in manifest.tensors.values())
    wanted = model_config.num_layers  # every layer has weights
    if wanted <= held:
        shape = ModelShape.of(model_config)
        wanted = max(num_elements(spec, shape) for spec in declare_model(shape))
    if wanted > held:
        raise damaged(
            f"{path} does not hold its model",
            why=f"its tensors have {held:,} elements, and its configuration a larger model",
            path=path,
        )


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
        entry = manifest.tensors.get(box.name)
        tokens = rows.get(box.name.rpartition("/")[2], -1)
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
            view = tensor[shared.within(box.box).slices()]
            fitted[TensorBox(box.name, entry.shape, shared)] = view
    return fitted


def _differs_in_padding(there: tuple[int, ...], here: tuple[int, ...], *, tokens: int) -> bool:
    """Whether two shapes of an embedding differ only in padding rows beyond the vocabulary."""
    if len(there) != len(here) or not here or there[1:] != here[1:]:
        return False
    rows_there = there[0]
    rows_here = here[0]
    return rows_there != rows_here and min(rows_there, rows_here) >= tokens
