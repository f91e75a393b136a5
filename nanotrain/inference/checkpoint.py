"""Load the model of a checkpoint or of a Hugging Face folder, and export checkpoints.

    open_model          a checkpoint or a Hugging Face folder, with its configuration
    load_stage          the weights of a model, or this rank's shards of them
    load_checkpoint     a model with its tokenizer
    export_checkpoint   a checkpoint as a Hugging Face folder

The manifest of a checkpoint contains the configuration, so its path is enough.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from nanotrain.checkpoint.compatibility import (
    config_of,
    fit_padding,
    has_weights_alone,
    require_model,
    vocabulary_rows,
)
from nanotrain.checkpoint.manifest import Manifest
from nanotrain.checkpoint.plan import plan_reads
from nanotrain.checkpoint.read import read_chunks, read_global_tensors, require_tensor
from nanotrain.checkpoint.rewrite import average
from nanotrain.checkpoint.store import find_manifest
from nanotrain.comm.group import Group
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config, DataConfig
from nanotrain.config.model import ModelConfig, MTPConfig
from nanotrain.data.corpus_info import recorded_tokenizer
from nanotrain.data.data_path import parse_data_path
from nanotrain.data.prompts import prompt_tokenizer
from nanotrain.data.run_tokenizer import (
    first_blend,
    remote_name_of,
    tokenizer_of_stored,
    uses_quickstart,
)
from nanotrain.data.same_tokenizer import require_recorded
from nanotrain.data.token_format import idx_path
from nanotrain.data.tokenizer import Tokenizer, load_tokenizer, load_with_files
from nanotrain.data.tokenizer_files import SETTINGS, VOCABULARY_FILES
from nanotrain.errors import CheckpointError, DataError
from nanotrain.inference.generate import (
    Generation,
    NextLogits,
    encode_prompts,
    stream_texts,
)
from nanotrain.inference.generation_config import (
    NUM_TOKENS,
    GenerationDefaults,
    defaults_of_folder,
    defaults_of_run,
)
from nanotrain.inference.sampling import Sampling
from nanotrain.log import progress
from nanotrain.model.context import ModelParallel
from nanotrain.model.router_stats import router_tensors
from nanotrain.model.transformer import Stage, build_stage
from nanotrain.parallel.tp.layers import TensorParallel
from nanotrain.prepare.quickstart import find_quickstart
from nanotrain.runs.folder import RunFolder
from nanotrain.spec.boxes import TensorBox
from nanotrain.spec.declaration import Declaration
from nanotrain.spec.parameters import declare_model, declare_stage
from nanotrain.spec.params import localize
from nanotrain.spec.shape import ModelShape
from nanotrain.spec.stages import StageSpec
from nanotrain.topology.groups import GroupName

SHARDED_AXES: tuple[GroupName, ...] = ("tp", "ep", "etp")  # layouts of a model that generates
# prefixes of the names of main params and of their moving average in a checkpoint
PREFIX = "model/"
AVERAGE = "ema/"
HUGGING_FACE_SEQ_LENGTH = 2048  # tokens per window of a model whose training is unknown


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint and its configuration."""

    path: Path  # the step folder, or the Hugging Face folder
    config: Config  # the configuration of the run that wrote it
    # None: the weights are a Hugging Face folder's
    manifest: Manifest | None = field(default=None, repr=False)
    prefix: str = PREFIX  # prefix of the names of the weights that are read

    @property
    def is_pretrained(self) -> bool:
        """Whether it is a Hugging Face folder, or a run or import that began with one."""
        return self.manifest is None or self.config.checkpoint.pretrained_checkpoint is not None

    def with_model(self, model_config: ModelConfig) -> Self:
        """The checkpoint, read as a model with another padding of its vocabulary."""
        return replace(self, config=replace(self.config, model=model_config))

    def stored_name(self, name: str) -> str:
        """The tensor of a parameter or expert bias; frozen parameters have no moving average."""
        if name.startswith("router/"):
            return name
        stored = self.prefix + name
        is_stored = self.manifest is not None and stored in self.manifest.tensors
        return stored if is_stored else PREFIX + name

    def read_params(self, wanted: Mapping[TensorBox, Tensor]) -> None:
        """Read boxes of parameters and of expert biases ("router/NAME") in place.

        Args:
            wanted: tensors to fill, by boxes with the names of the model.

        Raises:
            NanotrainError: a tensor that is missing or damaged.
        """
        if self.manifest is None:
            from nanotrain.interop.hf.import_weights import import_weights

            named = {}
            for box, target in wanted.items():
                named[replace(box, name=box.name.removeprefix("router/"))] = target
            import_weights(self.path, self.config.model, wanted=named)
            return
        targets = {replace(box, name=self.stored_name(box.name)): wanted[box] for box in wanted}
        for box in targets:
            require_tensor(self.path, self.manifest, name=box.name)
        rows = vocabulary_rows(ModelShape.of(self.config.model))
        fitted = fit_padding(self.manifest, targets, rows=rows)
        read_chunks(self.path, plan_reads(self.manifest, fitted), targets=fitted)


