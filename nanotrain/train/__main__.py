"""`torchrun -m nanotrain.train ...`: from the command line to the end of training.

    argv -> Loaded     the configuration; no torch yet, so mistakes show at once
         -> Plan       data, model, folders, checkpoint; no device yet, the same on every rank
         -> Run        on the device, among the other ranks
         -> fit

A mistake is one message and exit code 2, without a traceback. What every rank finds alike, the first rank of each
machine prints; what only one rank meets, that rank prints.
"""

import os
import sys
from collections.abc import Sequence

from nanotrain.config.load import Loaded, answer, load
from nanotrain.config.validate import validate_for_world
from nanotrain.errors import EnvironmentFault, NanotrainError, report

# Idle OpenMP threads that spin take the cores from the other ranks: measured 10x on a busy machine. Read by libgomp
# when torch is imported, so it stands before every import that brings torch in.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says.

    Args:
        argv: the words after the program's name; those of this process by default.

    Returns:
        The exit code: 0 when the run ended as asked, 2 for a mistake that has a message.
    """
    words = sys.argv[1:] if argv is None else argv
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        text = answer(words)
        if text is not None:
            if speaks:
                print(text)
            return 0
        loaded = load(words)
        world_size = _world_size(os.environ.get("WORLD_SIZE", "1"))
        validate_for_world(loaded.config, world_size, expected_dp=loaded.data_parallel_size)
        train(loaded, world_size)
    except NanotrainError as error:
        met_alone = isinstance(error, EnvironmentFault)
        return report(error, quiet=not (speaks or met_alone))
    return 0


def train(loaded: Loaded, world_size: int) -> None:
    """Run a validated configuration on this rank.

    Args:
        loaded: the configuration and what the command line said of it.
        world_size: ranks of the run.
    """
    from nanotrain.comm.parallel_context import ParallelContext
    from nanotrain.log import start_logging
    from nanotrain.train.launch import run_plan
    from nanotrain.train.resolve import resolve

    start_logging(is_first=os.environ.get("RANK", "0") == "0")
    plan = resolve(loaded, world_size)
    config = plan.config
    timeout_s = config.parallel.distributed_timeout_minutes * 60
    with ParallelContext.start(plan.topology, device=config.train.device.value, timeout_s=timeout_s) as context:
        start_logging(coordinates=context.place, is_first=context.rank == 0)
        run_plan(plan, context)


def _world_size(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise EnvironmentFault(f"WORLD_SIZE is {text!r}", why="it counts the ranks", fix="start with torchrun")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
