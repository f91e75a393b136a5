"""Stand-ins of a rank on the meta device for GPU kernels that meta cannot run, and for host values.

fused kernels     attention, RMSNorm, softmax of the loss: output and saved tensors as on a GPU
linear attention  the first chunk of a scan, whose calls and memory are those of the others
token counts      every expert gets equally many tokens
initial weights   none
host memory       on the meta device too, and not counted
compiler          none: torch would import it to leave functions out of graphs
"""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from nanotrain.attention import delta_rule, flex, varlen
from nanotrain.comm.device import Copy, HostTransfer
from nanotrain.comm.group import Group
from nanotrain.comm.recorder import unrecorded
from nanotrain.kernels import grouped
from nanotrain.memory import offload as activation_offload
from nanotrain.optim import offload as optimizer_offload
from nanotrain.optim import state, stored
from nanotrain.optim.rule import UpdateStep
from nanotrain.parallel.ep import token_dispatcher
from nanotrain.parallel.ep.token_dispatcher import reached_nodes
from nanotrain.parallel.tp import loss
from nanotrain.plan.plan import Plan
from nanotrain.train import build


class Replacement(NamedTuple):
    """An attribute that is replaced while a rank runs on the meta device."""

    owner: object  # module or class
    name: str
    stand_in: Any


@contextmanager
def on_meta(plan: Plan) -> Iterator[None]:
    """Let the rank of a plan run on the meta device."""
    with ExitStack() as stack:
        stack.enter_context(without_compiler())
        if plan.config.parallel.cp_comm_type == "allgather" and plan.groups["cp"].size > 1:
            stack.enter_context(patch("torch.nn.attention.bias.causal_lower_right"))
        for replacement in (*_kernels(), *_host_values(plan), *_host_memory()):
            stack.enter_context(patch.object(*replacement))
        yield


class _Compiler(ModuleType):
    """A module in the place of `torch._dynamo`, which takes 2.3 s of CPU time to import.

    Torch would import it to call `disable`, in the first call of many operators on the meta device.
    Any other attribute imports the module itself.
    """

    def __init__(self) -> None:
        super().__init__("torch._dynamo")
        self._functions: list[Any] = []
        sys.modules[self.__name__] = self
        vars(torch)["_dynamo"] = self

    def disable(self, function: Any, *_: Any, **__: Any) -> Any:
        """A function as it is."""
        self._functions.append(function)
        return function

    def __getattr__(self, name: str) -> Any:
        self.leave()
        return getattr(importlib.import_module(self.__name__), name)

    def leave(self) -> None:
        """Put the module and the functions back."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__], vars(torch)["_dynamo"]
        for function in self._functions:
            vars(function).pop("__dynamo_disable", None)
        self._functions.clear()


@contextmanager
def without_compiler() -> Iterator[None]:
    """Do not import torch's compiler in the block where only its `disable` is called."""
    if "torch._dynamo" in sys.modules:
        yield
        return
    compiler = _Compiler()
    try:
        yield
    finally:
        compiler.leave()


def _kernels() -> list[Replacement]:
    """Kernels that meta cannot run."""
    return [
        Replacement(torch.nn.functional, "scaled_dot_product_attention", _attend),
        Replacement(torch.nn.functional, "rms_norm", _rms_norm),
        Replacement(varlen.VarlenKernel, "__call__", _attend_packed),
        Replacement(flex.FlexKernel, "__call__", _attend_packed),
        Replacement(loss, "softmax_gradient", _softmax_gradient),
        Replacement(grouped, "_grouped_mm", _grouped_mm),
        Replacement(delta_rule, "_order", lambda _: range(1)),
        Replacement(torch, "_fused_sgd_", lambda *_, **__: None),
    ]


def _host_values(plan: Plan) -> list[Replacement]:
    """Values that the host reads or computes."""

    def token_counts(_: Tensor, parts: Sequence[tuple[Tensor, Group]]) -> list[list[int]]:
        return [even_counts(plan, counts, ep=ep) for counts, ep in parts]

    return [
        Replacement(token_dispatcher, "on_host", token_counts),
        Replacement(build, "initialize", lambda *_, **__: None),
        Replacement(UpdateStep, "on_host", lambda step: step),
    ]


