"""`torchrun -m nanotrain.train ...`: from the command line to the end of training.

    argv -> Loaded     the configuration; no torch yet, so mistakes show at once
         -> Plan       data, model, folders, checkpoint; no device yet, the same on every rank
         -> Run        on the device, among the other ranks
         -> fit

A mistake is one message and exit code 2, without a traceback. Nearly every mistake is found by all ranks alike, so the
first rank of each machine speaks and the others give it a moment: torchrun ends them as soon as it has exited. A rank
that is still there afterwards met the mistake alone, and speaks for itself.
"""

import logging
import os
import sys
import time
from collections.abc import Sequence

from nanotrain.config.load import Loaded, answer, load
from nanotrain.config.validate import validate_for_world
from nanotrain.errors import EnvironmentFault, NanotrainError, report

# Ranks reach the same mistake at different times: imports alone differ by a second on a busy machine. Were a silent
# rank the first to exit, torchrun would end the one that was about to speak.
WAIT_FOR_SPEAKER_S = 4.0
INTERRUPTED = 130  # 128 + SIGINT, what shells expect

# Idle OpenMP threads that spin take the cores from the other ranks: measured 10x on a busy machine. Read by libgomp
# when torch is imported, so it stands before every import that brings torch in.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says.

    Args:
        argv: the words after the program's name; those of this process by default.

    Returns:
        The exit code: 0 when the run ended as asked, 2 for a mistake that has a message, 130 when it was interrupted.
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
        if not speaks:
            time.sleep(WAIT_FOR_SPEAKER_S)
        return report(error)
    except KeyboardInterrupt:  # before the first step, or a second one: the trainer takes the first itself
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
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

    is_first = os.environ.get("RANK", "0") == "0"
    start_logging(is_first=is_first, level=logging.INFO if is_first else logging.ERROR)  # all ranks find the same
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