def open_checkpoint(path: Path, *, ema: bool = False) -> OpenedCheckpoint:
    """Open a checkpoint.

    Args:
        path: a step folder, or a run folder for its newest checkpoint.
        ema: whether the moving average of its weights is read.

    Raises:
        CheckpointError: there is no complete checkpoint, or no average in it.
    """
    step, manifest = find_manifest(path)
    if ema and not any(name.startswith(AVERAGE) for name in manifest.tensors):
        why = "it was written by a run without --ema-decay"
        if has_weights_alone(manifest):
            why = "it is an average or an import"
        raise CheckpointError(
            f"{step} has no moving average of the weights", why=why, fix="leave out --ema"
        )
    config = config_of(manifest, path=step)
    return OpenedCheckpoint(step, config, manifest, prefix=AVERAGE if ema else PREFIX)


def open_model(path: Path, *, ema: bool = False) -> OpenedCheckpoint:
    """Open a checkpoint or a Hugging Face folder, without layers of multi-token prediction.

    Raises:
        NanotrainError: it is neither.
    """
    if not (path / "config.json").is_file():
        opened = open_checkpoint(path, ema=ema)
        return replace(opened, config=_without_mtp(opened.config))
    if ema:
        raise CheckpointError(
            f"{path} has no moving average of the weights",
            why="a Hugging Face folder holds one set of weights",
            fix="leave out --ema",
        )
    # a checkpoint needs no families of Hugging Face
    from nanotrain.interop.hf.families import model_from_hf

    model_config = model_from_hf(path)
    tokenizer = str(path) if any((path / name).is_file() for name in VOCABULARY_FILES) else None
    seq_length = min(model_config.max_position_embeddings, HUGGING_FACE_SEQ_LENGTH)
    data = DataConfig(tokenizer_model=tokenizer, seq_length=seq_length, data_path=["unknown"])
    return OpenedCheckpoint(path, _without_mtp(Config(model=model_config, data=data)))


def _without_mtp(config: Config) -> Config:
    """The configuration without layers of multi-token prediction, which are for training."""
    return replace(config, model=replace(config.model, mtp=MTPConfig()))


def load_stage(
    checkpoint: OpenedCheckpoint, context: ParallelContext | None = None, *, dtype: str = "fp32"
) -> Stage:
    """Load all layers of a model on the CPU, or this rank's shards on its device.

    Args:
        checkpoint: a checkpoint of any layout.
        context: groups that shard the layers (tp, ep, etp), and the device; None for one rank.
        dtype: dtype of the weights.
    """
    model_config = checkpoint.config.model
    if checkpoint.manifest is not None:
        require_model(checkpoint.manifest, model_config, path=checkpoint.path)
    if context is None:
        device = torch.device("cpu")
        stage = build_stage(model_config, dtype=dtype)
    else:
        device = context.device
        stage = _build_shards(model_config, context, dtype=dtype)
    # `to_empty` makes each tensor like one on the meta device, for which torch imports sympy: 0.5 s
    stage._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
    weights = dict(stage.named_parameters())
    wanted = {param.tensor_box: weights[param.spec.name].data for param in stage.params}
    for name, bias in router_tensors(stage).items():
        wanted[TensorBox.full(name, bias.shape)] = bias
    checkpoint.read_params(wanted)
    return stage


