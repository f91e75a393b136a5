"""States of the programs, saved and opened as the import does."""

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from nanotrain.config.flags import parse
from nanotrain.interop.dcp.import_run import ImportedRun, describe, open_run
from nanotrain.interop.dcp.stored import StoredRun
from nanotrain.interop.dcp.tensors import TorchDistFolder
from tests.interop.dcp.programs import CASES, HEADS_FLAG, SAVED, Training


@cache
def state_of(name: str) -> dict[str, Any]:
    """The flat state of a program after a step, saved as that of SAVED steps."""
    training = Training(CASES[name])
    training.step(0)
    flat = {}
    for key, value in CASES[name].save(training, SAVED).items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": item for inner, item in value.items()}
        else:
            flat[key] = value
    return flat


def save_state(folder: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that there are no process groups
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def open_state(
    folder: Path, state: dict[str, Any], flags: str = HEADS_FLAG, *, optim: bool = True
) -> ImportedRun:
    save_state(folder, state)
    run = StoredRun(TorchDistFolder(folder))
    return open_run(run, line=parse(flags.split()), model_folder=None, optim=optim)


def lines_of(folder: Path, state: dict[str, Any], flags: str = HEADS_FLAG) -> str:
    return "\n".join(describe(open_state(folder, state, flags)))
