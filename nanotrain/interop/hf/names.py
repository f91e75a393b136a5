"""The tensor names of a Hugging Face family, and where a parameter is in its tensors.

    HFName, Naming   the names of a family: a table in families.yaml
    map_parameters   every declared parameter of a model -> TensorMapping: its tensors, and their slices for any box
    mtp_copies       the copies of embedding and head that files have in their layers of multi-token prediction
    constants_of     what files have beside the parameters

Shapes come from the declared parameters. Import and export both read these mappings and nothing
else.

Most parameters are one tensor. Some are a slice of one (GPT-2's query, key and value; gate and up
of fused experts). Stacked experts are one tensor per expert where a family stores them apart. Some
have their rows in another order (rotary channels of DeepSeek-V3; query, key, value and gate of
Qwen3-Next, head by head).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from torch import Tensor

from nanotrain.config.model import ModelConfig
from nanotrain.spec.boxes import Box
from nanotrain.spec.parameters import declare_model
from nanotrain.spec.shape import ModelShape

EXPERT = "{expert}"
Constant = tuple[float, tuple[int, ...]]  # the value of all elements of a tensor, and its shape


@dataclass(frozen=True)
class HFName:
    """The name of a tensor, and what of it is the parameter."""

    # without ".weight" and ".bias" unless `is_full`; with {expert} there is one tensor per expert
    name: str
    # the modules, itself among them, that the tensor concatenates along the outputs
    fused: Sequence[str] = ()
    transposed: bool = False  # a matrix is stored as [inputs, outputs]
    # of modules whose outputs alternate in the tensor: which, of how many
    interleaved: Sequence[int] = (0, 1)
    # where outputs are in groups with a part of every fused module: their number in `ModelShape`
    groups: str = ""
    is_full: bool = False  # the name has no ".weight" appended
    has_neighbour_pairs: bool = False  # rotary channels are stored so that neighbours are a pair
    has_swapped_halves: bool = False  # rotary channels are stored with their second half first
    # dims of size 1 that the tensor (of a weight) has and the parameter has not
    unsqueezed: Sequence[int] = ()
    is_rotary_first: bool = False  # they are the first channels of a head of the indexer


@dataclass(frozen=True, kw_only=True)
class Naming:
    """The tensor names of a family."""

    ends: Mapping[str, str]  # names of embedding, final norm and head
    layer: str  # prefix of the tensors of a layer, with {layer}
    # names relative to that prefix, by module name in a layer ("attention.query"), or with the kind
    # of the layer in place of "attention" ("kda.query", "kda_norm")
    layers: Mapping[str, HFName]
    other_layers: Sequence[Mapping[str, HFName]] = ()  # names that are read and never written
    # of a layer of multi-token prediction, whose numbers follow those of the model: what it has
    # beside a layer, and the ends of the model that it has a copy of, both relative to that prefix
    mtp: Mapping[str, str] = field(default_factory=dict)
    mtp_copies: Mapping[str, str] = field(default_factory=dict)
    # values of scalars that files have in every layer, by their name in it
    constants: Mapping[str, float] = field(default_factory=dict)
    # of matrices as those of gates, with {expert}, of experts that return their input: transformers
    # demands them, and computes nothing with them
    zero_experts: Sequence[str] = ()
    # prefix with {depth} where these layers have one of their own; names in `mtp` are then full
    mtp_layer: str = ""


def map_parameters(model_config: ModelConfig, naming: Naming) -> dict[str, "TensorMapping"]:
    """The tensors of every parameter of a model that the family can hold, by the parameter's name.

    The expert bias of a router, which is no parameter, is among them.
    """
    shape = ModelShape.of(model_config)
    declared = declare_model(replace(shape, padded_vocab_size=shape.vocab_size))
    sizes = {spec.name: spec.shape for spec in declared} | expert_bias_shapes(model_config)
    return {name: _map(name, sizes, naming=naming, shape=shape) for name in sizes}


def tensor_shapes(mappings: Mapping[str, "TensorMapping"]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a model."""
    return {
        name: shape
        for mapping in mappings.values()
        for name, shape in mapping.tensor_shapes.items()
    }