def _host_memory() -> list[Replacement]:
    """Tensors in host memory and copies to and from it."""
    return [
        Replacement(activation_offload, "HostTransfer", _MetaTransfer),
        Replacement(optimizer_offload, "HostTransfer", _MetaTransfer),
        Replacement(state, "host_zeros", _host_zeros),
        Replacement(stored, "host_zeros", _host_zeros),
    ]


def _attend(*inputs: Tensor, attn_mask: Any = None, enable_gqa: bool = False, **_: Any) -> Tensor:
    """Attention by a kernel that saves no scores: query, key, value and result [B, N, Q, D]."""
    if isinstance(attn_mask, Tensor):  # only the math backend has a mask
        math = torch.ops.aten._scaled_dot_product_attention_math
        outputs = math(*inputs, attn_mask, enable_gqa=enable_gqa)
    elif inputs[0].shape[-1] != inputs[2].shape[-1]:  # heads of values of another width
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        outputs = efficient(*inputs, None, True, 0.0, True)
    else:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        outputs = flash(*inputs, 0.0, True)
    out: Tensor = outputs[0]
    return out


def _attend_packed(_: Any, query: Tensor, *, key: Tensor, value: Tensor, **__: Any) -> Tensor:
    """Query, key, value [B, Q, N, D] -> [B, Q, N, D]."""
    out = _attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    return out.transpose(1, 2)


def _rms_norm(x: Tensor, *args: Any, **_: Any) -> Tensor:
    """RMSNorm with torch's arguments: the shape, and the weight where there is one."""
    weight = args[1] if len(args) > 1 else None
    out: Tensor = _RMSNorm.apply(x, weight)
    return out


class _RMSNorm(torch.autograd.Function):
    """One kernel, which saves its input and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        statistics = x.new_empty(x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, statistics)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        weight_grad = None if weight is None else torch.empty_like(weight)
        return torch.empty_like(x), weight_grad


def _grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
    """torch's grouped product, which meta has in bf16 only."""
    if b.ndim == 2:
        return a.new_empty((len(offs), len(a), b.shape[1]))
    return a.new_empty((len(a), b.shape[2]))


def _softmax_gradient(
    logits: Tensor, *, column: Tensor, local_mask: Tensor, combine: Any, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`loss.softmax_gradient` as by Triton: the gradient is in the memory of the logits."""
    logsumexp = combine(logits.new_empty((logits.shape[0], 1), dtype=torch.float32))
    log_probs = (logits.gather(1, column).float() - logsumexp) * local_mask
    return log_probs[:, 0], logits


def even_counts(plan: Plan, counts: Tensor, *, ep: Group) -> list[int]:
    """The token counts of a rank whose router chooses every expert equally often.

    Args:
        plan: plan of the rank.
        counts: tokens per expert, of which only the shape is known.
        ep: group of the dispatch, which may be a part of the expert-parallel group.
    """
    config = plan.config
    moe = plan.shape.moe
    assert moe is not None, "a dense model has no experts"
    num_tokens = config.train.micro_batch_size * config.data.seq_length
    num_tokens //= plan.groups["cp"].size
    num_tokens //= plan.groups["tp"].size
    rows = num_tokens * moe.router_topk
    if ep.parent and ep.parent.op == "all_to_all_across":
        nodes = plan.groups["ep"].size // (config.parallel.dispatch_ranks_per_node or 1)
        rows = num_tokens * reached_nodes(moe, nodes)
    bounds = [rows * i // ep.size for i in range(ep.size + 1)]
    sizes = [end - start for start, end in pairwise(bounds)]
    received = [sizes[ep.index]] * ep.size * (len(counts) - 1)
    # the first expert of every rank has the tokens of all
    zeros = [0] * (counts.shape[1] // ep.size - 1)
    numbers: list[int] = []
    for size in (*sizes, *received):
        numbers += [size, *zeros]
    return numbers


class _MetaTransfer(HostTransfer):
    """Copies of nothing; tensors in host memory are on the meta device too, and are not counted."""

    def start(self, target: Tensor, source: Tensor) -> Copy:
        """Copy nothing."""
        return Copy(target, None)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Memory for a copy."""
        with unrecorded():
            return torch.empty_like(tensor)


def _host_zeros(numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    with unrecorded():
        return torch.zeros(numel, dtype=dtype, device=device)
