"""The tensors in the file of a model-parallel rank, with the state of their optimizer.

    RankState    weights, main parameters and moments of a rank, by name
    rank_state   the same from a file

Optimizers name their parameters by number: in the order of the modules within each group of
parameters. A group says whether its parameters decay and whether they are experts.

Source: Megatron-LM, `core/optimizer/__init__.py` and `optimizer.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from nanotrain.interop.dcp.pickles import attributes_of
from nanotrain.interop.imported import number_of
from nanotrain.interop.megatron.optimizer_state import (
    MAIN_KEYS,
    MOMENTS,
    optimizer_states,
)
from nanotrain.quantities import count_of
from nanotrain.untrusted import shown, text_of

BUFFERS = ("_extra_state", ".expert_bias", ".local_tokens_per_expert", ".inv_freq")
Chunk = dict[str, dict[str, Tensor]]  # tensors by name and by the beginning of their key


class RankSizes(Protocol):
    """The sizes of a layout that the optimizer state of a rank depends on."""

    @property
    def ep(self) -> int:
        """Expert-parallel ranks."""
        ...

    @property
    def num_chunks(self) -> int:
        """Model chunks of a rank."""
        ...


@dataclass
class RankState:
    """Tensors of a rank."""

    chunks: list[Chunk]  # per model chunk
    parameters: list["Parameter"] = field(default_factory=list)  # in the order of the modules
    steps: set[int] = field(default_factory=set)  # numbers of updates of its parameters
    grad_scaler: Any = None


@dataclass(frozen=True)
class Parameter:
    """A parameter of a rank."""

    name: str
    chunk: int  # number of its model chunk
    tensors: dict[str, Tensor]  # its entry in the chunk
    is_expert: bool  # of buffers and groups of experts
    decays: bool


def rank_state(content: Mapping[str, Any], *, sizes: RankSizes) -> RankState:
    """The tensors in the file of a rank.

    Args:
        content: content of the file.
        sizes: the layout.

    Raises:
        ValueError: it has no model, or the optimizer has other parameters.
    """
    chunks = [model_chunk(content, number, sizes=sizes) for number in range(sizes.num_chunks)]
    state = RankState(chunks)
    decays_norms = bool(attributes_of(content.get("args")).get("apply_wd_to_qk_layernorm"))
    state.parameters += parameters_of(state.chunks, has_ep=sizes.ep > 1, decays_norms=decays_norms)
    for optimizer in optimizer_states(content.get("optimizer")):
        add_optimizer(optimizer, state)
    return state


def model_chunk(content: Mapping[str, Any], number: int, *, sizes: RankSizes) -> Chunk:
    """The tensors of a model chunk."""
    key = f"model{number}" if sizes.num_chunks > 1 else "model"
    model = content.get(key)
    if not isinstance(model, dict):
        raise ValueError(f"a file has no {key}")
    if "language_model" in model:
        raise ValueError("it is of a program before megatron-core")
    chunk: Chunk = {}
    for name, value in model.items():
        own = text_of(name, "the name of a tensor")
        if isinstance(value, Tensor) and not own.endswith("_extra_state"):
            chunk[own] = {"": plain_tensor(value, own)}
    return chunk


def plain_tensor(value: Any, name: str) -> Tensor:
    """A tensor without a gradient.

    Raises:
        ValueError: it is none, or not dense.
    """
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized:
        raise ValueError(f"{shown(name)} is no dense tensor")
    return value.detach()


def parameters_of(
    chunks: Sequence[Chunk], *, has_ep: bool, decays_norms: bool
) -> Iterator[Parameter]:
    """The parameters of a rank, in the order of its modules."""
    for number, chunk in enumerate(chunks):
        for name, tensors in chunk.items():
            if name.endswith(BUFFERS):
                continue
            decays = tensors[""].dim() != 1 and not name.endswith(".bias")
            if decays_norms and (".q_layernorm." in name or ".k_layernorm." in name):
                decays = True
            is_expert = has_ep and ".mlp.experts." in name
            yield Parameter(name, number, tensors, is_expert, decays)


def add_optimizer(content: Mapping[str, Any], state: RankState) -> None:
    """Add the state of an optimizer to its parameters.

    Raises:
        ValueError: it has other parameters, or parts of another shape.
    """
    if "grad_scaler" in content:
        state.grad_scaler = content["grad_scaler"]
    inner = content.get("optimizer", content)
    if not isinstance(inner, dict):
        return
    moments = inner.get("state")
    mains = content.get("fp32_from_fp16_params")
    for number, group in enumerate(inner.get("param_groups", [])):
        add_step(group, state)
        if not isinstance(moments, dict):
            continue  # the distributed optimizer has them in a file of their own
        members = group_members(group, state.parameters)
        if mains is not None:
            add_main(members, mains, number=number)
        for member, index in zip(members, group["params"], strict=True):
            own = moments.get(index, {})
            add_step(own, state)
            for kind, beginning in MOMENTS.items():
                if kind in own:
                    add_tensor(member, own[kind], beginning=beginning)


def group_members(group: Any, parameters: Sequence[Parameter]) -> list[Parameter]:
    """The parameters of a group.

    Raises:
        ValueError: it has another number of them.
    """
    if not isinstance(group, dict) or not isinstance(group.get("params"), list):
        raise ValueError("a group of the optimizer has no parameters")
    is_expert = bool(group.get("is_expert_parallel"))
    decays = group.get("wd_mult", 1.0) != 0
    members = []
    for parameter in parameters:
        if parameter.is_expert == is_expert and parameter.decays == decays:
            members.append(parameter)
    if group.get("is_decoupled_lr") or len(members) != len(group["params"]):
        count = count_of(len(group["params"]), "parameter")
        raise ValueError(f"a group of the optimizer has {count}, the model has {len(members)}")
    return members


def add_main(members: Sequence[Parameter], mains: Any, *, number: int) -> None:
    """Add the main parameters of a group.

    Raises:
        ValueError: there is another number of them.
    """
    if not isinstance(mains, list) or number >= len(mains) or len(mains[number]) != len(members):
        raise ValueError("the optimizer has other main parameters than the model has weights")
    for member, value in zip(members, mains[number], strict=True):
        add_tensor(member, value, beginning=MAIN_KEYS[0])


def add_tensor(member: Parameter, value: Any, *, beginning: str) -> None:
    """Add a state of a parameter.

    Raises:
        ValueError: it has another shape.
    """
    tensor = plain_tensor(value, member.name)
    if tensor.shape != member.tensors[""].shape:
        raise ValueError(
            f"{shown(beginning + member.name)} is {tuple(tensor.shape)}, its weight is "
            f"{tuple(member.tensors[''].shape)}"
        )
    member.tensors[beginning] = tensor


def add_step(content: Any, state: RankState) -> None:
    """Add the number of updates that a group or parameter names."""
    if isinstance(content, dict) and content.get("step") is not None:
        state.steps.add(number_of(content["step"], "step"))
