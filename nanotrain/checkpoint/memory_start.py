"""Start from a checkpoint in the memory of the hosts.

    find_memory_start   the newest checkpoint whose shards are all on some host, with their
                        checksums; the same on every rank
    MemoryReader        a checkpointer that also reads that one, shards of other hosts through
                        their servers

A host that was lost has an empty folder, and its shards are on those of the partners. A layout
other than that of the save reads other chunks of the same files.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanotrain.checkpoint.all_ranks import run_on_all, run_on_first
from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.checkpoint.manifest import Manifest
from nanotrain.checkpoint.memory_checkpointer import HostMemory, check_file, chunks_by_file
from nanotrain.checkpoint.peers import PeerSource, fetch_text
from nanotrain.checkpoint.read import Source
from nanotrain.checkpoint.store import read_manifest, step_entries, step_folder
from nanotrain.checkpoint.stored import MANIFEST
from nanotrain.checkpoint.write import shard_name
from nanotrain.errors import CheckpointError
from nanotrain.log import get_logger
from nanotrain.quantities import count_of, step_name
from nanotrain.runs.files import write_text

log = get_logger(__name__)


@dataclass(frozen=True)
class _HeldStep:
    """A committed step in the memory of a host, as one rank of the host has checked it."""

    digest: str  # of the manifest
    is_finite: bool
    files: tuple[str, ...]  # all shards, on all hosts
    sound: frozenset[str]  # shards of this host that this rank has checked and found undamaged
    writers: tuple[str, ...]  # the host of each rank at the save


@dataclass(frozen=True)
class MemoryStart:
    """A checkpoint in the memory of the hosts to start from."""

    step: int
    holders: Mapping[str, tuple[int, ...]]  # shard -> ranks that have it, one per host
    manifest_rank: int  # a rank whose host has the manifest
    description: str  # where the shards are, for the log

    def path(self, memory: HostMemory) -> Path:
        """The step folder on this host."""
        return step_folder(memory.folder, self.step)


def find_memory_start(
    memory: HostMemory, *, at_least: int, accepts: Callable[[Manifest], str]
) -> MemoryStart | None:
    """The newest usable checkpoint in memory. Collective.

    Args:
        memory: the folders of the hosts.
        at_least: the step of the newest checkpoint in the run folder; older ones are not used.
        accepts: why the run does not go on from a checkpoint of a manifest; empty if it does.

    Returns:
        The checkpoint, whose manifest every host has; None without one, and the log says why.
    """
    found = run_on_all(
        memory.group,
        lambda: _held_steps(memory, at_least=at_least),
        merge=lambda held: _choose(held, memory),
    )
    if found is None:
        return None
    run_on_all(memory.group, lambda: _fetch_manifest(found, memory), merge=lambda _: None)
    refusal = run_on_first(memory.group, lambda: accepts(read_manifest(found.path(memory))))
    if refusal:
        log.info("%s in memory is not used: %s", step_name(found.step), refusal)
        return None
    log.info("resuming from memory: %s, %s", step_name(found.step), found.description)
    return found


class MemoryReader(Checkpointer):
    """Reads the checkpoints of a run, and one in the memory of its hosts.

    Args:
        stored: checkpointer of the run folder; a damaged checkpoint in memory is replaced by the
            newest one there.
        memory: the folders of the hosts.
        start: the checkpoint in them.
    """

    def __init__(self, stored: Checkpointer, memory: HostMemory, *, start: MemoryStart) -> None:
        super().__init__(**stored.settings)
        self._memory = memory
        self._start = start
        self._sizes = dict(read_manifest(start.path(memory)).files)

    def _read_manifest(self, path: Path) -> Manifest:
        if path == self._start.path(self._memory):
            return read_manifest(path)
        return super()._read_manifest(path)

    def _open_source(self, path: Path) -> Source | None:
        """The shard on another host, where no rank of this host has it."""
        memory = self._memory
        if path.parent != self._start.path(memory):
            return None
        holders = self._start.holders[path.name]
        index = memory.group.index
        here = memory.hosts[index].name
        if any(memory.hosts[rank].name == here for rank in holders):
            return None
        # ranks with one shard to read share the work over the ranks of the host that has it
        name = memory.hosts[holders[index % len(holders)]].name
        ranks = [rank for rank, host in enumerate(memory.hosts) if host.name == name]
        peer = memory.peers[ranks[index % len(ranks)]]
        file = f"{path.parent.name}/{path.name}"
        return PeerSource(peer, file, size=self._sizes[path.name])


def _held_steps(memory: HostMemory, *, at_least: int) -> dict[int, _HeldStep]:
    """The committed steps of this host; every rank of it checks some of the shards."""
    place = memory.local_ranks.index(memory.group.index)
    held = {}
    for path in step_entries(memory.folder):
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            log.debug("%s is not used: %s", path, error)
            continue
        if manifest.step < at_least:
            continue
        chunks = chunks_by_file(manifest)
        present = sorted(name for name in manifest.files if (path / name).is_file())
        sound = set()
        for name in present[place :: len(memory.local_ranks)]:
            try:
                check_file(path / name, chunks[name])
                sound.add(name)
            except CheckpointError as error:
                log.warning("%s is not used: %s", path / name, error.why)
        held[manifest.step] = _HeldStep(
            digest=hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest(),
            is_finite=not manifest.not_finite,
            files=tuple(manifest.files),
            sound=frozenset(sound),
            writers=tuple(manifest.topology.get("hosts", ())),
        )
    return held


def _choose(held: Sequence[Mapping[int, _HeldStep]], memory: HostMemory) -> MemoryStart | None:
    """The newest step with all shards, from the steps that each rank holds; on the first rank."""
    steps = sorted({step for steps_held in held for step in steps_held}, reverse=True)
    for step in steps:
        chosen = _start_of(step, held, memory=memory)
        if isinstance(chosen, MemoryStart):
            return chosen
        log.warning("%s in memory is not used: %s", step_name(step), chosen)
    return None


def _start_of(
    step: int, held: Sequence[Mapping[int, _HeldStep]], *, memory: HostMemory
) -> MemoryStart | str:
    """The start from a step, or why it cannot be used."""
    ranks = [rank for rank, steps_held in enumerate(held) if step in steps_held]
    first = held[ranks[0]][step]
    if any(held[rank][step].digest != first.digest for rank in ranks):
        return "its manifests differ from host to host"
    if not first.is_finite:
        return "some of its values are not finite"
    holders: dict[str, dict[str, int]] = {name: {} for name in first.files}
    for rank in ranks:
        for name in held[rank][step].sound:
            holders[name][memory.hosts[rank].name] = rank
    missing = [name for name, by_host in holders.items() if not by_host]
    if missing:
        shards = count_of(len(missing), "shard", verb="is")
        return f"{shards} on no host or damaged, the first is {missing[0]}"
    return MemoryStart(
        step=step,
        holders={name: tuple(by_host.values()) for name, by_host in holders.items()},
        manifest_rank=ranks[0],
        description=_describe(holders, first.writers),
    )


def _describe(holders: Mapping[str, Mapping[str, int]], writers: Sequence[str]) -> str:
    """How many shards are on the hosts that wrote them, and how many come from partners."""
    lost = []
    for rank, host in enumerate(writers):
        name = shard_name(rank, len(writers))
        if name in holders and host not in holders[name]:
            lost.append(host)
    num_own = len(holders) - len(lost)
    text = f"{num_own} of {count_of(len(holders), 'shard')} from the hosts that wrote them"
    if lost:
        text += f", {len(lost)} from partners of {', '.join(sorted(set(lost))[:4])}"
    return text


def _fetch_manifest(start: MemoryStart, memory: HostMemory) -> None:
    """Bring the manifest to a host that has lost it."""
    path = start.path(memory)
    if not memory.is_host_first or (path / MANIFEST).exists():
        return
    path.mkdir(exist_ok=True)
    text = fetch_text(memory.peers[start.manifest_rank], f"{path.name}/{MANIFEST}")
    write_text(path / MANIFEST, text)
