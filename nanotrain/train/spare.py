"""`python -m nanotrain.train.spare`: a process that waits to take the place of a rank that died."""

import json
import os
import signal
import sys

from nanotrain.system import importing_torch, run_program
from nanotrain.train.main import main, prepare_environment


def stand_by() -> None:
    """Import what a rank imports, then wait for the start of one, in the place of which it trains.

    The launcher writes it to standard input, as a line of JSON; without one the process ends.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the launcher sends it to all its children
    prepare_environment()
    with importing_torch():
        import torch._dynamo  # noqa: F401

        from nanotrain.train import open_and_train  # noqa: F401
    line = sys.stdin.readline()
    if not line:
        return
    start = json.loads(line)
    os.environ.update(start["environment"])
    sys.argv[1:] = start["arguments"]
    run_program(main)


if __name__ == "__main__":
    stand_by()
