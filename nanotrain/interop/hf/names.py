"""The tensor names of a Hugging Face family, and the tensors of every parameter of a model.

    HFName, Naming       the names of a family: a table in families.yaml
    UnnamedParameter     a parameter that these names lack
    map_parameters       every declared parameter of a model -> TensorMapping
    tensor_shapes        names and shapes of all tensors of a model
    router_shapes        what routers have besides parameters: expert biases, experts of tokens
    checkpoint_shapes    all weights by their names in a checkpoint
    mtp_copies           copies of embedding and head in the layers of multi-token prediction
    constant_tensors     tensors that the files have and the model lacks

Shapes come from the declared parameters. Import and export both read these mappings and nothing
else.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple

from nanotrain.config.model import ModelConfig
from nanotrain.interop.hf.tensor_mapping import Interleave, Shape, TensorMapping
from nanotrain.spec.parameters import declare_model
from nanotrain.spec.shape import ModelShape

# the last part of the name of a table with the experts of every token: whole numbers in files
TOKEN_EXPERTS = "token_experts"
Sizes = Mapping[str, Shape]  # shapes of parameters by name


@dataclass(frozen=True)
class HFName:
    """The name of a tensor in a Hugging Face file, and how the parameter is stored in it."""

    # without ".weight" and ".bias" unless `is_full`; with {expert}, there is one tensor per expert
    name: str
    # modules, this one among them, that the tensor concatenates along the outputs
    fused: Sequence[str] = ()
    transposed: bool = False  # a matrix is stored as [inputs, outputs]
    # first output of the parameter, and distance between its outputs, as in `Interleave`
    interleaved: Sequence[int] = Interleave()
    # number of groups, or the attribute of `ModelShape` with it, if the fused modules are stored
    # group by group: [group 0 of each module | group 1 of each module | ...]
    groups: str | int = ""
    is_full: bool = False  # the name has no ".weight" appended
    has_neighbour_pairs: bool = False  # rotary channels are stored so that neighbours are a pair
    has_swapped_halves: bool = False  # rotary channels are stored with their second half first
    unsqueezed: Sequence[int] = ()  # dims of size 1 that only the tensor of the weight has
    is_rotary_first: bool = False  # rotary channels are the first of an indexer's head


@dataclass(frozen=True, kw_only=True)
class Naming:
    """The tensor names of a family."""

    # names of embedding, final norm and head; names of the ends of streams are `HFName`s
    ends: Mapping[str, Any]
    other_ends: Mapping[str, Any] = field(default_factory=dict)  # read and never written
    layer: str  # prefix of the tensors of a layer, with {layer}
    # names relative to that prefix, by module name in a layer ("attention.query"), or with the
    # layer's kind instead of "attention" ("kda.query", "kda_norm")
    layers: Mapping[str, HFName]
    other_layers: Sequence[Mapping[str, HFName]] = ()  # names that are read and never written
    # names, relative to that prefix, of the modules that only a layer of multi-token prediction
    # has; these layers have the numbers after the model's
    mtp: Mapping[str, str] = field(default_factory=dict)
    # names, relative to that prefix, of its copies of embedding and head, by their keys in `ends`
    mtp_copies: Mapping[str, str] = field(default_factory=dict)
    # values of scalars that the files have in every layer, by their name in it
    constants: Mapping[str, float] = field(default_factory=dict)
    # names, with {expert}, of matrices of experts that return their input: transformers demands
    # them, and computes nothing with them
    zero_experts: Sequence[str] = ()
    # prefix, with {depth}, of a layer of multi-token prediction where it has another one than
    # `layer`; names in `mtp` are then full
    mtp_layer: str = ""


class UnnamedParameter(LookupError):
    """A parameter of a model that a family has no name for."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} has no name in this family: the exported model would lack it")


def map_parameters(model_config: ModelConfig, naming: Naming) -> dict[str, TensorMapping]:
    """The tensors of every parameter of a model that the family can hold, by the parameter's name.

    Buffers of routers are included.

    Raises:
        UnnamedParameter: the family cannot hold the model.
    """
    shape = ModelShape.of(model_config)
    unpadded = replace(shape, padded_vocab_size=shape.vocab_size)
    sizes = {spec.name: spec.shape for spec in declare_model(unpadded)}
    sizes |= router_shapes(model_config)
    mappings = {}
    for name in sizes:
        parameter = _split_name(name, naming=naming, shape=shape)
        mappings[name] = _map_parameter(parameter, sizes, shape=shape)
    return mappings


