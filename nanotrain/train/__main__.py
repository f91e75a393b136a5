"""One rank of `nanotrain train` or `torchrun -m nanotrain.train`: from the command line to the end of training.

    argv -> Config      without torch, so that mistakes show at once
         -> RunInputs   datasets, tokenizer, run folder, checkpoint; completes the config
         -> Plan        groups, parameters, buffers, pipeline schedule of this rank; pure
         -> Run         on the device, with process groups
         -> Trainer.fit

A user error is one message and exit code 2, without a traceback. Nearly all of them are raised by every rank, so local
rank 0 prints first and the other ranks wait: torchrun ends them once it has exited. A rank that is still alive after
the wait is the only one with the error and prints it.
"""

import logging
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nanotrain.config.config import Config
from nanotrain.config.derive import is_model_known
from nanotrain.config.flags import parse
from nanotrain.config.load import Loaded, load_line, load_object, reply
from nanotrain.config.validate import validate_for_world
from nanotrain.errors import (
    INTERRUPTED,
    EnvironmentFault,
    ErrorCollector,
    LocalFault,
    NanotrainError,
    ReportedFault,
    report,
)
from nanotrain.host import core_limit, usable_cores
from nanotrain.output import guard_output, open_closed_streams, outlive_output
from nanotrain.runs.folder import RunFolder, check_writable
from nanotrain.runs.lock import lock_run
from nanotrain.runs.open_files import require_open_files
from nanotrain.start_up import end_without_collection, importing_torch
from nanotrain.watch.launcher import end_with_launcher

if TYPE_CHECKING:
    from nanotrain.report.history import RunHistory

# Ranks reach the same error at different times: imports alone differ by a second on a busy machine. If a silent rank
# exited first, torchrun would end local rank 0 before it prints. When rank 0 has exited, torchrun ends those that wait.
# 4 s were too short where two worlds shared two cores.
WAIT_FOR_FIRST_RANK_S = 10.0

# Spinning idle OpenMP threads take cores from the other ranks: measured 10x on a busy machine. libgomp reads this when
# torch is imported, so it is set before any import of torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if core_limit() is not None:  # OpenMP starts as many threads as the machine has cores, and a container may have fewer
    os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))
# torch's profiler prints a line for its own tracing tools whenever it starts and stops; its errors are exceptions.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def main(argv: Sequence[str] | None = None) -> int:
    """Train with the settings of a command line.

    Args:
        argv: arguments after the program name; None for `sys.argv[1:]`.

    Returns:
        The exit code: 0 on success, 2 for a user error, 130 for an interrupt.
    """
    arguments = sys.argv[1:] if argv is None else argv
    is_first_local = os.environ.get("LOCAL_RANK", "0") == "0"
    end_with_launcher(os.environ)
    try:
        line = parse(arguments)
        text = reply(line)
        if text is not None:
            if is_first_local:
                print(text)
            return 0
        loaded = load_line(line)
        world_size = _world_size(os.environ.get("WORLD_SIZE", "1"))
        validate_for_world(loaded.config, world_size, expected_dp=loaded.data_parallel_size)
        train(loaded, world_size)
    except NanotrainError as error:
        if not is_first_local and not isinstance(error, LocalFault | ReportedFault):
            time.sleep(WAIT_FOR_FIRST_RANK_S)
        return report(error)
    except KeyboardInterrupt:  # before the first step, or the second Ctrl-C: the trainer handles the first
        if is_first_local:
            print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def train_config(config: Config) -> "RunHistory":
    """Train with a configuration made in Python, in this process: what `nanotrain.train(config)` calls.

    Under torchrun this process is one rank. The run is that of a command line with the same settings.

    Returns:
        What the run wrote into its folder: metrics by column, checkpoints, samples.

    Raises:
        NanotrainError: what a command line would report.
    """
    from nanotrain.report.history import RunHistory

    loaded = load_object(config)
    world_size = _world_size(os.environ.get("WORLD_SIZE", "1"))
    validate_for_world(loaded.config, world_size)
    train(loaded, world_size)
    return RunHistory.read(Path(str(loaded.config.train.run_dir)))