def _build_shards(model_config: ModelConfig, context: ParallelContext, *, dtype: str) -> Stage:
    """This rank's shards of all layers, on the meta device; every rank reads full sequences."""
    shape = ModelShape.of(model_config)
    spec = StageSpec.single(model_config.num_layers)
    sizes: dict[str, int] = {axis: context.topology.size(axis) for axis in SHARDED_AXES}
    declared = declare_stage(Declaration(shape, dtype, sizes["tp"]), spec)
    params = [localize(param, coords=context.coords, sizes=sizes) for param in declared]
    tp = TensorParallel(context.group("tp"))
    ep = context.group("ep")
    etp = context.group("etp")
    parallel = replace(ModelParallel.single_rank(), tp=tp, ep=ep, etp=etp)
    return Stage(model_config, spec, params=params, parallel=parallel)


def tokenizer_name(checkpoint: OpenedCheckpoint) -> str | None:
    """The tokenizer of the run, as `load_tokenizer` takes it; None if unknown.

    It is the tokenizer in the run folder or in the folder of an average. Where there is none (in
    folders of older versions) it is --tokenizer-model, else the tokenizer of the first corpus of
    --data-path, else of the quick-start corpus; a name on the hub and a corpus in object storage
    are not opened, as the checkpoint may be somebody else's.

    Raises:
        DataError: the run folder has another tokenizer than the checkpoint was trained with.
    """
    data = checkpoint.config.data
    if checkpoint.manifest is None:
        return data.tokenizer_model
    stored = stored_tokenizer(checkpoint.path)
    if stored is not None:
        recorded = checkpoint.manifest.objects.get("tokenizer_sha256")
        require_recorded(stored, recorded, checkpoint=checkpoint.path)
        return str(stored)
    if not uses_quickstart(data) or data.tokenizer_model:
        return tokenizer_of_stored(data)
    run = RunFolder(checkpoint.path.parent.parent)
    prefix = find_quickstart(run.data, data.quickstart_vocab_size)
    return None if prefix is None else recorded_tokenizer(prefix)


def stored_tokenizer(path: Path) -> Path | None:
    """The folder with the tokenizer's files: in the run of a checkpoint, or in an average."""
    is_step = path.parent.name == "checkpoints"
    run = path.parent.parent if is_step else path
    folder = RunFolder(run).tokenizer
    return folder if (folder / SETTINGS).is_file() else None


def average_with_tokenizer(
    paths: Sequence[Path], output: Path, *, decay: float | None = None
) -> Path:
    """Write the average of checkpoints, and the tokenizer of the last one's run."""
    folder = average(paths, output, decay=decay)
    last_step, _ = find_manifest(paths[-1])
    stored = stored_tokenizer(last_step)
    if stored is not None:
        load_with_files(str(stored)).save(RunFolder(folder).tokenizer)
    return folder


def why_unknown(checkpoint: OpenedCheckpoint) -> str:
    """Why `tokenizer_name` is None."""
    if checkpoint.manifest is None:
        return f"there is none of {', '.join(VOCABULARY_FILES)} in the folder"
    remote = remote_name_of(checkpoint.config.data)
    if remote is not None:
        return f"the run folder holds none, and {remote} of its settings is not on this machine"
    paths = first_blend(checkpoint.config.data)
    prefix = parse_data_path(paths)[0].prefix if paths else None
    if prefix is not None and not idx_path(prefix).is_file():
        corpus = f"the corpus {prefix} of the training"
        return f"the run folder holds none, and {corpus} is not in {Path.cwd()}"
    return "--tokenizer-model was not set, and the corpus was prepared without one"


