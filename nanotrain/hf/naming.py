"""The tensor names of a Hugging Face family, and from them the tensors of every parameter.

    HFName, Naming   the names of a family: one table, written by hand beside its config.json (llama.py, gpt2.py, ...)
    map_parameters   every declared parameter of a model -> TensorMapping

Shapes come from the declared parameters. Import and export both read these mappings and nothing else.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from nanotrain.config.config import ModelConfig
from nanotrain.hf.tensor_mapping import TensorMapping
from nanotrain.topology.parameters import declare_model
from nanotrain.topology.params import ParamSpec
from nanotrain.topology.shape import ModelShape


@dataclass(frozen=True)
class HFName:
    """The name of a tensor, and what of it is the parameter."""

    name: str  # without ".weight" and ".bias" unless `is_full`; with {expert} there is one tensor per expert
    part: int = 0  # index of the parameter among those of equal size that are concatenated along the outputs
    num_parts: int = 1  # parameters in the tensor
    transposed: bool = False  # a matrix is stored as [inputs, outputs]
    is_full: bool = False  # the name has no ".weight" appended


@dataclass(frozen=True)
class Naming:
    """The tensor names of a family."""

    ends: Mapping[str, str]  # names of embedding, final norm and head
    layer: str  # prefix of the tensors of a layer, with {layer}
    # names relative to that prefix, by module name relative to a layer ("attention.query")
    layers: Mapping[str, str | HFName]


def map_parameters(model_config: ModelConfig, naming: Naming) -> dict[str, TensorMapping]:
    """The tensors of every parameter of a model that the family can hold, by the parameter's name."""
    shape = ModelShape.of(model_config)
    declared = declare_model(replace(shape, padded_vocab_size=shape.vocab_size))
    return {spec.name: _map(spec, naming) for spec in declared}


def _map(spec: ParamSpec, naming: Naming) -> TensorMapping:
    module, _, leaf = spec.name.rpartition(".")
    in_layer = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
    names = naming.ends if in_layer is None else naming.layers
    found = names.get(module if in_layer is None else in_layer[2])
    assert found is not None, f"{spec.name} has no name in this family: the exported model would lack it"
    hf = found if isinstance(found, HFName) else HFName(found)
    tensor = hf.name if in_layer is None else f"{naming.layer.format(layer=in_layer[1])}.{hf.name}"
    return TensorMapping(
        tensor if hf.is_full else f"{tensor}.{leaf}",
        spec.shape,
        transposed=hf.transposed and len(spec.shape) == 2,
        part=hf.part,
        num_parts=hf.num_parts,
    )