def tensor_shapes(mappings: Mapping[str, TensorMapping]) -> dict[str, Shape]:
    """Names and shapes of all tensors of a model."""
    shapes: dict[str, Shape] = {}
    for mapping in mappings.values():
        shapes |= mapping.tensor_shapes
    return shapes


def router_shapes(model_config: ModelConfig) -> dict[str, Shape]:
    """Shapes of the routers' buffers by name in a checkpoint, without its beginning "router/"."""
    moe = model_config.moe
    if moe is None:
        return {}
    shape = ModelShape.of(model_config)
    blocks = {layer: f"layers.{layer}" for layer in range(shape.num_layers)}
    for depth, layer in enumerate(shape.mtp_layers):
        blocks[layer] = f"mtp.{depth}.block"
    hashed = [layer for layer, is_hashed in enumerate(model_config.hash_layers) if is_hashed]
    shapes: dict[str, Shape] = {}
    for layer, block in blocks.items():
        router = f"{block}.mlp.router"
        if layer in hashed:
            shapes[f"{router}.{TOKEN_EXPERTS}"] = (shape.vocab_size, moe.router_topk)
        elif shape.has_experts(layer) and moe.router_enable_expert_bias:
            shapes[f"{router}.expert_bias"] = (moe.num_choices,)
    return shapes


def checkpoint_shapes(model_config: ModelConfig) -> dict[str, Shape]:
    """Shapes of all weights, by their names in a checkpoint."""
    shapes: dict[str, Shape] = {}
    for spec in declare_model(ModelShape.of(model_config)):
        shapes[f"model/{spec.name}"] = spec.shape
    for name, shape in router_shapes(model_config).items():
        shapes[f"router/{name}"] = shape
    return shapes


def mtp_copies(model_config: ModelConfig, naming: Naming) -> dict[str, list[str]]:
    """Copies in the layers of multi-token prediction, by the name of the original tensor."""
    layers = ModelShape.of(model_config).mtp_layers
    prefixes = [naming.layer.format(layer=layer) for layer in layers]
    copies = {}
    for end, name in naming.mtp_copies.items():
        original = f"{naming.ends[end]}.weight"
        copies[original] = [f"{prefix}.{name}.weight" for prefix in prefixes]
    return copies


class Constant(NamedTuple):
    """A tensor whose elements are all equal."""

    value: float
    shape: Shape


def constant_tensors(model_config: ModelConfig, naming: Naming) -> dict[str, Constant]:
    """Tensors that the files have and the model lacks: scalar constants and zero expert weights."""
    constants = {name: Constant(value, ()) for name, value in naming.constants.items()}
    moe = model_config.moe
    if moe is not None:
        zeros = Constant(0.0, (model_config.moe_ffn_size, model_config.expert_input_size))
        for expert in range(moe.num_experts, moe.num_choices):
            for name in naming.zero_experts:
                constants[name.format(expert=expert)] = zeros
    tensors = {}
    for layer in range(model_config.num_layers):
        prefix = naming.layer.format(layer=layer)
        for name, constant in constants.items():
            tensors[f"{prefix}.{name}"] = constant
    return tensors


@dataclass(frozen=True)
class _Parameter:
    """A parameter by the parts of its name, and the name of its tensor in a family."""

    block: str  # "layers.3." or "mtp.0.block."; "" outside of layers
    module: str  # "attention.query"
    leaf: str  # "weight" or "bias"
    prefix: str  # prefix of the tensor's name
    hf: HFName

    @property
    def name(self) -> str:
        """The parameter's name."""
        return f"{self.block}{self.module}.{self.leaf}"

    @property
    def tensor(self) -> str:
        """The full name of the tensor."""
        if self.hf.is_full:
            return f"{self.prefix}{self.hf.name}"
        return f"{self.prefix}{self.hf.name}.{self.leaf}"


def _split_name(name: str, *, naming: Naming, shape: ModelShape) -> _Parameter:
    """Split the name of a parameter, and look up its tensor in the tables of a family."""
    path, _, leaf = name.rpartition(".")
    in_layer = re.fullmatch(r"(layers\.(\d+)\.|mtp\.(\d+)\.(?:block\.)?)(.+)", path)
    if in_layer is None:
        hf = _find_name(naming.ends, path, leaf=leaf)
        if hf is None:
            raise UnnamedParameter(name)
        return _Parameter("", path, leaf=leaf, prefix="", hf=hf)
    block, layer, depth, module = in_layer.groups()
    number = int(layer) if layer else shape.mtp_layers[int(depth)]
    kind = str(shape.kinds(number)[0])
    prefix = f"{naming.layer.format(layer=number)}."
    names: Mapping[str, str | HFName] = naming.layers
    is_beside_block = bool(depth) and not block.endswith("block.")
    if is_beside_block:
        names = naming.mtp
    if depth and naming.mtp_layer:
        prefix = "" if is_beside_block else f"{naming.mtp_layer.format(depth=depth)}."
    hf = _find_name(names, module, leaf=leaf, kind=kind)
    if hf is None:
        raise UnnamedParameter(name)
    return _Parameter(block, module, leaf=leaf, prefix=prefix, hf=hf)


