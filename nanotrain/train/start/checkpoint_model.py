"""`--use-checkpoint-args`: the model section from the checkpoint that a run starts from, as in Megatron-LM."""

from dataclasses import replace
from pathlib import Path

from nanotrain.checkpoint.store import checkpoint_to_resume, find_manifest
from nanotrain.config.config import Config
from nanotrain.config.rules.unused import reset_unused
from nanotrain.config.schema import KEYS, config_from_dict, flat_values, plain, value_of, with_values
from nanotrain.errors import ErrorCollector
from nanotrain.hf.canonical import free_keys
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
    checkpoint = _find(config)
    if checkpoint is None:
        log.info("use_checkpoint_args: there is no checkpoint yet, the model is that of the command line")
        _require_effect(config, explicit)
        return config
    step, manifest = find_manifest(checkpoint)
    saved = config_from_dict(manifest.config)
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


def _find(config: Config) -> Path | None:
    """The checkpoint of `--load`, otherwise the newest of the run folder."""
    if config.checkpoint.load is not None:
        return Path(config.checkpoint.load)
    assert config.train.run_dir, "load sets a run folder for every run"
    return checkpoint_to_resume(Path(config.train.run_dir) / "checkpoints") if config.checkpoint.auto_resume else None
