"""torch's flight recorder: last collectives of this rank, with sizes, number and device state.

The heartbeat records what the host queued; the flight recorder also has what the device began and
completed. It is switched on by environment variables that torch reads when process groups are
created. It records gloo's collectives too, except point-to-point messages; gloo has no state on a
device, so a collective is complete once it is retired.
"""

import ast
import os
import pickle
import threading
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# On NCCL `wait` does not raise; torch ends the process at the timeout, and then writes the records
# of every rank, which `torchfrtrace` compares (docs/faults.md).
SETTINGS = {
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_BUFFER_SIZE": "2000",
}
# reading the states of collectives calls the driver, which may not return while the device hangs
DUMP_S = 2.0
# dump functions: for NCCL, which a CPU build lacks, and for all other backends
_DUMPS = ("_dump_nccl_trace", "_dump_fr_trace")


@dataclass(frozen=True)
class RecordedCollective:
    """The oldest incomplete collective of a rank over a process group, else its newest."""

    group: str  # name under which the process group was created; groups of the same ranks share it
    ranks: tuple[int, ...]  # ranks of the process group; empty if the recorder does not list them
    sequence: int  # torch's number of the collective in its process group
    op: str
    input_sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    state: str  # "scheduled", "started" or "completed"


def switch_on(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the recorder's unset variables; call before the first process group is created."""
    for name, value in SETTINGS.items():
        environment.setdefault(name, value)


def recorded_collectives() -> list[RecordedCollective]:
    """The collectives that this rank is in, one per process group.

    Empty if the recorder is off or does not reply.

    Called while ranks hang, so it waits for the recorder for DUMP_S only.
    """
    dumps: list[bytes] = []
    thread = threading.Thread(target=_dump, args=(dumps,), name="flight recorder", daemon=True)
    thread.start()
    thread.join(DUMP_S)
    # written by torch inside this process, never read from a file
    return [newest for dump in list(dumps) for newest in newest_collectives(pickle.loads(dump))]


def newest_collectives(dump: Mapping[str, Any]) -> list[RecordedCollective]:
    """The oldest incomplete collective of every process group in a parsed dump, else its newest.

    Args:
        dump: torch's output: `entries` in the order in which they were queued, `pg_config` by
            process group.
    """
    chosen: dict[str, Mapping[str, Any]] = {}
    for entry in dump.get("entries", ()):
        name = entry["process_group"][0]
        if not entry.get("is_p2p") and (name not in chosen or _is_complete(chosen[name])):
            chosen[name] = entry
    return [_parse_entry(entry, dump.get("pg_config", {})) for entry in chosen.values()]


def _dump(dumps: list[bytes]) -> None:
    for name in _DUMPS:
        read = getattr(torch._C._distributed_c10d, name, None)
        if read is not None:
            dumps.append(read(includeStackTraces=False))


def _is_complete(entry: Mapping[str, Any]) -> bool:
    return entry["state"] == "completed" or bool(entry.get("retired"))


def _parse_entry(
    entry: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]]
) -> RecordedCollective:
    """One collective of a dump of torch's flight recorder; `groups` describes process groups."""
    name, description = entry["process_group"]
    ranks: Sequence[int] = ast.literal_eval(groups.get(name, {}).get("ranks", "[]"))
    group = "world" if description == "default_pg" else description
    _, _, op = entry["profiling_name"].rpartition(":")
    input_sizes = tuple(map(tuple, entry["input_sizes"]))
    dtypes = tuple(entry.get("input_dtypes", ()))
    state = "completed" if _is_complete(entry) else entry["state"]
    return RecordedCollective(
        group=group,
        ranks=tuple(ranks),
        sequence=entry["collective_seq_id"],
        op=op,
        input_sizes=input_sizes,
        dtypes=dtypes,
        state=state,
    )
