"""`python -m nanotrain.train.spare`: a process that waits to take the place of a rank that died."""

import json
import os
import signal
import sys

from nanotrain.system import importing_torch, run_program
from nanotrain.train.main import main, prepare_environment


def stand_by() -> None:
    """Import the modules of a rank, then wait until the launcher has a rank for this process.

    The launcher writes the rank's arguments and environment to standard input, as a line of JSON.
    Without a line the process ends.
    """
    # the launcher sends both signals to all its children; SIGINT ends this one without a traceback
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
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
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_program(main)


if __name__ == "__main__":
    stand_by()
