"""Load the start of a run into a built model; a damaged checkpoint is replaced by an older one.

    restore             tensors, optimizer state and counters, from the newest intact checkpoint of
                        the run
    take_over           the same from the memory of the ranks
    load_pretrained     weights of a Hugging Face folder (`--pretrained-checkpoint`)
    changed_settings    settings that change the loss and differ from those of the checkpoint
    changed_decay       another number of steps, where it moves the learning rate

A checkpoint named with --load is never replaced by another.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.checkpoint.compatibility import has_weights_alone, vocabulary_rows, weights_alone
from nanotrain.checkpoint.live import LiveCheckpoint
from nanotrain.checkpoint.manifest import DamagedCheckpoint, Manifest, damaged
from nanotrain.checkpoint.store import describe_not_finite, none_usable, step_of
from nanotrain.config.config import Config, DataConfig
from nanotrain.config.schema import config_from_dict, to_dict, unnest
from nanotrain.data.build import require_same_corpora
from nanotrain.data.corpus_info import recorded_tokenizer
from nanotrain.data.data_path import parse_data_path
from nanotrain.data.run_tokenizer import first_blend, uses_quickstart
from nanotrain.data.same_tokenizer import is_same_tokenizer
from nanotrain.errors import NanotrainError
from nanotrain.inference.checkpoint import OpenedCheckpoint, tokenizer_name
from nanotrain.log import get_logger
from nanotrain.optim.distributed import DistributedOptimizer
from nanotrain.optim.trained_sets import TrainedSets
from nanotrain.spec.boxes import TensorBox
from nanotrain.train.parts.part import BuiltModel, StepParts
from nanotrain.train.parts.router_balance import tensors_of_routers
from nanotrain.train.run import TrainState
from nanotrain.untrusted import LARGEST, finite_number, list_of, object_of, whole_number

log = get_logger(__name__)

BATCH_SETTINGS = (
    "seed",
    "global_batch_size",
    "rampup_batch_size",
    "step_batch_size_schedule",
    "step_seq_length_schedule",
)
# sections, and the settings in them that change the loss; None for all
LOSS_SETTINGS: dict[str, Collection[str] | None] = {
    "model": None,
    "optim": None,
    "precision": None,
    "data": None,
    "train": BATCH_SETTINGS,
}
NO_LOSS_SETTINGS = {"num_workers"}


def restore(
    start: Path,
    checkpointer: Checkpointer,
    *,
    model: BuiltModel,
    parts: StepParts,
    may_fall_back: bool,
    config: Config | None = None,
) -> TrainState:
    """Read a checkpoint, and start the all-gather of the parameters. Every rank calls this.

    Args:
        start: step folder.
        checkpointer: checkpointer of the run.
        model: model to load into.
        parts: parts of the step, whose tensors are read too.
        may_fall_back: whether a damaged `start` is replaced by the newest intact checkpoint in the
            run's folder.
        config: configuration to compare with the checkpoint's; None: the model's.
            Differences that change the loss are logged.

    Raises:
        DamagedCheckpoint: `start` is damaged, and no other may or can be used.
    """
    config = config or model.config
    weights_alone = _loads_weights_alone(config)
    targets = model.optimizer.state_tensors() | parts.tensors()
    read = partial(
        _read_checkpoint,
        checkpointer=checkpointer,
        targets=targets,
        model=model,
        parts=parts,
        config=config,
    )
    while True:
        try:
            manifest, state = read(start)
            break
        except DamagedCheckpoint as error:  # the same on every rank
            if not may_fall_back:
                raise
            start = _fall_back(start, checkpointer, error=error)
    if manifest.not_finite and checkpointer.group.is_first:
        log.warning("%s: %s", start, describe_not_finite(manifest.not_finite))
    missing = parts.missing(targets, manifest, weights_alone=weights_alone)
    parts.restored(missing, checkpoint=None if weights_alone else start)
    _log_changes(manifest.config, to_dict(config))
    warn_after_restore(manifest, config.data, path=start)
    log.info("loaded %s: step %d, %d samples consumed", start, state.step, state.consumed_samples)
    model.start_param_gather()
    return state


def take_over(source: LiveCheckpoint, *, model: BuiltModel, parts: StepParts) -> TrainState:
    """Fill a model from the memory of the ranks, and start the all-gather of the parameters.

    Every rank of the new layout calls this, the others `LiveCheckpoint.leave`.
    """
    path = Path("the memory of the ranks")
    targets = model.optimizer.state_tensors() | parts.tensors()
    manifest, state = _read_checkpoint(
        path,
        checkpointer=source,
        targets=targets,
        model=model,
        parts=parts,
        config=model.config,
    )
    missing = parts.missing(targets, manifest, weights_alone=False)
    parts.restored(missing, checkpoint=path)
    source.release()
    model.start_param_gather()
    return state


def _read_checkpoint(
    start: Path,
    *,
    checkpointer: Checkpointer | LiveCheckpoint,
    targets: Mapping[TensorBox, Tensor],
    model: BuiltModel,
    parts: StepParts,
    config: Config,
) -> tuple[Manifest, TrainState]:
    """Read the tensors and counters of one checkpoint.

    Raises:
        DamagedCheckpoint: it is damaged.
    """
    weights_alone = _loads_weights_alone(config)
    params = (param.spec for stage in model.plan.stages for param in stage.params)

    def choose(manifest: Manifest, targets: Mapping[TensorBox, Tensor]) -> dict[TensorBox, Tensor]:
        """The tensors to read: without optimizer state if only weights are loaded."""
        left_out = parts.missing(targets, manifest, weights_alone=weights_alone)
        if weights_alone:
            left_out |= {box for box in targets if box.name.startswith("optimizer/")}
        return {box: tensor for box, tensor in targets.items() if box not in left_out}

    manifest = checkpointer.restore(
        start,
        targets,
        config=to_dict(config),
        padded_rows=vocabulary_rows(model.plan.shape, params),
        choose=choose,
        unread=parts.unread,
    )
    state = _load_state(manifest, model.optimizer, path=start, config=config)
    if not config.checkpoint.finetune:
        require_same_corpora(model.dataset, manifest.objects.get("corpora", {}))
    return manifest, state


def _loads_weights_alone(config: Config) -> bool:
    return config.checkpoint.finetune or not config.checkpoint.load_optim


def load_pretrained(folder: Path, *, model: BuiltModel, parts: StepParts) -> None:
    """Read this rank's main params and expert biases, and start the all-gather of the parameters.

    Each rank reads its shards alone. Main params get the digits of the files, also where the model
    params have fewer.

    Raises:
        HuggingFaceError: the files do not have the tensors of the model, or are damaged.
    """
    # few runs need Hugging Face's families
    from nanotrain.interop.hf.import_weights import import_weights

    config = model.config
    state = model.optimizer.state_tensors()
    tensors = {box: tensor for box, tensor in state.items() if box.name.startswith("model/")}
    tensors |= tensors_of_routers(model.stages)
    wanted = {}
    for box, tensor in tensors.items():
        wanted[replace(box, name=box.name.partition("/")[2])] = tensor
    import_weights(folder, config.model, wanted=wanted)
    model.optimizer.finish_load()
    parts.restored((state | parts.tensors()).keys() - tensors.keys(), checkpoint=None)
    model.start_param_gather()
    warn_after_import(folder, config.data)
    log.info("initial weights from %s", folder)


def warn_after_restore(manifest: Manifest, data: DataConfig, *, path: Path) -> None:
    """Log a warning if a checkpoint and the corpus have different tokenizers.

    An id then stands for different texts in the checkpoint and in the corpus.
    """

    def find() -> str | None:
        return tokenizer_name(OpenedCheckpoint(path, config_from_dict(manifest.config), manifest))

    # files of another run may be gone, damaged or private, and are not needed
    with suppress(NanotrainError, OSError):
        _warn_of_other_tokenizer(find, data, path=path)


def warn_after_import(folder: Path, data: DataConfig) -> None:
    """Warn if the tokenizer of a Hugging Face folder differs from the tokenizer of the data."""
    if (folder / "tokenizer.json").is_file():
        _warn_of_other_tokenizer(lambda: str(folder), data, path=folder)


def _warn_of_other_tokenizer(
    find: Callable[[], str | None], data: DataConfig, *, path: Path
) -> None:
    """Log a warning if weights and corpus have different tokenizers.

    Args:
        find: returns the tokenizer of the weights as `load_tokenizer` takes it; None if unknown.
        data: data section of the run.
        path: checkpoint or folder of the weights.
    """
    if uses_quickstart(data) or data.mock_data:
        return
    tokenizer = find()
    if tokenizer is None:
        return
    prefix = parse_data_path(first_blend(data))[0].prefix
    corpus_tokenizer = recorded_tokenizer(prefix)
    if corpus_tokenizer is None or is_same_tokenizer(tokenizer, corpus_tokenizer) is not False:
        return
    log.info(  # on the first rank only; a warning would be logged by every rank
        "warning: the weights of %s belong to the tokenizer %s, but %s was prepared with %s, "
        "in which the same id is different text: the loss starts high; "
        "prepare the corpus with --tokenizer %s",
        path,
        tokenizer,
        prefix,
        corpus_tokenizer,
        tokenizer,
    )


def _log_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Log the differences between the configurations of a checkpoint and of this run."""
    changed = changed_settings(saved, current) + changed_decay(saved, current)
    if changed:
        log.info("settings changed since the checkpoint was written: %s", "; ".join(changed))


