"""Checks of a command before it starts, which import torch only where they need it."""

from collections.abc import Mapping, Sequence

from nanotrain.config.config import Config
from nanotrain.config.rules.check import OPEN_NAMES
from nanotrain.config.schema import ENTRIES, value_of
from nanotrain.errors import ConfigError
from nanotrain.system import importing_torch


def check_names(config: Config) -> None:
    """Check the names of implementations that are not the defaults, whose tables need torch.

    Raises:
        ConfigError: unknown names.
    """
    names = [ENTRIES[name] for name in OPEN_NAMES]
    if any(value_of(config, entry.key) != entry.default for entry in names):
        with importing_torch():
            from nanotrain.plan import plan

        plan.check_names(config)


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
