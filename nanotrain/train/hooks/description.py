"""The description of a run in its folder: config.yaml, environment.json, starts.jsonl, tokenizer/.

It is written after the first step of a start, so that a start that fails or has nothing to do
leaves the files of the run as they are.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nanotrain.config.load import to_yaml
from nanotrain.data.tokenizer import load_with_files
from nanotrain.data.tokenizer_files import SETTINGS
from nanotrain.errors import DataError
from nanotrain.log import get_logger
from nanotrain.plan.memory_plan import MemoryPlan
from nanotrain.runs.files import OTHER_FOLDER, disk_errors, make_folder, remove_folder
from nanotrain.spec.counts import num_active_parameters, num_parameters
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.run import Run, RunInputs

log = get_logger(__name__)


@dataclass(frozen=True)
class StartFacts:
    """Facts of a start that are not in the configuration."""

    device: str  # name of the device of the first rank
    layout: str  # ranks, parallel sizes and sharding, as text
    memory: MemoryPlan | None = None  # memory of the worst rank; None if it was not planned


class DescriptionHook(Hook):
    """Writes the description on the first rank.

    Args:
        facts: facts of this start.
    """

    def __init__(self, facts: StartFacts) -> None:
        self._facts = facts

    def begin_writing(self, run: Run, *, step: int) -> None:
        """Write the files that describe the run: configuration, start, environment, tokenizer."""
        if not run.context.control.is_first:
            return
        config = run.config
        folder = run.inputs.folder
        text = to_yaml(config)
        world_size = run.context.topology.world_size
        origins = run.inputs.origins
        folder.add_start(
            text,
            step=step,
            world_size=world_size,
            origins=origins,
            in_place=run.inputs.begins_phase,
        )
        folder.write_description(text, self._entries(run), secret=config.train.notify)
        keep_tokenizer(run.inputs, config.checkpoint.pretrained_checkpoint)

    def _entries(self, run: Run) -> Mapping[str, Any]:
        """Further entries of environment.json."""
        memory = self._facts.memory
        return {
            "device": self._facts.device,
            "world_size": run.context.topology.world_size,
            "layout": self._facts.layout,
            "parameters": num_parameters(run.plan.shape),
            "active_parameters": num_active_parameters(run.plan.shape),
            "memory": None if memory is None else asdict(memory),
            "origins": dict(run.inputs.origins),
        }


def keep_tokenizer(inputs: RunInputs, pretrained: str | None) -> None:
    """Copy the tokenizer into the run folder, for generation, evaluation and exports anywhere.

    A resumed run has it already: `open_inputs` has compared it.

    Args:
        inputs: open inputs of the run.
        pretrained: Hugging Face folder with the initial weights, whose tokenizer is taken if the
            run's is the same or unknown.

    Raises:
        EnvironmentFault: the folder cannot be written, or holds files that are not nanotrain's.
    """
    name = inputs.tokenizer
    folder = inputs.folder.tokenizer
    if inputs.is_resumed and (folder / SETTINGS).is_file():
        return
    if pretrained is not None:
        # few runs need Hugging Face's families
        from nanotrain.interop.hf.companions import fullest_tokenizer

        name = fullest_tokenizer(name, Path(pretrained))
    if name is None or folder in (Path(name), Path(name).parent):
        return
    try:
        tokenizer = load_with_files(name)
    except DataError as error:  # steps need none
        log.info("the run folder gets no tokenizer: %s", error)
        return
    remove_folder(folder)
    make_folder(folder, fix=f"{OTHER_FOLDER}, or move its content")
    with disk_errors(folder):
        tokenizer.save(folder)
