"""The checks before a run, which need neither process groups nor data, as rows of `CHECKS`.

Every rank runs them on its own and finds the same mistakes. Nothing is written, and only the last
group of rows asks for the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path

import torch

from nanotrain.attention.backends import AttentionChoice, AttentionDevice
from nanotrain.attention.scan_kernels import installed_packages, missing_packages
from nanotrain.checkpoint.stored import require_writable
from nanotrain.comm import device
from nanotrain.comm.generations import is_supervised
from nanotrain.comm.parallel_context import Launch
from nanotrain.config.config import Config
from nanotrain.config.rules.check import check_groups
from nanotrain.config.schema import check_choice
from nanotrain.config.train import TrainConfig
from nanotrain.errors import ConfigError, EnvironmentFault, ErrorCollector
from nanotrain.log import get_logger
from nanotrain.parallel.ep.deep_ep import has_deep_ep
from nanotrain.plan.fitting import require_memory
from nanotrain.plan.plan import check_names
from nanotrain.precision.fp8 import require_fp8
from nanotrain.runs.folder import RunFolder, check_writable
from nanotrain.system import require_open_files
from nanotrain.topology.smaller_world import require_smaller_world
from nanotrain.train.trackers.table import TRACKERS, enabled_trackers

log = get_logger(__name__)


@dataclass(frozen=True)
class Start:
    """Input of a check: the configuration, this rank and its device."""

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

    def among(self, members: Sequence[int]) -> "Start":
        """The start of a run that some ranks have left, with the memory that was free at the start.

        It is not measured again: the processes that stay hold some of it.

        Args:
            members: the ranks that are left, as for `Launch.among`.
        """
        launch = self.launch.among(members)
        if launch is self.launch:
            return self
        available = self.available
        if available is not None and self.device.type == "cpu":  # a share of the host memory
            available = available * self.launch.local_world_size // launch.local_world_size
        start = replace(self, launch=launch)
        vars(start).update(device=self.device, available=available)  # the cached properties
        return start


def run_checks(start: Start) -> None:
    """Run all checks of `CHECKS`.

    Raises:
        ConfigError: all mistakes of a group of rows.
        EnvironmentFault: the machine lacks something.
    """
    for group in CHECKS:
        errors = ErrorCollector()
        for check in group:
            with errors:
                check(start)
        errors.raise_errors()


def check_open_files(start: Start) -> None:
    """Check that the process may open as many files as data workers need."""
    require_open_files(num_workers=start.config.data.num_workers)


def check_replaceable_names(start: Start) -> None:
    """Check that the names of replaceable parts, such as optimizers, exist."""
    check_names(start.config)


def check_ranks_may_leave(start: Start) -> None:
    """Check that the layout has a smaller world, if ranks may leave the run.

    The agent of torchrun lets none leave.
    """
    if start.launch.is_distributed and not is_supervised():
        return
    require_smaller_world(start.config, start.launch.world_size)


def check_folders(start: Start) -> None:
    """Check that every folder of the run can be written; none is created yet.

    One rank per machine writes a file to find out.
    """
    train = start.config.train
    folder = RunFolder.of(start.config)
    check = partial(_check_folder, probes=start.launch.local_rank == 0)
    folder.check_writable(probes=start.launch.local_rank == 0)
    if folder.remote and start.launch.rank == 0:
        require_writable(folder.remote)
    fallback = start.config.checkpoint.save_fallback_dir
    if fallback is not None:
        check(fallback, "the fallback folder", flag="--save-fallback-dir")
    if train.tensorboard and train.tensorboard_dir is not None:
        check(train.tensorboard_dir, "the TensorBoard folder", flag="--tensorboard-dir")
    if train.memory_snapshot_path is not None:
        snapshots = Path(train.memory_snapshot_path).parent
        check(snapshots, "the folder of memory snapshots", flag="--memory-snapshot-path")


def _check_folder(path: str | Path, name: str, *, flag: str, probes: bool) -> None:
    fix = f"choose another folder with {flag}, or free space"
    check_writable(Path(path), name=name, fix=fix, probes=probes)


def check_device(start: Start) -> None:
    """Check that the device exists; GPUs that stay idle are a warning."""
    if start.device.type != "cpu":
        return
    warning = device.describe_unused_gpus(start.config.train.device)
    if warning:
        log.warning("%s", warning)


def check_fp8(start: Start) -> None:
    """Check that the device has the matrix products of the fp8 recipe."""
    require_fp8(start.config.precision.fp8, device.compute_capability(start.device))


def check_attention(start: Start) -> None:
    """Check that every kind of layer has an attention backend; a slow one is a warning."""
    choice = AttentionChoice.of(start.config, AttentionDevice.of(start.device))
    if choice.warning:
        log.warning("%s", choice.warning)


def check_linear_attention(start: Start) -> None:
    """Warn of missing packages with GPU kernels for the model's scans."""
    if start.device.type != "cuda":
        return
    mixers = {mixer for mixer in start.config.model.mixers if mixer}
    missing = missing_packages(mixers, installed=installed_packages())
    for kernel in missing:
        log.warning("%s", kernel.advice)


