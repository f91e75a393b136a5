"""What a process inherits, set to the same values for all tests.

Whoever runs the tests may do so under `nohup` (which ignores SIGHUP), in the background of a script
(SIGINT is ignored), as a service (no HOME, a closed stdin, umask 077), in a job of SLURM or MPI, or
in another language and time zone. `tests/test_surroundings.py` runs a sample under all of these.
"""

import os
import signal
import time

# variables of terminals, of Python, of accounts on a hub, and of launchers of ranks
FOREIGN = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "LANGUAGE")
FOREIGN += ("PYTHONWARNINGS", "PYTHONHASHSEED", "PYTHONSAFEPATH", "PYTHONUTF8", "PYTHONIOENCODING")
FOREIGN += ("HF_HOME", "HF_TOKEN", "HF_ENDPOINT")
FOREIGN += ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FOREIGN_PREFIXES = ("LC_", "GIT_", "AWS_", "WANDB_", "NANOTRAIN_")
FOREIGN_PREFIXES += ("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "PMIX_")
KEPT = ("NANOTRAIN_DRILLS",)  # a setting of the tests
SIGNALS = (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
UMASK = 0o022


def own_surroundings(home: str) -> None:
    """Set signals, umask, stdin, language, time zone and variables of this process.

    Args:
        home: an empty folder in place of the home of whoever runs the tests.
    """
    _set_signals()
    os.umask(UMASK)
    _open_stdin()
    for name in [*os.environ]:
        is_foreign = name in FOREIGN or name.startswith(FOREIGN_PREFIXES)
        if is_foreign and name not in KEPT:
            del os.environ[name]
    os.environ["LANG"] = "C.UTF-8"
    os.environ["TZ"] = "UTC"
    time.tzset()
    os.environ["HOME"] = home


def _set_signals() -> None:
    """Handle signals as a program in the foreground does; none is blocked."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _open_stdin() -> None:
    """Open descriptor 0 where it is closed: the next file that is opened would become stdin."""
    try:
        os.fstat(0)
    except OSError:
        assert os.open(os.devnull, os.O_RDONLY) == 0
