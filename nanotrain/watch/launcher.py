"""End this rank with its launcher: after torchrun is killed, no rank may continue to write.

On Linux the kernel sends SIGKILL when the parent ends (man 2 prctl, PR_SET_PDEATHSIG); elsewhere a thread looks at the
parent's process id. Checkpoints are committed by a rename, so SIGKILL loses no complete one.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping

_PR_SET_PDEATHSIG = 1
_POLL_S = 1.0
# Set by torchrun for its ranks. A process that a user started from a shell must outlive it (nohup).
_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"


def end_with_launcher(environment: Mapping[str, str]) -> None:
    """End this process when the process that started it ends; without effect if that is not torchrun.

    Args:
        environment: of this process.
    """
    if _OF_TORCHRUN not in environment:
        return
    launcher = os.getppid()
    if not (sys.platform == "linux" and _signal_at_parent_death()):
        threading.Thread(target=_watch, args=(launcher,), name="launcher-watch", daemon=True).start()
    elif os.getppid() != launcher:  # it ended before the request
        os.kill(os.getpid(), signal.SIGKILL)


def _signal_at_parent_death() -> bool:
    """Ask the kernel for SIGKILL at the end of the parent; False if it refuses."""
    try:
        return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
