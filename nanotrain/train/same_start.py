"""The check that all ranks start alike: files, settings, data and versions.

    require_same_start   compare, and give every rank the first rank's checkpoint
    facts_of_start       what a rank starts with, by name

Each machine opens its own inputs. If they differ, the collectives of the ranks do not match, or a
run trains on data that nobody meant.
"""

import json
import platform
import socket
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from nanotrain.checkpoint.all_ranks import run_on_all
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.schema import KEYS, flat_values
from nanotrain.data.build import fingerprints
from nanotrain.errors import EnvironmentFault
from nanotrain.plan.plan import Plan
from nanotrain.system import package_version
from nanotrain.train.run import RunInputs

VERSIONS = ("nanotrain", "torch")
TOKENIZER_VERSIONS = ("tokenizers", "transformers")  # compared where a tokenizer is used
_SHOWN = 3  # differences that are named
_LONGEST = 80  # characters of a value in an error
_HIDDEN = ("train.notify",)  # settings whose values are not shown
# kind of a fact -> what to do where it differs
_FIXES = {
    "setting": "run the same command line on all machines; `nanotrain config` prints the settings",
    "corpus": "copy it to all machines again, or use a file system that they share",
    "task": "copy its file to all machines again, or use a file system that they share",
    "version": "install the same packages on all machines",
}


class _RankStart(NamedTuple):
    """The host, the checkpoint and the facts that a rank starts with."""

    host: str
    checkpoint_name: str | None  # None: the rank does not look for it
    checkpoint: Path | None
    facts: bytes  # compressed JSON of `facts_of_start`; equal bytes are equal facts


def require_same_start(plan: Plan, inputs: RunInputs, *, context: ParallelContext) -> RunInputs:
    """Check that all ranks have the same settings, data and versions, and the same checkpoint.

    Returns:
        The inputs with the first rank's checkpoint, also on ranks that have not read one.

    Raises:
        EnvironmentFault: ranks differ; on every rank.
    """
    checkpoint_name = None
    if inputs.reads_checkpoint:
        checkpoint_name = inputs.checkpoint.name if inputs.checkpoint else "no checkpoint"
    text = json.dumps(facts_of_start(plan, inputs))
    facts = zlib.compress(text.encode(), 1)
    start = _RankStart(socket.gethostname(), checkpoint_name, inputs.checkpoint, facts)

    def merge(starts: list[_RankStart]) -> Path | None:
        """The checkpoint of the first rank, if all ranks start alike; runs on the first rank."""
        first = starts[0]
        for rank, other in enumerate(starts):
            if other.checkpoint_name not in (None, first.checkpoint_name):
                raise EnvironmentFault(
                    f"rank 0 starts from {first.checkpoint_name}, "
                    f"rank {rank} from {other.checkpoint_name}",
                    why="their machines have different files "
                    f"in {inputs.folder.path} or behind --load",
                    fix="put them on a file system that all machines share",
                )
            if other.facts != first.facts:
                raise _difference(first, other, rank=rank)
        return first.checkpoint

    # Only the first rank receives the values of all ranks, so the cost of the others does not grow
    # with the world.
    checkpoint = run_on_all(context.control, lambda: start, merge=merge)
    return replace(
        inputs,
        checkpoint=checkpoint,
        is_resumed=(checkpoint is not None or inputs.live is not None)
        and plan.config.checkpoint.load is None,
    )


def facts_of_start(plan: Plan, inputs: RunInputs) -> dict[str, dict[str, str]]:
    """Facts that must be equal on all ranks: kind -> name -> value."""
    settings = {}
    for key, value in flat_values(plan.config).items():
        text = repr(value)
        if key in _HIDDEN:
            text = f"(hidden, {zlib.crc32(text.encode()):08x})"
        settings[KEYS[key].flag if key in KEYS else key] = text
    corpora: dict[str, str] = {}
    datasets = inputs.datasets
    for samples in (datasets.train, datasets.valid, *datasets.valid_sets.values()):
        corpora |= fingerprints(samples)
    tasks = {task.name: f"{zlib.crc32(repr(task).encode()):08x}" for task in inputs.tasks}
    versions = dict(_versions(has_tokenizer=inputs.tokenizer is not None))
    return {"version": versions, "setting": settings, "corpus": corpora, "task": tasks}


def _versions(*, has_tokenizer: bool) -> Iterator[tuple[str, str]]:
    """Versions of Python and of packages that change the results or the messages of a run."""
    yield "python", ".".join(platform.python_version_tuple()[:2])
    for name in (*VERSIONS, *(TOKENIZER_VERSIONS if has_tokenizer else ())):
        yield name, package_version(name) or "not installed"
    yield "nanotrain's files", _sources()


@cache
def _sources() -> str:
    """A short digest of names and sizes of nanotrain's files: two checkouts have one version."""
    folder = Path(__file__).parents[1]
    digest = 0
    for path in sorted(folder.rglob("*.py")):
        row = f"{path.relative_to(folder)} {path.stat().st_size}"
        digest = zlib.crc32(row.encode(), digest)
    return f"{digest:08x}"


def _difference(first: _RankStart, other: _RankStart, *, rank: int) -> EnvironmentFault:
    """The error for a rank whose facts differ from rank 0; names the first kind that differs."""
    expected = json.loads(zlib.decompress(first.facts))
    actual = json.loads(zlib.decompress(other.facts))
    kind = next(kind for kind in _FIXES if expected[kind] != actual[kind])
    texts = []
    for name in expected[kind] | actual[kind]:
        here = actual[kind].get(name, "none")
        there = expected[kind].get(name, "none")
        if here != there:
            texts.append(f"{name} is {_short(here)} there and {_short(there)} on rank 0")
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return EnvironmentFault(
        f"rank {rank} on {other.host} has a different {kind} from rank 0 on {first.host}",
        why="; ".join(texts[:_SHOWN]) + more,
        fix=_FIXES[kind],
    )


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
