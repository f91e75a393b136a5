"""The tensor names of a Hugging Face family, and from them the tensors of every parameter.

    HFName, Naming   the names of a family: one table, written by hand beside its config.json (llama.py, gpt2.py, ...)
    map_parameters   every declared parameter of a model -> TensorMapping
    mtp_copies       the copies of embedding and head that files have in their layers of multi-token prediction

Shapes come from the declared parameters. Import and export both read these mappings and nothing else.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from nanotrain.config.config import ModelConfig
from nanotrain.interop.hf.tensor_mapping import TensorMapping
from nanotrain.spec.parameters import declare_model
from nanotrain.spec.shape import ModelShape


@dataclass(frozen=True)
class HFName:
    """The name of a tensor, and what of it is the parameter."""

    # without ".weight" and ".bias" unless `is_full`; with {expert} there is one tensor per expert
    name: str
    fused: tuple[str, ...] = ()  # the modules, itself among them, that the tensor concatenates along the outputs
    transposed: bool = False  # a matrix is stored as [inputs, outputs]
    interleaved: tuple[int, int] = (0, 1)  # of modules whose outputs alternate in the tensor: which, of how many
    is_full: bool = False  # the name has no ".weight" appended
    has_neighbour_pairs: bool = False  # rotary channels are stored so that neighbours are a pair; with MLA


@dataclass(frozen=True)
class Naming:
    """The tensor names of a family."""

    ends: Mapping[str, str]  # names of embedding, final norm and head
    layer: str  # prefix of the tensors of a layer, with {layer}
    # names relative to that prefix, by module name relative to a layer ("attention.query")
    layers: Mapping[str, str | HFName]
    # of a layer of multi-token prediction, whose numbers follow those of the model: what it has beside a layer, and
    # the ends of the model that it has a copy of, both relative to that prefix
    mtp: Mapping[str, str] = field(default_factory=dict)
    mtp_copies: Mapping[str, str] = field(default_factory=dict)


def map_parameters(model_config: ModelConfig, naming: Naming) -> dict[str, TensorMapping]:
    """The tensors of every parameter of a model that the family can hold, by the parameter's name.

    The expert bias of a router, which is no parameter, is among them.
    """
    shape = ModelShape.of(model_config)
    declared = declare_model(replace(shape, padded_vocab_size=shape.vocab_size))
    sizes = {spec.name: spec.shape for spec in declared}
    if (moe := model_config.moe) is not None and moe.router_enable_expert_bias:
        blocks = {layer: f"layers.{layer}" for layer in range(shape.num_layers)}
        blocks |= {layer: f"mtp.{depth}.block" for depth, layer in enumerate(shape.mtp_layers)}
        with_experts = [block for layer, block in blocks.items() if shape.has_experts(layer)]
        sizes |= {f"{block}.mlp.router.expert_bias": (moe.num_experts,) for block in with_experts}
    return {name: _map(name, sizes, naming=naming, shape=shape) for name in sizes}


def mtp_copies(model_config: ModelConfig, naming: Naming) -> dict[str, list[str]]:
    """The copies in layers of multi-token prediction, by the name of the tensor that they are copies of."""
    return {
        f"{naming.ends[end]}.weight": [
            f"{naming.layer.format(layer=layer)}.{name}.weight" for layer in ModelShape.of(model_config).mtp_layers
        ]
        for end, name in naming.mtp_copies.items()
    }


@dataclass(frozen=True)
class _Place:
    """Where a module is: its prefix in the model, its name behind that, the number of its layer, the family's names."""

    prefix: str
    module: str
    layer: int | None  # None at the ends of the model
    names: Mapping[str, str | HFName]

    @classmethod
    def of(cls, module: str, *, naming: Naming, shape: ModelShape) -> "_Place":
        in_layer = re.fullmatch(r"(layers\.(\d+)\.|mtp\.(\d+)\.(block\.)?)(.+)", module)
        if in_layer is None:
            return cls("", module, None, naming.ends)
        prefix, layer, depth, block, rest = in_layer.groups()
        number = int(layer) if layer is not None else shape.mtp_layers[int(depth)]
        return cls(prefix, rest, number, naming.layers if layer is not None or block is not None else naming.mtp)


def _map(name: str, sizes: Mapping[str, tuple[int, ...]], *, naming: Naming, shape: ModelShape) -> TensorMapping:
    module, _, leaf = name.rpartition(".")
    place = _Place.of(module, naming=naming, shape=shape)
    found = place.names.get(f"{place.module}.{leaf}", place.names.get(place.module))
    assert found is not None, f"{name} has no name in this family: the exported model would lack it"
    hf = found if isinstance(found, HFName) else HFName(found)
    tensor = hf.name if place.layer is None else f"{naming.layer.format(layer=place.layer)}.{hf.name}"
    own, offset, num_outputs = sizes[name], 0, None
    if hf.fused and place.layer is not None:
        dim = max(0, len(own) - 2)
        outputs = [sizes[f"{place.prefix}{part}.{leaf}"][dim] for part in hf.fused]
        offset, num_outputs = sum(outputs[: hf.fused.index(place.module)]), sum(outputs)
    return TensorMapping(
        tensor if hf.is_full else f"{tensor}.{leaf}",
        own,
        transposed=hf.transposed and len(own) >= 2,
        interleaved=hf.interleaved,
        is_bias=leaf == "bias" and len(own) >= 2,
        offset=offset,
        num_outputs=num_outputs,
        rows=_neighbour_rows(own[0], shape) if hf.has_neighbour_pairs else None,
    )


def _neighbour_rows(num_rows: int, shape: ModelShape) -> tuple[int, ...]:
    """The stored row of every row, where the last R rows of each head store pair i as rows 2 i and 2 i + 1.

    Of the rows that produce compressed keys and values, the last R are one head of rotary channels.
    """
    assert shape.mla is not None, "only MLA is stored this way"
    rotary = shape.mla.rope_dim
    head = shape.head_dim if num_rows == shape.num_heads * shape.head_dim else num_rows

    def stored(row: int) -> int:
        channel = row % head - (head - rotary)  # negative without position
        if channel < 0:
            return row
        pair, half = channel % (rotary // 2), channel // (rotary // 2)
        return row - channel + 2 * pair + half

    return tuple(map(stored, range(num_rows)))
