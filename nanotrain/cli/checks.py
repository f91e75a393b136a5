"""Checks of a command before it starts, which import torch only where they need it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from nanotrain.config.config import Config
from nanotrain.config.rules.check import OPEN_NAMES
from nanotrain.config.schema import ENTRIES, value_of
from nanotrain.errors import ConfigError
from nanotrain.spec.shape import ModelShape
from nanotrain.spec.trainable import trained_set
from nanotrain.system import importing_torch


def check_names(config: Config) -> None:
    """Check the names of implementations, and patterns of names of parameters.

    Tables of implementations need torch, so names that are the defaults are not looked up.

    Raises:
        ConfigError: unknown names, or mistakes in the patterns.
    """
    names = [ENTRIES[name] for name in OPEN_NAMES]
    if any(value_of(config, entry.key) != entry.default for entry in names):
        with importing_torch():
            from nanotrain.plan import plan

        plan.check_names(config)
    if config.is_model_known and (config.optim.freeze or config.optim.train_only):
        # names of parameters do not depend on the number of tokens, which may be unknown
        model = replace(config.model, vocab_size=config.model.vocab_size or 1)
        trained_set(config, ModelShape.of(model))


def refuse_inside_torchrun(
    name: str, *, options: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Check that this process is no rank that torchrun started."""
    if "TORCHELASTIC_RUN_ID" in environment:
        raise ConfigError(
            f"{options[0]} inside torchrun",
            why="this process is a rank that torchrun started, and every rank would start ranks "
            "of its own",
            fix=f"leave it out, or start `nanotrain {name}` without torchrun",
        )