def train(loaded: Loaded, world_size: int) -> None:
    """Train a validated configuration on this rank.

    Args:
        loaded: configuration and its origins.
        world_size: ranks of the run.
    """
    require_open_files(num_workers=loaded.config.data.num_workers)
    with importing_torch():
        import nanotrain.train.start.launch  # noqa: F401  for `_train_in_folder`
        from nanotrain.attention.backends import AttentionChoice, AttentionDevice
        from nanotrain.comm.device import compute_capability, describe_unused_gpus, memory_per_rank, pick_device
        from nanotrain.comm.parallel_context import Launch
        from nanotrain.log import get_logger, start_logging
        from nanotrain.memory.offload import require_gpu
        from nanotrain.optim import offload
        from nanotrain.train.fp8 import require_fp8
        from nanotrain.train.hooks.prometheus import require_client
        from nanotrain.train.plans.memory_plan import require_memory
        from nanotrain.train.plans.plan import check_names
        from nanotrain.train.start.inputs import require_corpus

    launch, config = Launch.of(os.environ), loaded.config
    is_first = launch.rank == 0
    start_logging(is_first=is_first, level=logging.INFO if is_first else logging.ERROR)  # all ranks log the same
    for note in loaded.notes:
        get_logger("nanotrain.train").info("%s", note)
    check_names(config)  # before the quick start trains a tokenizer
    folder = _check_folders(config)
    device = pick_device(config.train.device.value, launch.local_rank)
    if warning := describe_unused_gpus(config.train.device.value):
        get_logger("nanotrain.train").warning("%s", warning)
    available = memory_per_rank(device, launch.local_world_size)
    errors = ErrorCollector()
    with errors:
        require_fp8(config.precision, compute_capability(device))
    if warning := AttentionChoice.of(config, AttentionDevice.of(device)).warning:
        get_logger("nanotrain.train").warning("%s", warning)
    with errors:
        require_corpus(config.data)
    with errors:
        require_client(config.train)
    if config.optim.optimizer_cpu_offload:
        with errors:
            offload.require_gpu(device.type)
    if config.memory.cpu_offloading:
        with errors:
            require_gpu(device.type)
    if config.model.vocab_size is not None and is_model_known(config):
        with errors:
            require_memory(config, world_size, device=device.type, available=available)
    errors.raise_errors()
    folder.require_writable()
    if is_first:  # the others would race with it for the lock file
        folder.require_own()
    with lock_run(folder.path) if is_first else nullcontext():
        _train_in_folder(loaded, world_size, launch=launch, device_type=device.type, available=available)


def _check_folders(config: Config) -> RunFolder:
    """The run folder, after a check that every folder that the run writes can be written; none is created yet.

    Raises:
        EnvironmentFault: one cannot; on every rank whose machine cannot write it.
    """
    assert config.train.run_dir, "load sets a run folder for every run"
    folder = RunFolder(Path(config.train.run_dir))
    folder.check_writable()
    if config.checkpoint.save_fallback_dir is not None:
        fix = "choose another folder with --save-fallback-dir, or free space"
        check_writable(Path(config.checkpoint.save_fallback_dir), name="the fallback folder", fix=fix)
    if config.train.tensorboard and config.train.tensorboard_dir is not None:
        fix = "choose another folder with --tensorboard-dir, or free space"
        check_writable(Path(config.train.tensorboard_dir), name="the TensorBoard folder", fix=fix)
    return folder


def _train_in_folder(loaded: Loaded, world_size: int, *, launch: Any, device_type: str, available: int | None) -> None:
    """Open the inputs, plan and train; the job holds the lock of its run folder. `launch` is a `comm` Launch."""
    from nanotrain.comm.parallel_context import ParallelContext
    from nanotrain.log import get_logger, start_logging
    from nanotrain.train.plans.memory_plan import require_memory
    from nanotrain.train.plans.plan import plan_run
    from nanotrain.train.start.inputs import open_inputs
    from nanotrain.train.start.launch import run_training

    outlive_output("training goes on, its steps are in metrics.jsonl")
    config, inputs = open_inputs(loaded, reads_checkpoint=launch.local_rank == 0)
    memory = require_memory(config, world_size, device=device_type, available=available)
    get_logger("nanotrain.train").info(
        "%s", memory.table(available, pp_size=config.parallel.pipeline_model_parallel_size)
    )
    plan = plan_run(config, world_size, rank=launch.rank)
    timeout_s = config.parallel.distributed_timeout_minutes * 60
    with ParallelContext.start(plan.topology, device=config.train.device.value, timeout_s=timeout_s) as context:
        start_logging(coordinates=context.coords_text, is_first=context.rank == 0)
        run_training(plan, inputs, context=context, planned=memory)


def _world_size(text: str) -> int:
    if not re.fullmatch("[0-9]{1,7}", text) or int(text) < 1:
        raise EnvironmentFault(f"WORLD_SIZE is {text!r}", why="it is the number of ranks", fix="start with torchrun")
    return int(text)


def _end(run: Callable[[], int]) -> NoReturn:
    """End this process with the exit code of `run`.

    After an error of one of several ranks it ends at once: the interpreter's own end destroys process groups, which
    waits for peers that may be inside a collective.
    """
    try:
        code = run()
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        code = 1
    if code and os.environ.get("WORLD_SIZE", "1") != "1":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    end_without_collection()
    sys.exit(code)


def run_program(argv: Sequence[str] | None = None) -> NoReturn:
    """Train with the settings of a command line as all that this process does; arguments as for `main`."""
    open_closed_streams()
    guard_output()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # it would end this process before the trainer handles it
    _end(partial(main, argv))


if __name__ == "__main__":
    run_program()
