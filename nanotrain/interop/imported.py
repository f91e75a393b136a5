"""What a checkpoint has that was imported from a run of another program.

files_of       the files beside its tensors: settings, and what was imported
counters_of    the counters of the run, as a save of ours has them
number_of      a whole number of another program, which may be in a tensor or a float
StateError     the state of an optimizer cannot be imported, the weights can
naming_flag    errors of a block name the flag of the program for weights alone
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from nanotrain.config.config import Config
from nanotrain.config.load import to_yaml
from nanotrain.errors import CheckpointError
from nanotrain.untrusted import whole_number

CONFIG_FILE = "config.yaml"  # the settings of the run, a valid +config
LINES_FILE = "import.txt"  # what was taken, changed, guessed and left out
# a loss scale that does not change, as `LossScale.state_dict`
CONSTANT_SCALE = {"scale": 1.0, "is_dynamic": False, "clean_steps": 0, "overflows_left": 1}


class StateError(CheckpointError):
    """State of an optimizer that cannot be imported, where the weights alone can.

    Args:
        what, why: as in every error.
        fix: what can be done instead.
    """

    def with_flag(self, flag: str) -> CheckpointError:
        """The error with the flag that imports the weights alone."""
        cure = f"import the weights alone, with {flag}"
        fix = f"{self.fix}, or {cure}" if self.fix else cure
        return CheckpointError(self.what, why=self.why, fix=fix)


@contextmanager
def naming_flag(flag: str) -> Iterator[None]:
    """Errors of the block about the state of an optimizer name the flag for weights alone."""
    try:
        yield
    except StateError as error:
        raise error.with_flag(flag) from None


def files_of(config: Config, lines: Sequence[str]) -> dict[str, str]:
    """The files beside the tensors, by name.

    Args:
        config: the settings of the run.
        lines: what was imported.
    """
    return {CONFIG_FILE: to_yaml(config), LINES_FILE: "\n".join(lines) + "\n"}


def counters_of(
    config: Config, *, step: int, samples: int, num_updates: int, loss_scale: Mapping[str, Any]
) -> dict[str, Any]:
    """The counters of an imported run, as a checkpoint of nanotrain stores them.

    Args:
        config: the settings of the run.
        step: number of its newest step.
        samples: samples that it has trained on.
        num_updates: updates of its optimizer.
        loss_scale: state of its loss scale, as `LossScale.state_dict`.
    """
    return {
        "train": {
            "step": step,
            "consumed_samples": samples,
            "consumed_tokens": samples * config.data.seq_length,
            "curve_batch_size": config.train.global_batch_size or config.train.micro_batch_size,
        },
        "optimizer": {"num_updates": num_updates, "loss_scale": dict(loss_scale)},
    }


def plain_number(value: Any, name: str) -> Any:
    """The value of a tensor with one element; other values as they are.

    Raises:
        ValueError: a tensor of several values.
    """
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(f"{name} is a tensor of {value.numel():,} values, it must have one")
    return value.item()


def number_of(value: Any, name: str, *, low: int = 0) -> int:
    """A whole number of at least `low`, which may be in a tensor or a float.

    Raises:
        ValueError: it is none.
    """
    value = plain_number(value, name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return whole_number(value, name, low=low)