@dataclass(frozen=True)
class LoadedModel:
    """A model of a checkpoint with its tokenizer.

    `model(...)` is not a Hugging Face model: `model.logits(tokens)` takes [batch, sequence] token
    ids and returns [batch, sequence, vocabulary].
    """

    path: Path  # the step folder
    config: Config  # the configuration of the run that wrote it
    model: Stage  # all layers, fp32; in `load_model` with a context this rank's shards
    tokenizer: Tokenizer
    # ranks that hold the shards
    ranks: Group = field(default_factory=lambda: Group.single_rank("world"))
    # used where a caller gives no value
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    # the model in a layout whose ranks do not hold all layers or tokens; None: `model` is whole
    layout: NextLogits | None = None

    @property
    def is_run(self) -> bool:
        """Whether the model is from a run, with a known training; not a Hugging Face folder."""
        return not (self.path / "config.json").is_file()

    def sampling(self, *, temperature: float = 1.0, seed: int = 0) -> Sampling:
        """The sampling of the model's folder; `temperature` where it says none."""
        return self.defaults.sampling(temperature=temperature, seed=seed)

    def generate(
        self,
        prompt: str = "",
        *,
        num_tokens: int | None = None,
        sampling: Sampling | None = None,
        stops: Sequence[str] = (),
    ) -> str:
        """Continue a text; returns the prompt and its continuation.

        Args:
            prompt: the text to continue; empty for a new document.
            num_tokens: maximum number of new tokens; None for the number of the model's folder,
                else 120. A token that ends texts stops earlier.
            sampling: how tokens are sampled; None for the model's folder. Without `stop` the ends
                are those of the folder.
            stops: strings that end the text, not part of it.

        Raises:
            DataError: a prompt longer than the positions of the model.
        """
        pieces = self.stream([prompt], num_tokens=num_tokens, sampling=sampling, stops=stops)
        return prompt + "".join(piece for _, piece in pieces)

    def stream(
        self,
        prompts: Sequence[str],
        *,
        num_tokens: int | None = None,
        sampling: Sampling | None = None,
        stops: Sequence[str] = (),
        use_cache: bool = True,
    ) -> Iterator[tuple[int, str]]:
        """Continue several texts; yields the index of a prompt and the next piece of its text.

        Args:
            prompts: the texts to continue; an empty one is a new document.
            num_tokens: maximum number of new tokens of each; None as in `generate`.
            sampling: how tokens are sampled; None as in `generate`.
            stops: strings that end a text, not part of it.
            use_cache: whether keys and values of the tokens so far are kept.

        Raises:
            DataError: a prompt longer than the positions of the model.
        """
        limit = self.config.model.max_position_embeddings
        encoded = encode_prompts(prompts, self.tokenizer, max_tokens=limit)
        sampling = sampling or self.sampling()
        if sampling.stop is None:
            sampling = replace(sampling, stop=self.defaults.ends)
        most = num_tokens
        if most is None:
            most = self.defaults.max_new_tokens or NUM_TOKENS
        generation = Generation(
            self.layout or self.model,
            encoded,
            num_tokens=most,
            sampling=sampling,
            use_cache=use_cache,
            ranks=self.ranks,
        )
        all_stops = [*stops, *self.defaults.stops]
        return stream_texts(generation, self.tokenizer, num_tokens=most, stops=all_stops)


def load_checkpoint(
    path: Path | str, *, tokenizer: str | None = None, ema: bool = False
) -> LoadedModel:
    """Load the model and the tokenizer of a checkpoint on the CPU.

    `loaded.model.to(device)` moves the model.

    Args:
        path: a step folder, or a run folder for its newest.
        tokenizer: name or path of a tokenizer, as `load_tokenizer` takes it; None for the run's.
        ema: whether the moving average of the weights is loaded (`--ema-decay`).

    Raises:
        CheckpointError: there is no complete checkpoint.
        DataError: the run had no tokenizer.
    """
    return load_model(open_model(Path(path), ema=ema), tokenizer=tokenizer)


