"""Names of modules of Megatron-LM, and the modules of nanotrain whose rows they have.

    TABLES           names.yaml
    BUCKET_ORDERS    the modules of a layer in the order of its parameters in a bucket
    blocks           the layers of a model: the beginnings of their names in both programs
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
# beginnings of the names of a module, or of tensors that Megatron-LM joins to one parameter
ModuleNames = tuple[str, ...]


def read_modules(rows: Sequence[str | list[str]]) -> list[ModuleNames]:
    """Rows of names.yaml, each a name or a list of them.

    >>> read_modules(["mixer.D", ["mixer.x", "mixer.B"]])
    [('mixer.D',), ('mixer.x', 'mixer.B')]
    """
    return [(row,) if isinstance(row, str) else tuple(row) for row in rows]


BUCKET_ORDERS: dict[str, list[ModuleNames]] = {
    name: read_modules(rows) for name, rows in TABLES["bucket_order"].items()
}
MAMBA_CONVOLUTIONS = read_modules(TABLES["mamba_convolutions"])
EXPERTS = "mlp.experts.experts."
EXPERT_BIAS = "mlp.router.expert_bias"  # a buffer in Megatron-LM, a router's tensor in nanotrain


@dataclass(frozen=True)
class Block:
    """A layer of the model or of multi-token prediction."""

    layer: int  # its index; layers of multi-token prediction follow the model's
    ours: str  # beginning of its names in nanotrain
    theirs: str  # beginning of its names in Megatron-LM, in tensors of this layer alone
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
    """Modules of nanotrain by the module of Megatron-LM that joins them; {} for unknown kinds."""
    mixer, mlp = shape.kinds(layer)
    return {**TABLES["mixers"].get(mixer, {}), **TABLES["mlps"].get(mlp, {})}


def end_modules(shape: ModelShape) -> dict[str, str]:
    """Modules of nanotrain before and after the layers, by the module of Megatron-LM."""
    left_out = "decoder.final_layernorm." if shape.has_half_layers else "decoder.final_norm."
    return {key: part for key, (part,) in TABLES["ends"].items() if key != left_out}


def middle_dims(module: str) -> tuple[int, ...]:
    """The dims of a tensor of Megatron-LM between its rows and its columns."""
    return (1,) if module.startswith(tuple(TABLES["middle_dim"])) else ()


def leaves(module: str) -> Sequence[str]:
    """The endings of the names of a module's tensors; ("",) for a name that is a tensor's.

    >>> leaves("self_attention.linear_proj."), leaves("self_attention.softmax_offset")
    (('weight', 'bias'), ('',))
    """
    return LEAVES if module.endswith((".", "_")) else ("",)


def num_row_groups(shape: ModelShape, module: str) -> int:
    """The number of row groups of a module of Megatron-LM, whose parts alternate by group."""
    return shape.query_groups if module in TABLES["by_query_group"] else 1


def rotary_pairs(shape: ModelShape, part: str, *, layer: int) -> RotaryPairs | None:
    """The heads of a nanotrain module whose rotary channels Megatron-LM reorders; else None."""
    mixer, _ = shape.kinds(layer)
    sizes = TABLES["rotary_pairs"].get(mixer, {})
    if part not in sizes or shape.mla is None:
        return None
    return RotaryPairs(getattr(shape.mla, sizes[part]), shape.mla.qk_pos_emb_head_dim)
