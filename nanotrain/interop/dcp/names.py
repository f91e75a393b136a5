"""The names of tensors in programs of PyTorch, and the tensors there of every parameter of ours.

    torchtitan_namings    the names of torchtitan's models, by version
    embedding_names       the names of word embeddings, by which a model is found among keys
    choose_mappings       the tensors of every parameter, with the names that a checkpoint has
    read_parameter        one box of a parameter

Models of transformers have the names of their family (interop/hf).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from nanotrain.config.model import ModelConfig
from nanotrain.errors import CheckpointError
from nanotrain.interop.hf.families import FAMILIES
from nanotrain.interop.hf.names import HFName, Naming, UnnamedParameter, map_parameters
from nanotrain.interop.hf.tensor_mapping import Shape, TensorMapping
from nanotrain.spec.boxes import Box

TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("torchtitan.yaml").read_text())
TORCHTITAN = f"{TABLE['ends']['embedding.word']}.weight"
Read = Callable[[str, Box], Tensor]  # a box of a tensor, by its name


def embedding_names() -> set[str]:
    """The names of the word embeddings of torchtitan and of all families."""
    names = {TORCHTITAN}
    for family in FAMILIES.values():
        names.add(f"{family.ends['embedding.word']}.weight")
    return names


def torchtitan_namings(model_config: ModelConfig) -> list[Naming]:
    """The names that torchtitan's versions have for the tensors of a model, newest first."""
    tables = [TABLE["ends"], TABLE["layers"]]
    versions = [len(versions_of(name)) for table in tables for name in table.values()]
    # Qwen3, which norms queries and keys, has the rotary halves of Hugging Face
    is_complex = not model_config.qk_layernorm
    return [torchtitan_naming(version, is_complex=is_complex) for version in range(max(versions))]


def torchtitan_naming(version: int, *, is_complex: bool) -> Naming:
    """The names of one version.

    Args:
        version: index in lists of names; shorter lists end with their oldest name.
        is_complex: whether rotary channels are pairs of neighbours.
    """
    ends = {end: name_of(names, version) for end, names in TABLE["ends"].items()}
    layers = {}
    for module, names in TABLE["layers"].items():
        name = name_of(names, version)
        entry = HFName(**name) if isinstance(name, dict) else HFName(name)
        has_pairs = is_complex and module in TABLE["complex"]
        layers[module] = replace(entry, has_neighbour_pairs=has_pairs)
    return Naming(ends=ends, layer=TABLE["layer"], layers=layers)


def versions_of(names: Any) -> list[Any]:
    """The names of a module in all versions."""
    return names if isinstance(names, list) else [names]


def name_of(names: Any, version: int) -> Any:
    """The name of a module in a version of torchtitan; its oldest name where lists end earlier."""
    versions = versions_of(names)
    return versions[min(version, len(versions) - 1)]


def choose_mappings(
    model_config: ModelConfig, namings: Sequence[Naming], *, present: Mapping[str, Shape]
) -> dict[str, TensorMapping]:
    """The tensors of every parameter, with the first names that the checkpoint has.

    Args:
        model_config: the model.
        namings: the possible names.
        present: shapes of the tensors by name.

    Raises:
        CheckpointError: a parameter has no name in them.
    """
    try:
        candidates = [map_parameters(model_config, naming) for naming in namings]
    except UnnamedParameter as error:
        raise CheckpointError(
            "the model has a part that has no name in the program that wrote the checkpoint",
            why=str(error),
            fix="set the model of the checkpoint, or import its weights as a Hugging Face folder",
        ) from None
    chosen = {}
    for name in candidates[0]:
        mappings = [candidate[name] for candidate in candidates]
        chosen[name] = best_mapping(mappings, present)
    return chosen


def best_mapping(mappings: Sequence[TensorMapping], present: Mapping[str, Shape]) -> TensorMapping:
    """The first of several mappings whose tensors are there."""
    for mapping in mappings:
        if mapping.tensor_shapes.keys() <= present.keys():
            return mapping
    return mappings[0]


def read_parameter(mapping: TensorMapping, box: Box, *, read: Read) -> Tensor:
    """One box of a parameter in fp32; rows of the vocabulary's padding are zero.

    Args:
        mapping: the tensors of the parameter.
        box: the box.
        read: returns a box of a tensor.
    """
    values = torch.zeros(box.shape)
    unpadded = box.intersect(Box.full(mapping.shape))
    if unpadded is None:
        return values
    inner = unpadded.within(box)
    if mapping.rows is not None:
        values[inner.slices()] = read_rows(mapping, unpadded, read=read)
        return values
    for part in mapping.slices(unpadded):
        stored = read(part.tensor, part.stored)
        values[part.box.within(box).slices()] = part.as_parameter(stored).float()
    return values


def read_rows(mapping: TensorMapping, box: Box, *, read: Read) -> Tensor:
    """One box of a parameter whose rows have another order in the tensor.

    The rows between the first and the last one are read together: one by one would take a look
    into the file for each.
    """
    assert mapping.rows is not None
    rows = torch.tensor(mapping.rows[box.start[0] : box.stop[0]])
    first = int(rows.min())
    last = int(rows.max())
    stored = read(mapping.tensor, Box((first, *box.start[1:]), (last + 1, *box.stop[1:])))
    return stored[rows - first].float()
