"""Takes requests of `nanotrain relayout` at logged steps, on all ranks."""

from nanotrain.checkpoint.all_ranks import run_on_first
from nanotrain.errors import ConfigError, NanotrainError
from nanotrain.log import get_logger
from nanotrain.plan.plan import plan_run
from nanotrain.runs.relayout import (
    LayoutRequest,
    read_request,
    remove_request,
    require_change,
    with_layout,
)
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.resume.in_place import require_room
from nanotrain.train.run import Run, Successor
from nanotrain.train.step_report import StepReport

log = get_logger(__name__)


class RelayoutHook(Hook):
    """Ends the run after a logged step where another layout is asked for; its successor follows.

    A request that cannot be carried out is one warning, and the run goes on.
    """

    def after_step(self, run: Run, report: StepReport) -> None:
        """Take a request at a logged step, and end the run for its successor."""
        if not report.is_logged:
            return
        try:
            request = run_on_first(run.context.control, lambda: _take_request(run))
            if request is None:
                return
            successor = plan_successor(run, request)
        except NanotrainError as error:  # the same on every rank, whose steps go on
            if run.context.control.is_first:
                log.warning("no relayout: %s", error)
            return
        log.info("relayout after step %d: %s", run.state.step, " ".join(request.arguments))
        run.stop.successor = successor


def _take_request(run: Run) -> LayoutRequest | None:
    """The request in the run folder, which is removed; on the first rank."""
    request = read_request(run.folder.path)
    if request is not None:
        remove_request(run.folder.path, request)
    return request


def plan_successor(run: Run, request: LayoutRequest) -> Successor:
    """The run in the layout of a request; every rank finds the same.

    Raises:
        ConfigError: the layout does not fit the model, the ranks or their memory, is the one of the
            run, or no step is left.
        TopologyError: the ranks cannot form the groups.
    """
    num_ranks = run.context.topology.world_size
    ranks = request.ranks or num_ranks
    train = run.config.train
    if run.state.step >= train.train_iters:
        raise ConfigError(
            f"step {run.state.step:,} of {train.train_iters:,} is done",
            why="no step is left for another layout",
            fix="start the run again with a larger --train-iters and the layout",
        )
    if ranks > num_ranks:
        raise ConfigError(
            f"--ranks {ranks}",
            why=f"the job has {num_ranks}, and no process is started",
            fix="stop it, and start it on more ranks: a checkpoint loads in any layout",
        )
    config = with_layout(run.config, request.arguments, world_size=ranks)
    require_change(run.config, config, ranks=(num_ranks, ranks))
    plan_run(config, ranks, rank=0)
    require_room(run, config, world_size=ranks)
    return Successor(config, ranks, {"arguments": request.arguments, "request": request.number})
