"""What is made of a checkpoint without a run: a text, or a Hugging Face folder.

The checkpoint says itself which model it holds (its manifest keeps the configuration), so a path is enough.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nanotrain.checkpoint.read import read_full
from nanotrain.checkpoint.store import find_checkpoint, read_manifest
from nanotrain.config.config import Config
from nanotrain.config.schema import config_from_dict
from nanotrain.data.build import tokenizer_of, uses_quickstart
from nanotrain.data.sources import tokenizer_beside
from nanotrain.data.tokenizer import load_tokenizer
from nanotrain.errors import DataError
from nanotrain.hf.export import export_weights
from nanotrain.inference.generate import Sampling, generate
from nanotrain.model.build import build_stage, collect_specs
from nanotrain.model.stage import Stage
from nanotrain.runs.folder import RunFolder
from nanotrain.topology.stages import split_layers

PREFIX = "model/"  # of the names of main weights in a checkpoint


@dataclass(frozen=True)
class Found:
    """A checkpoint and the configuration it was written under."""

    path: Path
    config: Config


def find(path: Path) -> Found:
    """The checkpoint that a step folder or a run folder means.

    Raises:
        CheckpointError: there is no complete one.
    """
    step = find_checkpoint(path)
    return Found(step, config_from_dict(read_manifest(step).config))


def load_stage(found: Found) -> Stage:
    """The whole model of a checkpoint, fp32 on the CPU."""
    (spec,) = split_layers(found.config.model.num_layers, 1)
    stage = build_stage(found.config.model, spec, dtype=torch.float32).to_empty(device="cpu")
    parameters = dict(stage.named_parameters())
    with torch.no_grad():
        for name, tensor in read_full(found.path, [PREFIX + name for name in parameters]):
            parameters[name.removeprefix(PREFIX)].copy_(tensor)
    return stage


def tokenizer_name(found: Found) -> str | None:
    """The tokenizer of the run that wrote a checkpoint: asked for, beside its data, or of its quick-start corpus."""
    data = found.config.data
    if not uses_quickstart(data) or data.tokenizer_model:
        return tokenizer_of(data)
    prepared = RunFolder(found.path.parent.parent).data.glob(f"*-bpe-{data.quickstart_vocab_size}-*/*.idx")
    return next((tokenizer_beside(index.with_suffix("")) for index in sorted(prepared, reverse=True)), None)


def continue_text(
    path: Path, prompt: str, *, num_tokens: int = 120, sampling: Sampling | None = None, tokenizer: str | None = None
) -> str:
    """A text by the model of a checkpoint.

    Args:
        path: a step folder, or a run folder for its newest.
        prompt: the text to continue; empty for a new document.
        num_tokens: length of what is added, at most: the model may end the document.
        sampling: how tokens are chosen; the end of a document always stops.
        tokenizer: in the form `load_tokenizer` takes; None takes the run's.

    Returns:
        The prompt and what follows it.

    Raises:
        CheckpointError: there is no complete checkpoint.
        DataError: the run had no tokenizer.
    """
    found = find(path)
    name = tokenizer or tokenizer_name(found)
    if name is None:
        raise DataError(f"{found.path} can write no text", why="no tokenizer lies with its data", fix="set --tokenizer")
    coder = load_tokenizer(name)
    words = coder.encode(prompt) or ([coder.eod] if coder.eod is not None else coder.encode("\n"))
    sampling = replace(sampling or Sampling(), stop=coder.eod)
    written = generate(load_stage(found), words, num_tokens=num_tokens, sampling=sampling)
    return prompt + coder.decode([token for token in written if token != coder.eod])


def export_checkpoint(
    path: Path, folder: Path, *, dtype: str = "fp32", family: str | None = None, tokenizer: Path | None = None
) -> str:
    """Write the weights of a checkpoint as a Hugging Face folder, reading one tensor at a time.

    Args:
        path: a step folder, or a run folder for its newest.
        folder: the Hugging Face folder; must hold no weights yet.
        dtype: fp32, bf16 or fp16, of the weights written.
        family: gpt2, llama, qwen2 or qwen3; None takes the first that can hold the model.
        tokenizer: a tokenizer.json or a folder, copied beside the weights; None takes the run's where it is a folder.

    Returns:
        A line that says what was written.
    """
    found = find(path)
    model = found.config.model
    (spec,) = split_layers(model.num_layers, 1)
    names = [PREFIX + spec.name for spec in collect_specs(build_stage(model, spec, dtype=torch.float32))]
    whole = ((name.removeprefix(PREFIX), tensor) for name, tensor in read_full(found.path, names))
    written = export_weights(
        folder, model, tensors=whole, dtype=dtype, family=family, tokenizer=tokenizer or _tokenizer_folder(found)
    )
    return f"{folder}: {written}, {dtype}, from {found.path}"


def _tokenizer_folder(found: Found) -> Path | None:
    """The run's tokenizer where it lies on this machine; one from the hub is named there already."""
    name = tokenizer_name(found)
    return Path(name) if name is not None and Path(name).exists() else None