def _find_name(
    names: Mapping[str, str | HFName], module: str, *, leaf: str, kind: str = "attention"
) -> HFName | None:
    """The entry of a module; one with the kind of its layer or with its leaf comes first."""
    for candidate in (re.sub("^attention", kind, module), module):
        for key in (f"{candidate}.{leaf}", candidate):
            if key in names:
                name = names[key]
                return name if isinstance(name, HFName) else HFName(name)
    return None


def _map_parameter(parameter: _Parameter, sizes: Sizes, *, shape: ModelShape) -> TensorMapping:
    """The tensors of one parameter, from its size and the sizes of fused modules."""
    hf = parameter.hf
    own_shape = sizes[parameter.name]
    num_rows = own_shape[0]
    is_bias = parameter.leaf == "bias"
    is_matrix = len(own_shape) >= 2
    fused = _find_fused_outputs(parameter, sizes) if hf.fused else _FusedOutputs(0, None)
    rows = None
    if hf.has_neighbour_pairs or hf.has_swapped_halves:
        rows = _rotary_rows(num_rows, shape, hf=hf)
    if hf.groups:
        num_groups = hf.groups if isinstance(hf.groups, int) else attrgetter(hf.groups)(shape)
        grouped = _grouped_rows(num_rows, fused, num_groups=num_groups)
        rows = grouped if rows is None else tuple(grouped[row] for row in rows)
    return TensorMapping(
        parameter.tensor,
        own_shape,
        transposed=hf.transposed and is_matrix,
        interleaved=Interleave(*hf.interleaved),
        is_bias=is_bias and is_matrix,
        offset=fused.offset,
        num_outputs=fused.total,
        unsqueezed=() if is_bias else hf.unsqueezed,
        rows=rows,
    )


class _FusedOutputs(NamedTuple):
    """The outputs of a tensor that are a parameter."""

    offset: int  # the first one
    total: int | None  # outputs of the tensor; None for as many as the parameter's


def _find_fused_outputs(parameter: _Parameter, sizes: Sizes) -> _FusedOutputs:
    """The outputs of a parameter in the tensor that it is fused into."""
    fused = parameter.hf.fused
    output_dim = max(0, len(sizes[parameter.name]) - 2)
    outputs = []
    for module in fused:
        size = sizes[f"{parameter.block}{module}.{parameter.leaf}"]
        outputs.append(size[output_dim])
    offset = sum(outputs[: fused.index(parameter.module)])
    return _FusedOutputs(offset, total=sum(outputs))


def _grouped_rows(num_rows: int, fused: _FusedOutputs, *, num_groups: int) -> tuple[int, ...]:
    """For every row of a parameter, the row of a fused tensor that holds it.

    The tensor has groups of rows, one after another; each has some rows of every fused module.
    """
    rows_per_group = num_rows // num_groups
    fused_per_group = (fused.total or num_rows) // num_groups
    first = fused.offset // num_groups
    rows = []
    for row in range(num_rows):
        group, row_of_group = divmod(row, rows_per_group)
        rows.append(group * fused_per_group + first + row_of_group)
    return tuple(rows)


def _rotary_rows(num_rows: int, shape: ModelShape, *, hf: HFName) -> tuple[int, ...]:
    """For every row of a parameter, the row of the stored tensor that holds it.

    Only the R rotary rows of a head are in another order.

    Pair i is stored as rows 2 i and 2 i + 1, or as rows R/2 + i and i. The rotary rows are the
    first of a head, with MLA the last. The rows of compressed keys have one head.
    """
    rotary = shape.rotary_dim
    head = shape.head_dim
    if shape.mla is not None and num_rows != shape.num_heads * shape.head_dim:
        head = num_rows
    first = 0 if shape.mla is None else head - rotary
    if hf.is_rotary_first and shape.dsa is not None:
        head, first = shape.dsa.head_dim, 0

    def stored(row: int) -> int:
        channel = row % head - first
        if not 0 <= channel < rotary:  # without position
            return row
        if hf.has_swapped_halves:
            return row - channel + (channel + rotary // 2) % rotary
        pair, half = channel % (rotary // 2), channel // (rotary // 2)
        return row - channel + 2 * pair + half

    return tuple(map(stored, range(num_rows)))
