"""The limit of open files (`ulimit -n`), checked before processes and process groups are started."""

import resource

from nanotrain.errors import EnvironmentFault

OPEN_FILES, OPEN_FILES_PER_RANK = 64, 4
OPEN_FILES_OF_WORKERS, OPEN_FILES_PER_WORKER = 32, 12


def require_open_files(*, num_ranks: int = 0, num_workers: int = 0) -> None:
    """Check that this process may open the files and sockets that it needs at the same time.

    Measured: 25 + 3 per rank in the process that starts them, 33 in one of four ranks, and with two data workers (four)
    between 104 and 120 (120 and 150). With less, one rank can fail where the others wait for it.

    Args:
        num_ranks: that this process starts.
        num_workers: data workers of this process.

    Raises:
        EnvironmentFault: the limit is lower.
    """
    needed = OPEN_FILES + OPEN_FILES_PER_RANK * num_ranks
    if num_workers:
        needed += OPEN_FILES_OF_WORKERS + OPEN_FILES_PER_WORKER * num_workers
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise EnvironmentFault(
            f"a process may open {limit} files",
            why=f"it needs {needed}, as many as its ranks and data workers take",
            fix="raise the limit with ulimit -n 1024 (docker run --ulimit nofile=1024)",
        )