def expert_bias_shapes(model_config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the expert biases of routers, by their names behind "router/" in a checkpoint."""
    shape, moe = ModelShape.of(model_config), model_config.moe
    if moe is None or not moe.router_enable_expert_bias:
        return {}
    blocks = {layer: f"layers.{layer}" for layer in range(shape.num_layers)}
    blocks |= {layer: f"mtp.{depth}.block" for depth, layer in enumerate(shape.mtp_layers)}
    with_experts = [block for layer, block in blocks.items() if shape.has_experts(layer)]
    return {f"{block}.mlp.router.expert_bias": (moe.num_choices,) for block in with_experts}


def mtp_copies(model_config: ModelConfig, naming: Naming) -> dict[str, list[str]]:
    """The copies in layers of multi-token prediction, by the name of the tensor that they are
    copies of.
    """
    return {
        f"{naming.ends[end]}.weight": [
            f"{naming.layer.format(layer=layer)}.{name}.weight"
            for layer in ModelShape.of(model_config).mtp_layers
        ]
        for end, name in naming.mtp_copies.items()
    }


def constants_of(model_config: ModelConfig, naming: Naming) -> dict[str, Constant]:
    """The values and shapes of what files have beside the parameters, by name: scalars, and zeros
    of experts.
    """
    moe, layers = (
        model_config.moe,
        [naming.layer.format(layer=layer) for layer in range(model_config.num_layers)],
    )
    constants: dict[str, Constant] = {name: (value, ()) for name, value in naming.constants.items()}
    if moe is not None:
        zeros = 0.0, (model_config.moe_ffn_size, model_config.expert_input_size)
        numbers = range(moe.num_experts, moe.num_choices)
        constants |= {
            name.format(expert=number): zeros for number in numbers for name in naming.zero_experts
        }
    return {f"{layer}.{name}": constant for layer in layers for name, constant in constants.items()}


def _map(
    name: str, sizes: Mapping[str, tuple[int, ...]], *, naming: Naming, shape: ModelShape
) -> "TensorMapping":
    path, _, leaf = name.rpartition(".")
    in_layer = re.fullmatch(r"(layers\.(\d+)\.|mtp\.(\d+)\.(?:block\.)?)(.+)", path)
    names: Mapping[str, str | HFName] = naming.ends
    prefix, module, parent, kind = "", path, "", "attention"
    if in_layer is not None:
        prefix, layer, depth, module = in_layer.groups()
        names = naming.mtp if depth and not prefix.endswith("block.") else naming.layers
        number = int(layer) if layer else shape.mtp_layers[int(depth)]
        parent, kind = f"{naming.layer.format(layer=number)}.", str(shape.kinds(number)[0])
        if depth and naming.mtp_layer:
            parent = "" if names is naming.mtp else f"{naming.mtp_layer.format(depth=depth)}."
    keys = [
        key
        for each in (re.sub("^attention", kind, module), module)
        for key in (f"{each}.{leaf}", each)
    ]
    known = next((names[key] for key in keys if key in names), None)
    assert known is not None, f"{name} has no name in this family: the exported model would lack it"
    hf = known if isinstance(known, HFName) else HFName(known)
    own, offset, num_outputs = sizes[name], 0, None
    rows = (
        _rotary_rows(own[0], shape, hf=hf)
        if hf.has_neighbour_pairs or hf.has_swapped_halves
        else None
    )
    if hf.fused:
        dim = max(0, len(own) - 2)
        outputs = [sizes[f"{prefix}{part}.{leaf}"][dim] for part in hf.fused]
        offset, num_outputs = sum(outputs[: hf.fused.index(module)]), sum(outputs)
    if hf.groups:
        num_groups = attrgetter(hf.groups)(shape)
        width, stride, first = (
            size // num_groups for size in (own[0], num_outputs or own[0], offset)
        )
        rows = tuple(row // width * stride + first + row % width for row in range(own[0]))
    return TensorMapping(
        parent + (hf.name if hf.is_full else f"{hf.name}.{leaf}"),
        own,
        transposed=hf.transposed and len(own) >= 2,
        interleaved=hf.interleaved,
        is_bias=leaf == "bias" and len(own) >= 2,
        offset=offset,
        num_outputs=num_outputs,
        unsqueezed=() if leaf == "bias" else hf.unsqueezed,
        rows=rows,
    )


def _rotary_rows(num_rows: int, shape: ModelShape, *, hf: HFName) -> tuple[int, ...]:
    """The stored row of every row, where R rows of each head store pair i as rows 2 i and 2 i + 1,
    or R/2 + i and i.

    They are the first ones; with MLA the last ones, as are those of the one head that the rows of
    compressed keys have.
    """
    rotary = shape.rotary_dim
    head = (
        shape.head_dim
        if shape.mla is None or num_rows == shape.num_heads * shape.head_dim
        else num_rows
    )
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


@dataclass(frozen=True)
class TensorSlice:
    """The part of a parameter in one tensor."""

    tensor: str  # name of the tensor
    stored: Box  # box of the part in the tensor
    box: Box  # its box in the parameter
    transposed: bool  # the tensor has the last two dims of the parameter swapped
    interleaved: Sequence[int] = (0, 1)  # as in `TensorMapping`, along the last stored dim

    def as_parameter(self, stored: Tensor) -> Tensor:
        """Stored values in the parameter's shape."""
        stored = self.picked(stored)
        return (stored.mT if self.transposed else stored).reshape(self.box.shape)

    def as_stored(self, part: Tensor) -> Tensor:
        """Values of the parameter in the shape of `picked`."""
        if self.transposed:
            return part.mT
        return part.reshape(self.stored.shape) if self.interleaved[1] == 1 else part

    def picked(self, stored: Tensor) -> Tensor:
        """The elements of the tensor's box that belong to the parameter, as a view."""
        first, step = self.interleaved
        return stored[..., first::step]


@dataclass(frozen=True)
class TensorMapping:
    """A parameter in Hugging Face tensors.

    Outputs are the last dim but one, as in [outputs, inputs] and [experts, outputs, inputs], and
    the dim of a bias.
    """

    # full name of the tensor; with {expert}, each entry of the parameter's first dim is one tensor
    tensor: str
    shape: tuple[int, ...]  # of the parameter, without the padding of the vocabulary
    # the tensor is [inputs, outputs] where the parameter is [outputs, inputs]
    transposed: bool = False
    offset: int = 0  # the first output of the parameter in the tensor
    num_outputs: int | None = None  # outputs of the tensor; None for those of the parameter
    interleaved: Sequence[int] = (0, 1)  # of parameters whose outputs alternate: which, of how many
    is_bias: bool = False  # outputs are the last dim
    # the row of the tensor for each row of the parameter; None for the same
    rows: tuple[int, ...] | None = None
    unsqueezed: Sequence[int] = ()  # dims of size 1 of the tensor alone

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and full shapes of the tensors.

        >>> TensorMapping("experts.{expert}.w1.weight", (2, 3, 4)).tensor_shapes
        {'experts.0.w1.weight': (3, 4), 'experts.1.w1.weight': (3, 4)}
        """
        if EXPERT in self.tensor:
            return {self._of_expert(expert): self.shape[1:] for expert in range(self.shape[0])}
        dim = self._output_dim
        num_outputs = (
            self.shape[dim] * self.interleaved[1] if self.num_outputs is None else self.num_outputs
        )
        shape = (*self.shape[:dim], num_outputs, *self.shape[dim + 1 :])
        return {
            self.tensor: _swapped(shape)
            if self.transposed
            else _inserted(shape, self.unsqueezed, value=1)
        }

    def slices(self, box: Box) -> Iterator[TensorSlice]:
        """A box of the parameter as slices of the tensors.

        >>> mapping = TensorMapping("c_attn.weight", (4, 4), transposed=True, offset=4, num_outputs=12)
        >>> [found.stored for found in mapping.slices(Box((1, 0), (3, 4)))]
        [Box(start=(0, 5), stop=(4, 7))]
        """
        if EXPERT in self.tensor:
            for expert in range(box.start[0], box.stop[0]):
                entry = Box((expert, *box.start[1:]), (expert + 1, *box.stop[1:]))
                yield TensorSlice(
                    self._of_expert(expert),
                    Box(box.start[1:], box.stop[1:]),
                    entry,
                    transposed=False,
                )
        elif self.rows is not None:
            for start, stop in _runs(self.rows, start=box.start[0], stop=box.stop[0]):
                part = Box((start, *box.start[1:]), (stop, *box.stop[1:]))
                distance = self.rows[start] - start
                stored = part.shifted([distance, *[0] * (len(self.shape) - 1)])
                yield TensorSlice(self.tensor, stored, part, transposed=False)
        else:
            corners = (self._stored(box.start), 0), (self._stored(box.stop), 1)
            stored = Box(
                *(_inserted(corner, self.unsqueezed, value=value) for corner, value in corners)
            )
            yield TensorSlice(self.tensor, stored, box, self.transposed, self.interleaved)

    def _stored(self, corner: tuple[int, ...]) -> tuple[int, ...]:
        """A corner of a box of the parameter, in the tensor."""
        dim = self._output_dim
        moved = (
            *corner[:dim],
            (corner[dim] + self.offset) * self.interleaved[1],
            *corner[dim + 1 :],
        )
        return _swapped(moved) if self.transposed else moved

    @property
    def _output_dim(self) -> int:
        return len(self.shape) - 1 if self.is_bias else max(0, len(self.shape) - 2)

    def _of_expert(self, expert: int) -> str:
        return self.tensor.replace(EXPERT, str(expert))


def _inserted(sizes: tuple[int, ...], dims: Sequence[int], *, value: int) -> tuple[int, ...]:
    """The sizes with the value at these dims.

    >>> _inserted((8, 4), [1], value=1)
    (8, 1, 4)
    """
    for dim in dims:
        sizes = (*sizes[:dim], value, *sizes[dim:])
    return sizes


def _swapped(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes with the last two swapped."""
    return (*sizes[:-2], *reversed(sizes[-2:]))


def _runs(rows: tuple[int, ...], *, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The ranges of [start, stop) whose rows follow one another.

    >>> list(_runs((0, 1, 2, 4, 3), start=1, stop=5))
    [(1, 3), (3, 4), (4, 5)]
    """
    first = start
    for row in range(start + 1, stop + 1):
        if row == stop or rows[row] != rows[row - 1] + 1:
            yield first, row
            first = row
