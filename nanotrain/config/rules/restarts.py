"""Rules of restarts in place."""

from nanotrain.config.rules.settings import Errors, Settings
from nanotrain.errors import ConfigError


def check_inprocess_restart(c: Settings) -> Errors:
    """A restart in place goes on from a complete checkpoint of the run itself."""
    if not c.train.inprocess_restart:
        return
    if not c.checkpoint.save:
        yield ConfigError(
            "inprocess_restart with save false",
            why="a restart goes on from the newest checkpoint of the run",
            fix="leave --inprocess-restart or --no-save out",
        )
    if not c.checkpoint.save_optim:
        yield ConfigError(
            "inprocess_restart without save_optim",
            why="a restart needs the state of the optimizer",
            fix="leave --inprocess-restart or --no-save-optim out",
        )
    if not c.checkpoint.auto_resume:
        yield ConfigError(
            "inprocess_restart with auto_resume false",
            why="a restart goes on from the newest checkpoint of the run folder",
            fix="leave --inprocess-restart or --no-auto-resume out",
        )
    if c.checkpoint.load is not None and not c.checkpoint.finetune:
        yield ConfigError(
            f"inprocess_restart with load {c.checkpoint.load}",
            why="a restart would read that checkpoint again, not the newest of this run",
            fix="leave --inprocess-restart or --load out",
        )


def check_min_ranks(c: Settings) -> Errors:
    """A run that goes on with fewer ranks keeps its batch and its layout."""
    if not c.train.inprocess_restart or c.train.inprocess_min_ranks is None:
        return
    if c.train.global_batch_size is None:
        yield ConfigError(
            "inprocess_min_ranks has no global_batch_size",
            why="without one the samples of a step follow from the number of ranks",
            fix="set --global-batch-size",
        )
    if c.parallel.auto_layout:
        yield ConfigError(
            "inprocess_min_ranks with auto_layout",
            why="fewer ranks keep the layout, and the search may choose another one for them",
            fix="leave --auto-layout out, and name the sizes that it chooses",
        )
