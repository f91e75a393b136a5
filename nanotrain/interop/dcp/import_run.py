"""Write a checkpoint of a training program as one of ours, with the state of its optimizer.

    import_dcp   the folder, and the lines that say what it has

torchtitan and programs with FSDP2 save with torch.distributed.checkpoint; so does `export_dcp`. The
result is an ordinary checkpoint, which any layout loads. One chunk is in memory at a time.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from nanotrain.checkpoint.manifest import Manifest
from nanotrain.checkpoint.rewrite import Shapes, write_checkpoint
from nanotrain.checkpoint.write import ChunkWrite
from nanotrain.config.command_line import CommandLine
from nanotrain.config.config import Config
from nanotrain.config.schema import to_dict, with_values
from nanotrain.errors import CheckpointError
from nanotrain.interop.dcp.model import ImportedModel, find_model
from nanotrain.interop.dcp.names import choose_mappings, read_parameter
from nanotrain.interop.dcp.optimizer import (
    MOMENTS,
    STEP_PARTS,
    WEIGHTS_ALONE,
    Counters,
    adam_settings,
    read_counters,
    require_adam,
)
from nanotrain.interop.dcp.own import DTYPES, is_own, read_own
from nanotrain.interop.dcp.stored import StoredRun, find_step_folder
from nanotrain.interop.dcp.tensors import TorchDistFolder
from nanotrain.interop.hf.import_weights import describe_differences
from nanotrain.interop.hf.names import checkpoint_shapes, tensor_shapes
from nanotrain.interop.hf.tensor_mapping import TensorMapping
from nanotrain.interop.imported import CONSTANT_SCALE, counters_of, files_of
from nanotrain.log import progress
from nanotrain.quantities import count_of
from nanotrain.spec.boxes import Box

WEIGHTS = "model/"  # beginning of the names of parameters
BIASES = "router/"  # and of the expert biases of routers
STATE = "optimizer/"


@dataclass(frozen=True)
class ImportedRun:
    """An opened checkpoint, with the place of everything in it."""

    run: StoredRun
    model: ImportedModel
    config: Config
    mappings: Mapping[str, TensorMapping]  # of weights and expert biases
    state: Mapping[str, TensorMapping]  # of moments; empty: weights alone
    counters: Counters | None
    notes: list[str]

    @property
    def shapes(self) -> Shapes:
        """Shape and data type of every tensor of our checkpoint."""
        shapes = {}
        for name, size in checkpoint_shapes(self.config.model).items():
            shapes[name] = (size, "fp32")
            parameter = name.removeprefix(WEIGHTS)
            if name.startswith(WEIGHTS) and self.state:
                for moment in MOMENTS:
                    shapes[f"{STATE}{moment}/{parameter}"] = (size, "fp32")
        return shapes

    def read(self, chunk: ChunkWrite) -> Tensor:
        """The values of a chunk of our checkpoint."""
        name = chunk.source.name
        keys: Mapping[str, str] = self.run.weights
        mappings = self.mappings
        parameter = name.partition("/")[2]
        if name.startswith(STATE):
            moment, _, parameter = parameter.partition("/")
            keys = self.run.states[moment]
            mappings = self.state

        def read(tensor: str, box: Box) -> Tensor:
            return self.run.folder.read(keys[tensor], box)

        return read_parameter(mappings[parameter], chunk.box, read=read)


@progress("importing")
def import_dcp(
    path: Path,
    output: Path,
    *,
    line: CommandLine,
    model_folder: Path | None = None,
    optim: bool = True,
) -> str:
    """Write a checkpoint of torch.distributed.checkpoint as one of ours; returns lines on it.

    Args:
        path: a folder with .metadata, or a folder with step-N, for the newest.
        output: the folder to write; must not exist or be empty.
        line: the settings of the run that the user gives.
        model_folder: folder with the config.json of the model; None: the model follows from the
            settings and from the shapes of the tensors.
        optim: whether the state of the optimizer and the counters of the run are read too.

    Raises:
        CheckpointError: names, a model or an optimizer that are not read, damaged files, or
            `output` has files.
        ConfigError: settings that are wrong, or that fit no such model.
        HuggingFaceError: the model of config.json does not exist here.
        EnvironmentFault: `output` cannot be written; nothing is left there.
    """
    folder = TorchDistFolder(find_step_folder(path))
    if is_own(folder):
        options = options_of(line, model_folder=model_folder, optim=optim)
        return read_own(folder, output, options=options)
    opened = open_run(StoredRun(folder), line=line, model_folder=model_folder, optim=optim)
    counters = opened.counters
    manifest = Manifest(
        0 if counters is None else counters.step,
        {},
        {},
        objects={} if counters is None else objects_of(opened.config, counters),
        config=to_dict(opened.config),
        topology={},
    )
    tensors = count_of(len(opened.mappings), "tensor")
    dtypes = describe_dtypes(opened)
    lines = [f"{output}: {tensors} in fp32, from {folder.folder} (tensors there: {dtypes})"]
    lines += describe(opened)
    files = files_of(opened.config, lines)
    write_checkpoint(output, opened.shapes, read=opened.read, manifest=manifest, files=files)
    return "\n".join(lines)


def options_of(line: CommandLine, *, model_folder: Path | None, optim: bool) -> list[str]:
    """Settings and flags that the user gives, by name."""
    options = sorted([*line.explicit, *line.choices])
    if model_folder is not None:
        options.append("--model-config")
    if not optim:
        options.append("--no-optim")
    return options


def open_run(
    run: StoredRun, *, line: CommandLine, model_folder: Path | None, optim: bool
) -> ImportedRun:
    """Find the place of everything in a checkpoint; arguments and errors as above."""
    model = find_model(run, line=line, model_folder=model_folder)
    config = model.config
    mappings = choose_mappings(config.model, model.namings, present=run.weight_shapes)
    require_weights(run, model, mappings=mappings)
    state: Mapping[str, TensorMapping] = {}
    counters = None
    notes = list(model.notes)
    if optim and run.states:
        state = find_state(run, model)
        settings = adam_settings(run, config=config, given=model.given)
        config = with_values(config, settings.values)
        counters = read_counters(
            run,
            batch_size=config.train.global_batch_size,
            seq_length=config.data.seq_length if "data.seq_length" in model.given else None,
        )
        notes += [*settings.notes, *counters.notes]
    return ImportedRun(run, model, config, mappings, state, counters, notes)


def require_weights(
    run: StoredRun, model: ImportedModel, *, mappings: Mapping[str, TensorMapping]
) -> None:
    """Check that the checkpoint has the tensors of the model, in numbers of at least 16 bits.

    Raises:
        CheckpointError: it lacks one, has another one, or one in another shape or type.
    """
    expected = tensor_shapes(mappings)
    present = run.weight_shapes
    for name in present.keys() - expected.keys():
        if model.is_ignored(name):
            del present[name]
    complaints = describe_differences(expected, present)
    for name in expected.keys() & present.keys():
        dtype = run.folder.tensors[run.weights[name]].dtype
        if not dtype.is_floating_point or dtype.itemsize < 2:
            complaints.append(f"{name} is {dtype}")
    if complaints:
        raise CheckpointError(
            f"the tensors in {run.folder.folder} are not those of the model",
            why="; ".join(complaints),
            fix="name the model of the checkpoint, with --model-config FOLDER, a recipe "
            "(+config=NAME) or flags; parts that are unknown here have no place in nanotrain",
        )


def find_state(run: StoredRun, model: ImportedModel) -> dict[str, TensorMapping]:
    """The moments of all parameters.

    Raises:
        CheckpointError: they are of another optimizer, or some parameters have none.
    """
    require_adam(run)
    model.move_tied_state(run)
    first, second = (run.shapes(run.states[moment]) for moment in MOMENTS)
    mappings = choose_mappings(model.config.model, model.namings, present=first)
    trained = {name: mapping for name, mapping in mappings.items() if not is_bias(name)}
    complaints = []
    for present in (first, second):
        complaints += describe_differences(tensor_shapes(trained), present)
    if complaints:
        raise CheckpointError(
            f"the state of the optimizer in {run.folder.folder} is not that of the model",
            why="; ".join(complaints),
            fix=WEIGHTS_ALONE,
        )
    return trained


def is_bias(name: str) -> bool:
    """Whether a tensor is the expert bias of a router, which no optimizer updates."""
    return name.endswith(".router.expert_bias")


def objects_of(config: Config, counters: Counters) -> dict[str, Any]:
    """The counters of the run, as a save of ours has them."""
    return counters_of(
        config,
        step=counters.step,
        samples=counters.consumed_samples,
        num_updates=counters.num_updates,
        loss_scale=CONSTANT_SCALE,
    )


def describe_dtypes(opened: ImportedRun) -> str:
    """The numbers of weights and moments by data type, the most frequent first."""
    run = opened.run
    keys = list(run.weights.values())
    if opened.state:
        for moment in MOMENTS:
            keys += run.states[moment].values()
    counts = Counter(run.folder.tensors[key].dtype for key in keys)
    texts = []
    for dtype, count in counts.most_common():
        texts.append(f"{count} in {DTYPES.get(dtype, str(dtype))}")
    return ", ".join(texts)


def describe(opened: ImportedRun) -> list[str]:
    """One line for each thing that was imported, changed, guessed or left out."""
    counters = opened.counters
    lines = []
    if counters is None:
        lines.append("optimizer: none; the next run begins at step 0")
    else:
        updates = count_of(counters.num_updates, "update")
        samples = count_of(counters.consumed_samples, "sample")
        lines.append(
            f"optimizer: moments after {updates}, step {counters.step}, {samples} consumed"
        )
    lines += opened.notes
    others = opened.run.other_parts()
    if counters is not None:  # the step is taken from them
        others = [name for name in others if name not in STEP_PARTS]
    if others:
        lines.append(f"not imported: {', '.join(others)}")
    return lines
