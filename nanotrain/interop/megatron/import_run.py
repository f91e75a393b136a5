"""Write a checkpoint of Megatron-LM as one of nanotrain, with the state of the optimizer.

    import_megatron   the folder, and the lines that say what it has

The result is an ordinary checkpoint: any layout loads it, and the next step is the one that
Megatron-LM would have taken. One chunk is in memory at a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from nanotrain.checkpoint.manifest import Manifest
from nanotrain.checkpoint.rewrite import Shapes, write_checkpoint
from nanotrain.checkpoint.write import ChunkWrite
from nanotrain.config.config import Config
from nanotrain.config.schema import to_dict, with_values
from nanotrain.interop.dcp.tensors import TensorFolder, TorchDistFolder
from nanotrain.interop.imported import (
    CONSTANT_SCALE,
    StateError,
    counters_of,
    files_of,
    number_of,
)
from nanotrain.interop.megatron.arguments import ImportedConfig, config_of_arguments, literal_text
from nanotrain.interop.megatron.buckets import MAIN
from nanotrain.interop.megatron.folder import (
    CommonState,
    find_step_folder,
    read_common_state,
    require_torch_dist,
)
from nanotrain.interop.megatron.legacy import LegacyFolder, is_legacy
from nanotrain.interop.megatron.main_params import require_main_of_weights
from nanotrain.interop.megatron.optimizer_state import (
    MOMENTS,
    Counters,
    State,
    find_state,
    read_counters,
)
from nanotrain.interop.megatron.placement import Placement, embedding_rows
from nanotrain.log import progress
from nanotrain.quantities import count_of
from nanotrain.untrusted import finite_number, plain_text, whole_number

WEIGHTS = "model/"  # beginning of the names of main parameters
STATE = "optimizer/"


@dataclass(frozen=True)
class MegatronCheckpoint:
    """An opened checkpoint of Megatron-LM."""

    folder: Path
    common: CommonState
    imported: ImportedConfig
    placement: Placement
    state: State | None  # None: weights alone
    counters: Counters

    @property
    def shapes(self) -> Shapes:
        """Shape and data type of every tensor of our checkpoint."""
        shapes = {}
        for name, size in self.placement.sizes.items():
            shapes[name] = (size, "fp32")
            if self.state is None or not name.startswith(WEIGHTS):
                continue
            for moment in MOMENTS:
                shapes[f"{STATE}{moment}/{name.removeprefix(WEIGHTS)}"] = (size, "fp32")
        return shapes

    def read(self, chunk: ChunkWrite) -> Tensor:
        """The values of a chunk of our checkpoint."""
        name = chunk.source.name
        if self.state is None or not name.startswith((WEIGHTS, STATE)):
            return self.placement.read(name, chunk.box).float()
        kind = MAIN
        if name.startswith(STATE):
            kind, _, parameter = name.removeprefix(STATE).partition("/")
            name = f"{WEIGHTS}{parameter}"
        read = partial(self.state.read, kind=kind)
        return self.placement.read(name, chunk.box, read=read).float()


@progress("importing")
def import_megatron(path: Path, output: Path, *, optim: bool = True) -> str:
    """Write a checkpoint of Megatron-LM as one of nanotrain; returns lines on its content.

    Args:
        path: a folder of --save of Megatron-LM, for its newest step, or one of its steps.
        output: the folder to write; must not exist or be empty.
        optim: whether the state of the optimizer and the counters of the run are read too.

    Raises:
        CheckpointError: a model, optimizer or format that is not read, damaged files, or `output`
            has files.
        EnvironmentFault: `output` cannot be written; nothing is left there.
    """
    opened = open_megatron(path, optim=optim)
    has_state = opened.state is not None
    step = opened.common.step if has_state else 0
    manifest = Manifest(
        step,
        {},
        {},
        objects=objects_of(opened) if has_state else {},
        config=to_dict(opened.imported.config),
        topology={},
    )
    num_weights = len(opened.placement.sizes)
    lines = [f"{output}: {count_of(num_weights, 'tensor')} in fp32, from {opened.folder}"]
    lines += describe(opened)
    write_checkpoint(
        output,
        opened.shapes,
        read=opened.read,
        manifest=manifest,
        files=files_of(opened.imported.config, lines),
    )
    return "\n".join(lines)


def open_megatron(path: Path, *, optim: bool = True) -> MegatronCheckpoint:
    """Open a checkpoint of Megatron-LM and find the place of everything in it; errors as above."""
    folder = find_step_folder(path)
    tensors, common = open_folder(folder)
    imported = config_of_arguments(common.arguments, num_rows=embedding_rows(tensors))
    placement = Placement(imported.config.model, tensors)
    state = None
    if optim:
        state = find_state(tensors, placement, arguments=common.arguments)
    counters = Counters()
    if state is not None:
        require_adam(imported.config)
        require_main_of_weights(placement, state)
        counters = read_counters(tensors, common)
        config = with_schedule(imported.config, counters.scheduler)
        imported = ImportedConfig(config, imported.notes)
    return MegatronCheckpoint(folder, common, imported, placement, state, counters)


def open_folder(folder: Path) -> tuple[TensorFolder, CommonState]:
    """The tensors of a step and its common state, in either format."""
    if is_legacy(folder):
        legacy = LegacyFolder(folder)
        return legacy, legacy.common
    require_torch_dist(folder)
    tensors = TorchDistFolder(folder)
    return tensors, read_common_state(folder, tensors=tensors)


def require_adam(config: Config) -> None:
    """Check that the state is of Adam.

    Raises:
        StateError: it is of another optimizer.
    """
    if config.optim.optimizer != "adam":
        raise StateError(
            f"the optimizer of the checkpoint is {plain_text(config.optim.optimizer)}",
            why="the state of adam is imported",
        )


def with_schedule(config: Config, scheduler: Mapping[str, Any]) -> Config:
    """The configuration with the schedules that the run was in, in samples.

    Raises:
        StateError: a value that is no schedule.
    """
    if not scheduler:
        return config
    try:
        values = {
            "optim.lr": finite_number(scheduler["max_lr"], "max_lr"),
            "optim.min_lr": finite_number(scheduler["min_lr"], "min_lr"),
            "optim.lr_decay_style": literal_text(scheduler["lr_decay_style"]),
            "optim.lr_decay_samples": number_of(scheduler["lr_decay_steps"], "lr_decay_steps"),
            "optim.lr_decay_iters": None,
            "optim.lr_warmup_iters": 0,
        }
        return with_values(config, values | warmup_of(scheduler))
    except (LookupError, ValueError) as error:
        raise StateError(
            "the schedule of the checkpoint cannot be read",
            why=str(error),
        ) from None


def warmup_of(scheduler: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the warmup from its length in samples.

    Megatron-LM's --lr-warmup-fraction can make the length a float. Such a length becomes a fraction
    of the schedule again.

    Raises:
        LookupError, ValueError: the scheduler has no such length.
    """
    steps = finite_number(scheduler["lr_warmup_steps"], "lr_warmup_steps")
    samples = None
    fraction = None
    if steps.is_integer():
        samples = int(steps)
    else:
        length = number_of(scheduler["lr_decay_steps"], "lr_decay_steps")
        if steps > length:
            raise ValueError(f"lr_warmup_steps is {steps:g}, more than lr_decay_steps, {length:,}")
        fraction = steps / length
    return {"optim.lr_warmup_samples": samples, "optim.lr_warmup_fraction": fraction}


