"""The checks before a run: what can be found wrong without process groups and data, as rows of
`CHECKS`.

Every rank runs them on its own and finds the same mistakes. Nothing is written, and only the last
group of rows asks for the device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import torch

from nanotrain.attention.backends import AttentionChoice, AttentionDevice
from nanotrain.attention.delta_rule import has_fla
from nanotrain.checkpoint.stored import require_writable
from nanotrain.comm import device
from nanotrain.comm.parallel_context import Launch
from nanotrain.config.config import Config, Fp8Config
from nanotrain.config.layer_kinds import DELTA_RULES
from nanotrain.config.rules.check import check_groups
from nanotrain.errors import ConfigError, EnvironmentFault, ErrorCollector
from nanotrain.log import get_logger
from nanotrain.plan.memory_plan import require_memory
from nanotrain.plan.plan import check_names
from nanotrain.precision.fp8 import RECIPES
from nanotrain.runs.folder import RunFolder, check_writable
from nanotrain.system import require_open_files

log = get_logger(__name__)


@dataclass(frozen=True)
class Start:
    """What a check reads: the configuration, this rank and its device."""

    config: Config
    launch: Launch

    @cached_property
    def device(self) -> torch.device:
        """The device of this rank; the first access touches it."""
        return device.pick_device(self.config.train.device, self.launch.local_rank)

    @cached_property
    def available(self) -> int | None:
        """Bytes of memory for this rank; None if unknown."""
        return device.memory_per_rank(self.device, self.launch.local_world_size)


def check(start: Start) -> None:
    """Run all checks of `CHECKS`.

    Raises:
        ConfigError: all mistakes of a group of rows.
        EnvironmentFault: the machine lacks something.
    """
    for group in CHECKS:
        errors = ErrorCollector()
        for row in group:
            with errors:
                row(start)
        errors.raise_errors()


def check_folders(start: Start) -> None:
    """Every folder that the run writes can be written, by a file of one rank per machine; none is
    created yet.
    """
    train, fallback, folder = (
        start.config.train,
        start.config.checkpoint.save_fallback_dir,
        RunFolder.of(start.config),
    )
    snapshot, probes = train.memory_snapshot_path, start.launch.local_rank == 0
    folder.check_writable(probes=probes)
    if folder.remote and start.launch.rank == 0:
        require_writable(folder.remote)
    folders = {
        ("the fallback folder", "--save-fallback-dir"): fallback,
        ("the TensorBoard folder", "--tensorboard-dir"): train.tensorboard_dir
        if train.tensorboard
        else None,
        ("the folder of memory snapshots", "--memory-snapshot-path"): snapshot
        and Path(snapshot).parent,
    }
    for (name, flag), path in folders.items():
        if path is not None:
            fix = f"choose another folder with {flag}, or free space"
            check_writable(Path(path), name=name, fix=fix, probes=probes)


def check_device(start: Start) -> None:
    """The device is there; GPUs that stay idle are a warning."""
    if start.device.type == "cpu" and (
        warning := device.describe_unused_gpus(start.config.train.device)
    ):
        log.warning("%s", warning)


def check_attention(start: Start) -> None:
    """The device has an attention backend for every kind of layer; a slow one is a warning."""
    if warning := AttentionChoice.of(start.config, AttentionDevice.of(start.device)).warning:
        log.warning("%s", warning)


def check_linear_attention(start: Start) -> None:
    """GPUs have kernels of the gated delta rule; their absence is a warning."""
    if start.device.type == "cuda" and DELTA_RULES & {*start.config.model.mixers} and not has_fla():
        log.warning(
            "the gated delta rule is computed by torch: pip install flash-linear-attention for its kernels"
        )


def check_prometheus(start: Start) -> None:
    """The package of the Prometheus client is installed, if the endpoint is wanted."""
    port = start.config.train.prometheus_port
    if port is not None and find_spec("prometheus_client") is None:
        raise ConfigError(
            f"--prometheus-port {port} needs the package prometheus_client",
            why="it is optional and not installed",
            fix="pip install 'nanotrain[prometheus]', or leave the flag out",
        )


def check_settings(start: Start) -> None:
    """No setting contradicts another one or the device."""
    check_groups(start.config, "start", start.device.type)


def check_memory(start: Start) -> None:
    """The run fits into the memory of the device, as far as its model is known."""
    is_chosen = not start.config.parallel.auto_layout
    if is_chosen and start.config.model.vocab_size is not None and start.config.is_model_known:
        world_size = start.launch.world_size
        require_memory(
            start.config, world_size, device=start.device.type, available=start.available
        )


def require_fp8(fp8: Fp8Config | None, capability: tuple[int, int] | None) -> None:
    """Check that a device has the matrix products of the recipe.

    Args:
        fp8: section of the configuration; None without fp8.
        capability: CUDA compute capability; None on a CPU, which emulates every recipe.

    Raises:
        EnvironmentFault: the GPU lacks them.
    """
    if fp8 is None or capability is None:
        return
    recipe, found = RECIPES[fp8.recipe], ".".join(map(str, capability))
    if recipe.capability <= capability <= (recipe.last_capability or capability):
        return
    first = ".".join(map(str, recipe.capability))
    needed = f"{first} or newer" if recipe.last_capability is None else f"{recipe.capability[0]}.x"
    fitting = [
        name
        for name, row in RECIPES.items()
        if row.capability <= capability <= (row.last_capability or capability)
        and (fp8.format == "e4m3" or not row.e4m3_only)
    ]
    raise EnvironmentFault(
        f"fp8_recipe {fp8.recipe} on a GPU of compute capability {found}",
        why=f"its products need compute capability {needed}",
        fix=f"set --fp8-recipe {' or '.join(fitting)}" if fitting else "leave out --fp8-format",
    )


# Groups of rows: a later group relies on what an earlier one has checked.
CHECKS: tuple[tuple[Callable[[Start], None], ...], ...] = (
    (
        lambda start: require_open_files(num_workers=start.config.data.num_workers),
        lambda start: check_names(start.config),
    ),
    (check_folders,),
    (
        check_device,
        lambda start: require_fp8(
            start.config.precision.fp8, device.compute_capability(start.device)
        ),
        check_attention,
        check_linear_attention,
        check_prometheus,
        check_settings,
        check_memory,
    ),
)
