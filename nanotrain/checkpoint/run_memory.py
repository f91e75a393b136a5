"""`RunMemory`: the folders of a run in the memory of its hosts, open from a start to its end."""

from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from nanotrain.checkpoint.all_ranks import run_on_all, run_on_first
from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.checkpoint.host_folder import host_root, remove_dead, run_key
from nanotrain.checkpoint.memory_checkpointer import HostMemory, open_host_memory
from nanotrain.checkpoint.memory_start import MemoryReader, MemoryStart
from nanotrain.comm.group import Group
from nanotrain.comm.hosts import gather_hosts
from nanotrain.runs.folder import RunFolder
from nanotrain.untrusted import object_of, parse_json, read_file, whole_number


class RunMemory:
    """The folders of a run in the memory of its hosts, and the checkpoint to start from.

    A run has no folder before its first step, which makes it a run.

    Args:
        folder: the run folder.
        base: the memory file system.
        control: group of all ranks.
    """

    def __init__(self, folder: RunFolder, base: Path, *, control: Group) -> None:
        self.start: MemoryStart | None = None
        self.is_start_newer = False  # whether the run folder has no checkpoint of that step
        self.hosts = gather_hosts(control)
        self._folder = folder
        self._base = base
        self._control = control
        self._address = str(folder.remote or folder.path.resolve())
        self._stack = ExitStack()
        self._memory: HostMemory | None = None

    def open(self) -> HostMemory | None:
        """Open the folder on every host; None before the first step of a run. Collective."""
        if self._memory is not None:
            return self._memory
        key = run_on_first(self._control, self._key)
        run_on_all(self._control, partial(self._remove_dead, key), merge=lambda _: None)
        if key is not None:
            opened = open_host_memory(self._base, key, group=self._control, hosts=self.hosts)
            self._memory = self._stack.enter_context(opened)
        return self._memory

    def reader(self, stored: Checkpointer) -> Checkpointer:
        """The checkpointer that reads the start of the run."""
        if self._memory is None or self.start is None:
            return stored
        return MemoryReader(stored, self._memory, start=self.start)

    def start_steps(self) -> list[int]:
        """The steps from which the starts of the run went on, on the first rank."""
        steps = []
        for row in self._start_rows():
            with suppress(ValueError):
                steps.append(
                    whole_number(object_of(parse_json(row), "a start").get("step"), "step")
                )
        return steps

    def close(self) -> None:
        """End the servers, and leave the folders to the next start."""
        self._stack.close()

    def _key(self) -> str | None:
        """The name of the folders, on the first rank; None before the first step of a run."""
        rows = self._start_rows()
        return run_key(self._address, rows[0].decode(errors="replace")) if rows else None

    def _start_rows(self) -> list[bytes]:
        try:
            return read_file(self._folder.path / "starts.jsonl").splitlines()
        except (OSError, ValueError):
            return []

    def _remove_dead(self, key: str | None) -> None:
        """Remove the folders of dead runs, on the first rank of each host."""
        host = self.hosts[self._control.index].name
        is_host_first = [entry.name for entry in self.hosts].index(host) == self._control.index
        if is_host_first:
            remove_dead(host_root(self._base, host), address=self._address, key=key)
