"""Recordings of torch, on `--profile-ranks` or on the ranks of one data-parallel replica.

ProfileHook       profiler traces of some steps, in `profile/` of the run folder, one file per rank
memory_snapshot   the history of GPU memory in `--memory-snapshot-path`, also of a run that ends for
                  lack of memory

Without `--profile-ranks` small runs record all ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import profile

from nanotrain.comm.device import start_memory_history, write_memory_history
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import TrainConfig
from nanotrain.log import get_logger
from nanotrain.runs.files import free_space
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.run import Run
from nanotrain.train.step_report import StepReport

log = get_logger(__name__)
# ranks of a run that are all recorded; a trace has tens of MB, and replicas do the same
MAX_RECORDED = 64


class ProfileHook(Hook):
    """Profiles steps `profile_step_start` to `profile_step_end`, counted from 1, both included."""

    def __init__(self) -> None:
        self._profiler: profile | None = None

    def before_training(self, run: Run) -> None:
        """Start the profiler if the first step is profiled."""
        first = run.state.step + 1
        last = run.config.train.profile_step_end
        if first > last and run.context.control.is_first:
            log.warning(
                "no profile: the run starts at step %d, after --profile-step-end %d", first, last
            )
        self._start_before(run, step=first)

    def after_step(self, run: Run, report: StepReport) -> None:
        if report.step == run.config.train.profile_step_end:
            self._write(run)
        self._start_before(run, step=report.step + 1)

    def after_training(self, run: Run) -> None:
        self._write(run)

    def close(self, *, failed: bool) -> None:
        if self._profiler is not None:
            # after an error; Python crashes at exit while a profiler runs (torch 2.13)
            self._profiler.stop()

    def _start_before(self, run: Run, *, step: int) -> None:
        """Start the profiler before the first profiled step."""
        train = run.config.train
        is_profiled = train.profile_step_start <= step <= train.profile_step_end
        if self._profiler is None and is_profiled and is_recorded(train, run.context):
            # records the CPU, and the GPU if there is one
            self._profiler = profile(record_shapes=True)
            self._profiler.start()

    def _write(self, run: Run) -> None:
        """Stop the profiler and write its Chrome trace; a failure is a warning."""
        profiler = self._profiler
        if profiler is None:
            return
        # an all-gather that outlives its profiler corrupts the heap (torch 2.13)
        run.wait_for_params()
        profiler.stop()
        self._profiler = None
        name = f"step-{run.state.step:08d}-rank-{run.context.rank:05d}.json"
        path = run.folder.path / "profile" / name
        try:
            path.parent.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            log.warning("no profile: %s", error)
            return
        if path.is_file():
            log.info(
                "wrote profile %s; `nanotrain timeline %s` draws its last step",
                path,
                run.folder.path,
            )
            return
        # torch raises nothing where the disk is full and leaves this file
        path.with_name(f"{path.name}.tmp").unlink(missing_ok=True)
        log.warning("no profile: %s cannot be written: %s", path, free_space(path))


def is_recorded(train: TrainConfig, context: ParallelContext) -> bool:
    """Whether this rank is one of `--profile-ranks`."""
    if train.profile_ranks:
        return context.rank in train.profile_ranks
    return context.topology.world_size <= MAX_RECORDED or context.group("dp").is_first


@contextmanager
def memory_snapshot(train: TrainConfig, context: ParallelContext) -> Iterator[None]:
    """Record the GPU allocations of this rank in the block, and write them after it or an error."""
    if train.memory_snapshot_path is None or not is_recorded(train, context):
        yield
        return
    path = Path(train.memory_snapshot_path)
    path = path.with_name(f"{path.stem}-rank-{context.rank:05d}{path.suffix}")
    start_memory_history(context.device)
    try:
        yield
    finally:
        try:
            write_memory_history(path)
            log.info("wrote memory snapshot %s; https://pytorch.org/memory_viz draws it", path)
        except (OSError, RuntimeError) as error:
            log.warning("no memory snapshot: %s", error)