def objects_of(opened: MegatronCheckpoint) -> dict[str, Any]:
    """The counters of the run, as a save of nanotrain has them."""
    precision = opened.imported.config.precision
    constant = CONSTANT_SCALE | {
        "scale": precision.loss_scale or 1.0,
        "overflows_left": precision.hysteresis,
    }
    return counters_of(
        opened.imported.config,
        step=opened.common.step,
        samples=consumed_samples(opened),
        num_updates=opened.counters.num_updates,
        loss_scale=opened.counters.loss_scale or constant,
    )


def consumed_samples(opened: MegatronCheckpoint) -> int:
    """Samples that the run has trained on.

    Raises:
        StateError: no whole number.
    """
    try:
        return whole_number(opened.common.arguments.get("consumed_train_samples", 0), "it")
    except ValueError as error:
        raise StateError(
            "consumed_train_samples of the checkpoint cannot be read",
            why=plain_text(str(error)),
        ) from None


def describe(opened: MegatronCheckpoint) -> list[str]:
    """One line for each thing that was imported, changed or left out."""
    lines = []
    if opened.state is None:
        lines.append("optimizer: none; the next run begins at step 0")
    else:
        samples = consumed_samples(opened)
        updates = count_of(opened.counters.num_updates, "update")
        lines.append(
            f"optimizer: main parameters and moments after {updates}, step {opened.common.step}, "
            f"{count_of(samples, 'sample')} consumed"
        )
        position = opened.counters.scheduler.get("num_steps", samples)
        if position != samples:
            lines.append(
                f"the schedules of Megatron-LM are at sample {position:,}; here they follow the "
                f"{samples:,} consumed samples"
            )
    return lines + opened.imported.notes
