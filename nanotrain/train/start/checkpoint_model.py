"""`--use-checkpoint-args`: the model section from the checkpoint that a run starts from, as in Megatron-LM.

Every rank reads it, before process groups exist, since their layout and the memory of a rank follow from it: but only
the first lines of the manifest (checkpoint/head.py). All ranks read the same lines. A checkpoint that turns out to be
damaged when it is loaded is replaced by an older one of the same run, which has the same model.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanotrain.checkpoint.head import saved_config
from nanotrain.checkpoint.store import checkpoint_to_resume, find_manifest, named_checkpoint, step_entries
from nanotrain.config.config import Config
from nanotrain.config.rules.unused import reset_unused
from nanotrain.config.schema import KEYS, config_from_dict, flat_values, plain, value_of, with_values
from nanotrain.errors import ErrorCollector
from nanotrain.interop.hf.canonical import free_keys
from nanotrain.log import get_logger

log = get_logger(__name__)

# independent of the weights, but Megatron-LM takes them from the checkpoint
DROPOUT = ("attention_dropout", "hidden_dropout")


def with_checkpoint_model(config: Config, explicit: frozenset[str]) -> Config:
    """Replace the model section by the one of the checkpoint to start from; without a checkpoint nothing changes.

    Model settings of the command line that do not concern the weights stay (loss coefficients, capacity). The others
    are replaced, and differences are logged. The sequence length is the checkpoint's unless the command line sets it.

    Args:
        config: `checkpoint.use_checkpoint_args` is set.
        explicit: keys set on the command line.

    Raises:
        CheckpointError: --load names no checkpoint.
        ConfigError: there is no checkpoint yet, and settings of the command line have no effect.
    """
    found = _find(config)
    if found is None:
        log.info("use_checkpoint_args: there is no checkpoint yet, the model is that of the command line")
        _require_effect(config, explicit)
        return config
    step, settings = found
    saved = config_from_dict(settings)
    free = [f"model.{key}" for key in free_keys(saved.model) if key not in DROPOUT]
    kept = {key: value_of(config, key) for key in free if key in explicit}
    completed = with_values(replace(config, model=saved.model), kept)
    if "data.seq_length" not in explicit:
        completed = with_values(completed, {"data.seq_length": saved.data.seq_length})
    log.info("use_checkpoint_args: the model is that of %s", step)
    before, after = flat_values(config), flat_values(completed)
    for key in sorted(explicit):
        if before[key] != after[key] and key.startswith("model."):
            flag, shown = KEYS[key].flag, plain(before[key])
            log.info("use_checkpoint_args: %s is the checkpoint's %s, not %s", flag, plain(after[key]), shown)
    return completed


def _require_effect(config: Config, explicit: frozenset[str]) -> None:
    """Check the settings without effect on the model of the command line, for which `load` waits for a checkpoint."""
    errors = ErrorCollector()
    reset_unused(with_values(config, {"checkpoint.use_checkpoint_args": False}), explicit=explicit, errors=errors)
    errors.raise_errors()


def _find(config: Config) -> tuple[Path, Mapping[str, Any]] | None:
    """The checkpoint of `--load`, otherwise the newest of the run folder, and the configuration in it."""
    load, folder = config.checkpoint.load, Path(str(config.train.run_dir)) / "checkpoints"
    if load is None and not config.checkpoint.auto_resume:
        return None
    steps = [named_checkpoint(Path(load))] if load is not None else step_entries(folder)[-1:]
    for step in steps:
        if (settings := saved_config(step)) is not None:
            return step, settings
    # its first lines are not enough: the whole manifest, or the error in it
    newest = Path(load) if load is not None else checkpoint_to_resume(folder)
    if newest is None:
        return None
    found, manifest = find_manifest(newest)
    return found, manifest.config