def load_model(
    checkpoint: OpenedCheckpoint,
    *,
    tokenizer: str | None = None,
    context: ParallelContext | None = None,
    dtype: str = "fp32",
) -> LoadedModel:
    """Load the model and the tokenizer of an open checkpoint.

    Args:
        checkpoint: a checkpoint of any layout.
        tokenizer: name or path of a tokenizer, as `load_tokenizer` takes it; None for the run's.
        context: device and groups, where every rank loads its shards over tp and ep; None for one
            rank on the CPU.
        dtype: dtype of weights and activations, "fp32", "bf16" or "fp16".

    Raises:
        DataError: the run had no tokenizer.
    """
    loaded = load_prompt_tokenizer(checkpoint, tokenizer)
    defaults = generation_defaults(checkpoint, loaded)  # before the weights, which take longer
    stage = load_stage(checkpoint, context, dtype=dtype)
    ranks = Group.single_rank("world") if context is None else context.group("world")
    return LoadedModel(checkpoint.path, checkpoint.config, stage, loaded, ranks, defaults)


def load_prompt_tokenizer(checkpoint: OpenedCheckpoint, tokenizer: str | None) -> Tokenizer:
    """The tokenizer of a model's prompts.

    Args:
        checkpoint: the model.
        tokenizer: as for `load_model`.

    Raises:
        DataError: the run had no tokenizer.
    """
    name = tokenizer or tokenizer_name(checkpoint)
    if name is None:
        why = why_unknown(checkpoint)
        fix = "set --tokenizer, for example to bytes, a folder or a tokenizer.json"
        raise DataError(f"{checkpoint.path} has no tokenizer", why=why, fix=fix)
    return prompt_tokenizer(load_tokenizer(name), is_pretrained=checkpoint.is_pretrained)


def generation_defaults(checkpoint: OpenedCheckpoint, tokenizer: Tokenizer) -> GenerationDefaults:
    """The generation settings in the folder of a model."""
    defaults_of = defaults_of_folder if checkpoint.manifest is None else defaults_of_run
    return defaults_of(checkpoint.path, tokenizer)


@progress("exporting")
def export_checkpoint(
    path: Path,
    folder: Path,
    *,
    dtype: str = "fp32",
    family: str | None = None,
    tokenizer: str | Path | None = None,
    ema: bool = False,
) -> str:
    """Write a checkpoint as a Hugging Face folder, one tensor at a time; returns a summary line.

    Args:
        path: a step folder, or a run folder for its newest.
        folder: the Hugging Face folder; must be empty.
        dtype: dtype of the exported weights: fp32, bf16, fp16, or auto for each tensor's in
            the folder that the model was imported from.
        family: a `model_type` of Hugging Face; None for the family of the pretrained checkpoint
            that the run started from, else the first that can represent the model.
        tokenizer: name or path of the tokenizer to write, as `load_tokenizer` takes it, or "none";
            None for the run's, or the pretrained checkpoint's where the run's is the same or
            unknown.
        ema: whether the moving average of the weights is written (`--ema-decay`).
    """
    from nanotrain.interop.hf.companions import Companions, fullest_tokenizer
    from nanotrain.interop.hf.export import export_weights
    from nanotrain.interop.hf.names import router_shapes

    checkpoint = open_checkpoint(path, ema=ema)
    model_config = checkpoint.config.model
    specs = declare_model(ModelShape.of(model_config))
    names = [checkpoint.stored_name(spec.name) for spec in specs]
    names += [f"router/{name}" for name in router_shapes(model_config)]
    stored = read_global_tensors(checkpoint.path, names)
    tensors = ((name.partition("/")[2], tensor) for name, tensor in stored)
    pretrained = checkpoint.config.checkpoint.pretrained_checkpoint
    origin = None if pretrained is None else Path(pretrained)
    if tokenizer is None:
        chosen = fullest_tokenizer(tokenizer_name(checkpoint), origin)
    else:
        chosen = str(tokenizer)
    companions = Companions(None if chosen == "none" else chosen, origin)
    written = export_weights(
        folder, model_config, tensors=tensors, dtype=dtype, family=family, companions=companions
    )
    lacking = f"; without a tokenizer: {why_unknown(checkpoint)}" if chosen is None else ""
    return f"{folder}: {written}, {dtype}, from {checkpoint.path}{lacking}"
