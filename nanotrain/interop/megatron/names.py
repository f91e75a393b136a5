"""Names of modules of Megatron-LM, and the modules of ours whose rows they have.

    TABLES           names.yaml
    blocks           the layers of a model: where their names begin, ours and theirs
    block_modules    the modules of a layer
    end_modules      the modules before and behind the layers
    leaves           the tensors that a module can have

Import and export read the same rows, so that each is the inverse of the other.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nanotrain.interop.megatron.rows import RotaryPairs
from nanotrain.spec.shape import ModelShape

LEAVES = ("weight", "bias")
TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text())
EXPERTS = "mlp.experts.experts."
EXPERT_BIAS = "mlp.router.expert_bias"  # a buffer there, a tensor of the router here


@dataclass(frozen=True)
class Block:
    """A layer of the model, or the one of multi-token prediction."""

    layer: int  # its index; those of multi-token prediction are behind the others
    ours: str  # beginning of our names
    theirs: str  # beginning of their names, in a tensor of its own
    stacked: str | None  # beginning of the names of tensors of all layers; None: there are none


def blocks(shape: ModelShape) -> Iterator[Block]:
    """All layers of a model."""
    stacked = None if shape.has_half_layers else "decoder.layers."
    for layer in range(shape.num_layers):
        theirs = f"decoder.layers.{layer}."
        yield Block(layer, f"layers.{layer}.", theirs, stacked=stacked)
    for depth, layer in enumerate(shape.mtp_layers):
        theirs = f"mtp.layers.{depth}.transformer_layer."
        yield Block(layer, f"mtp.{depth}.block.", theirs, stacked=None)


def block_modules(shape: ModelShape, layer: int) -> Mapping[str, Sequence[str]]:
    """The modules of ours by the module there that joins them; nothing for unknown kinds."""
    mixer, mlp = shape.kinds(layer)
    return {**TABLES["mixers"].get(mixer, {}), **TABLES["mlps"].get(mlp, {})}


def end_modules(shape: ModelShape) -> dict[str, str]:
    """The modules of ours before and behind the layers, by the module there."""
    left_out = "decoder.final_layernorm." if shape.has_half_layers else "decoder.final_norm."
    return {key: part for key, (part,) in TABLES["ends"].items() if key != left_out}


def middle_dims(module: str) -> tuple[int, ...]:
    """The dims of a tensor there between its rows and its columns."""
    return (1,) if module.startswith(tuple(TABLES["middle_dim"])) else ()


def leaves(module: str) -> Sequence[str]:
    """What the names of the tensors of a module end in; a full name is a tensor itself.

    >>> leaves("self_attention.linear_proj."), leaves("self_attention.softmax_offset")
    (('weight', 'bias'), ('',))
    """
    return LEAVES if module.endswith((".", "_")) else ("",)


def num_row_groups(shape: ModelShape, module: str) -> int:
    """The number of row groups of a module there, whose parts alternate group by group."""
    return shape.query_groups if module in TABLES["by_query_group"] else 1


def rotary_pairs(shape: ModelShape, part: str, *, layer: int) -> RotaryPairs | None:
    """How the rotary channels of a module of ours are stored there; None: in the same order."""
    mixer, _ = shape.kinds(layer)
    sizes = TABLES["rotary_pairs"].get(mixer, {})
    if part not in sizes or shape.mla is None:
        return None
    return RotaryPairs(getattr(shape.mla, sizes[part]), shape.mla.qk_pos_emb_head_dim)