def check_token_dispatcher(start: Start) -> None:
    """Check that the library that sends tokens to experts is installed."""
    parallel = start.config.parallel
    if parallel.expert_model_parallel_size == 1:
        return
    if parallel.moe_flex_dispatcher_backend == "hybridep":
        log.warning("tokens are sent by all-to-all: HybridEP is not called, deepep is")
    elif parallel.uses_deep_ep and not has_deep_ep():
        raise EnvironmentFault(
            "--moe-flex-dispatcher-backend deepep: the package deep_ep is not installed",
            why="tokens would be sent by its kernels",
            fix="install DeepEP (github.com/deepseek-ai/DeepEP), or leave the flag out and set "
            "--moe-hierarchical-dispatch 1, which sends the same rows by all-to-all",
        )


def check_trackers(start: Start) -> None:
    """Check that the chosen trackers and their packages exist."""
    train = start.config.train
    for name in train.trackers:
        check_choice("trackers", name, known=TRACKERS)
    for name in enabled_trackers(train):
        require_package(name, train)


def require_package(name: str, train: TrainConfig) -> None:
    """Check that the optional package of a tracker is installed.

    Raises:
        ConfigError: it is not.
    """
    row = TRACKERS[name]
    if row.module is None or find_spec(row.module) is not None:
        return
    flag = f"--trackers {name}"
    if row.setting is not None and name not in train.trackers:
        flag = f"--{row.setting.replace('_', '-')} {getattr(train, row.setting)}"
    raise ConfigError(
        f"{flag} needs the package {row.module}",
        why="it is optional and not installed",
        fix=f"pip install {row.requirement or row.module}, or leave the flag out",
    )


def check_settings(start: Start) -> None:
    """Check that no setting contradicts another one or the device."""
    check_groups(start.config, "start", start.device.type)


def check_memory(start: Start) -> None:
    """Check that the run fits into the device's memory, as far as model and layout are known."""
    config = start.config
    is_model_known = config.is_model_known and config.model.vocab_size is not None
    if config.parallel.auto_layout or not is_model_known:
        return
    require_memory(
        config,
        start.launch.world_size,
        device=start.device.type,
        available=start.available,
    )


# Groups of rows: a later group relies on what an earlier one has checked.
CHECKS: tuple[tuple[Callable[[Start], None], ...], ...] = (
    (check_open_files, check_replaceable_names, check_token_dispatcher, check_ranks_may_leave),
    (check_folders,),
    (
        check_device,
        check_fp8,
        check_attention,
        check_linear_attention,
        check_trackers,
        check_settings,
        check_memory,
    ),
)
