"""`--memory-checkpoint-interval`: a start from a checkpoint in the memory of the hosts.

It is taken where it is as new as the newest checkpoint in the run folder.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from nanotrain.checkpoint.manifest import Manifest
from nanotrain.checkpoint.memory_start import find_memory_start
from nanotrain.checkpoint.run_memory import RunMemory
from nanotrain.checkpoint.store import saved_stages, step_of
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.schema import to_dict
from nanotrain.log import get_logger
from nanotrain.plan.plan import Plan
from nanotrain.quantities import count_of
from nanotrain.train.resume.restore import changed_settings
from nanotrain.train.run import RunInputs

log = get_logger(__name__)


@contextmanager
def open_memory_checkpoints(
    plan: Plan, inputs: RunInputs, *, context: ParallelContext
) -> Iterator[RunInputs]:
    """The inputs of a run that starts from memory where it can; unchanged without such saves.

    Collective.

    Args:
        plan: plan of this rank.
        inputs: inputs with the newest checkpoint in the run folder.
        context: device and groups of this rank.

    Raises:
        EnvironmentFault: a host has no memory file system that can be written; on every rank.
    """
    options = plan.config.checkpoint
    if not options.memory_checkpoint_interval:
        yield inputs
        return
    memory = RunMemory(inputs.folder, Path(options.memory_checkpoint_dir), control=context.control)
    _log_partners(memory)
    try:
        found = None
        if options.auto_resume and options.load is None:
            found = _find(plan, inputs, memory=memory)
        if found is None:
            yield replace(inputs, memory=memory)
        else:
            yield replace(inputs, memory=memory, checkpoint=found, is_resumed=True)
    finally:
        memory.close()


def _find(plan: Plan, inputs: RunInputs, *, memory: RunMemory) -> Path | None:
    """The step folder on this host to start from; None for the start without memory."""
    hosts = memory.open()
    if hosts is None:
        return None
    stored = inputs.checkpoint
    accepts = partial(_refusal, plan=plan, stored=stored, memory=memory)
    at_least = 0 if stored is None else step_of(stored)
    memory.start = find_memory_start(hosts, at_least=at_least, accepts=accepts)
    if memory.start is None:
        return None
    memory.is_start_newer = memory.start.step > at_least
    return memory.start.path(hosts)


def _refusal(manifest: Manifest, *, plan: Plan, stored: Path | None, memory: RunMemory) -> str:
    """Why a run does not go on from a checkpoint in memory; empty if it does.

    Where the data changed, the position in it was found from the checkpoint in the run folder.
    """
    changed = changed_settings(manifest.config, to_dict(plan.config))
    data_changes = [text for text in changed if text.startswith(("data.", "train."))]
    if data_changes:
        return f"settings of the data changed since: {'; '.join(data_changes)}"
    num_starts = manifest.topology.get("num_starts", 0)
    for step in memory.start_steps()[num_starts:]:
        if step < manifest.step:
            return f"a later start went on from step {step}"
    stages = list(manifest.objects.get("stages", []))
    if stages != ([] if stored is None else saved_stages(stored)):
        return "`nanotrain data mix` changed the data since the newest checkpoint of the run folder"
    return ""


def _log_partners(memory: RunMemory) -> None:
    """Log over how many hosts the copies lie."""
    names = {host.name for host in memory.hosts}
    text = f"{count_of(len(names), 'host')}, each shard with a copy on another one"
    if len(names) == 1:
        text = "one host, without copies on another one: they survive processes, not the host"
    log.info("memory checkpoints: %s", text)