def changed_settings(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Settings that change the loss and differ between a checkpoint and this run.

    Args:
        saved: configuration in the checkpoint.
        current: configuration of this run.

    >>> changed_settings({"optim": {"lr": 0.1}}, {"optim": {"lr": 0.2, "clip_grad": 1.0}})
    ['optim.lr 0.1 -> 0.2']
    """
    changed = []
    for section, names in LOSS_SETTINGS.items():
        before = unnest(saved.get(section))
        now = unnest(current.get(section))
        shared = (before.keys() & now.keys()).intersection(names or now)
        for name in sorted(shared - NO_LOSS_SETTINGS):
            if before[name] != now[name]:
                changed.append(f"{section}.{name} {before[name]} -> {now[name]}")
    return changed


def changed_decay(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """A changed number of steps and the curves that depend on it; empty if no curve does."""
    before = unnest(saved.get("train")).get("train_iters")
    now = unnest(current.get("train")).get("train_iters")
    if before is None or now is None or before == now:
        return []
    optim = unnest(current.get("optim"))
    has_own_length = optim.get("lr_decay_iters") or optim.get("lr_decay_samples")
    consequences = []
    if optim.get("lr_decay_style") not in (None, "constant") and not has_own_length:
        consequences.append("to which the learning rate decays")
    if optim.get("weight_decay_incr_style") not in (None, "constant"):
        consequences.append("over which the weight decay changes")
    if not consequences:
        return []
    return [f"train.train_iters {before} -> {now}, {' and '.join(consequences)}"]


def _fall_back(start: Path, checkpointer: Checkpointer, *, error: DamagedCheckpoint) -> Path:
    """The checkpoint before a damaged one; raises the error if there is none."""
    older = checkpointer.latest(below=step_of(start))
    if older is None:
        raise none_usable(start.parent, why=f"{start.name}: {error.what}: {error.why}") from error
    if checkpointer.group.is_first:
        log.warning(
            "%s cannot be loaded and will be renamed (%s: %s); resuming from %s",
            start.name,
            error.what,
            error.why,
            older.name,
        )
    return older


def _load_state(
    manifest: Manifest, optimizer: DistributedOptimizer, *, path: Path, config: Config
) -> TrainState:
    """Check the saved counters, load the optimizer's, and return the run's."""
    if config.checkpoint.finetune:  # checkpoints of `average` and `import-hf` have no counters
        optimizer.finish_load()
        return TrainState()
    if not manifest.objects and has_weights_alone(manifest):
        raise weights_alone(manifest)
    try:
        state = parse_train_state(manifest)
        optimizer_state = _parse_optimizer_state(manifest.objects)
    except ValueError as error:
        raise damaged(
            f"{path / 'manifest.json'} holds no state of a run", why=str(error), path=path
        ) from None
    if not config.checkpoint.load_optim:
        optimizer.finish_load()
    else:
        optimizer.load_state_dict(optimizer_state)
    return state


def parse_train_state(manifest: Manifest) -> TrainState:
    """The counters of a run in a checkpoint.

    Raises:
        ValueError: a field is unknown or has an invalid value.
    """
    saved = object_of(manifest.objects.get("train"), "objects.train")
    known = {field.name for field in fields(TrainState)}
    unknown = sorted(saved.keys() - known)
    if unknown:
        raise ValueError(f"objects.train has an unknown field {unknown[0]!r}")
    losses = list_of(saved.get("recent_losses", []), "objects.train.recent_losses")
    counters = {}
    for name, value in saved.items():
        if name != "recent_losses":
            counters[name] = whole_number(value, f"objects.train.{name}")
    state = TrainState(
        **counters,
        recent_losses=[finite_number(loss, "objects.train.recent_losses") for loss in losses],
    )
    if state.step != manifest.step:
        raise ValueError(
            f"objects.train.step is {state.step}, the step of the checkpoint is {manifest.step}"
        )
    return state


def _parse_optimizer_state(objects: Mapping[str, Any]) -> dict[str, Any]:
    """The saved counters of the optimizer; ValueError for a wrong field."""
    saved = object_of(objects.get("optimizer"), "objects.optimizer")
    whole_number(saved.get("num_updates"), "objects.optimizer.num_updates")
    TrainedSets.from_json(saved)
    scale = object_of(saved.get("loss_scale"), "objects.optimizer.loss_scale")
    finite_number(scale.get("scale"), "objects.optimizer.loss_scale.scale", low=1e-30)
    for name in ("clean_steps", "overflows_left"):
        whole_number(scale.get(name), f"objects.optimizer.loss_scale.{name}", low=-LARGEST)
    if type(scale.get("is_dynamic", False)) is not bool:
        raise ValueError("objects.optimizer.loss_scale.is_dynamic must be true or false")
    return saved
