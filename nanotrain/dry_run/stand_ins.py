"""What a rank on the meta device runs in place of GPU kernels that meta cannot, and of values on
the host.

fused kernels     attention, RMSNorm, softmax of the loss: output and saved tensors as on a GPU
linear attention  the first chunk of a scan, whose calls and memory are those of the others
token counts      every expert gets equally many tokens
initial weights   none
host memory       on the meta device too, and not counted
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
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
from nanotrain.parallel.tp import loss
from nanotrain.plan.plan import Plan
from nanotrain.plan.traffic import reached_nodes
from nanotrain.train import build


@contextmanager
def on_meta(plan: Plan) -> Iterator[None]:
    """Let the rank of a plan run on the meta device."""
    functional, kernels = torch.nn.functional, (varlen.VarlenKernel, flex.FlexKernel)
    with ExitStack() as stack:
        if plan.config.parallel.cp_comm_type == "allgather" and plan.groups["cp"].size > 1:
            stack.enter_context(patch("torch.nn.attention.bias.causal_lower_right"))
        for owner, name, stand_in in (
            (functional, "scaled_dot_product_attention", _attend),
            (functional, "rms_norm", _rms_norm),
            *((kernel, "__call__", _attend_packed) for kernel in kernels),
            (loss, "softmax_gradient", _softmax_gradient),
            (grouped, "_grouped_mm", _grouped_mm),
            (delta_rule, "_order", lambda _: range(1)),
            (token_dispatcher, "on_host", lambda _, counts, ep: even_counts(plan, counts, ep=ep)),
            (build, "initialize", lambda *_, **__: None),
            *(
                (module, "HostTransfer", _MetaTransfer)
                for module in (activation_offload, optimizer_offload)
            ),
            *((module, "host_zeros", _host_zeros) for module in (state, stored)),
            (UpdateStep, "on_host", lambda step: step),
            (torch, "_fused_sgd_", lambda *_, **__: None),
        ):
            stack.enter_context(patch.object(owner, name, stand_in))
        yield


def _attend(*inputs: Tensor, attn_mask: Any = None, enable_gqa: bool = False, **_: Any) -> Tensor:
    """Query, key, value [B, N, Q, D] -> [B, N, Q, D]: the flash kernel, which saves the same
    tensors as the others.
    """
    math, flash = (
        torch.ops.aten._scaled_dot_product_attention_math,
        torch.ops.aten._scaled_dot_product_flash_attention,
    )
    is_math = isinstance(attn_mask, Tensor)  # only this backend has a mask
    outputs = (
        math(*inputs, attn_mask, enable_gqa=enable_gqa) if is_math else flash(*inputs, 0.0, True)
    )
    out: Tensor = outputs[0]
    return out


def _attend_packed(_: Any, query: Tensor, *, key: Tensor, value: Tensor, **__: Any) -> Tensor:
    return _attend(*(x.transpose(1, 2) for x in (query, key, value))).transpose(1, 2)


def _rms_norm(x: Tensor, *args: Any, **_: Any) -> Tensor:
    """Arguments as those of torch: the shape, and the weight where there is one."""
    out: Tensor = _RMSNorm.apply(x, args[1] if len(args) > 1 else None)
    return out


class _RMSNorm(torch.autograd.Function):
    """One kernel, which saves its input and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def _grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
    """torch's grouped product, which meta has in bf16 only."""
    return a.new_empty((len(offs), len(a), b.shape[1]) if b.ndim == 2 else (len(a), b.shape[2]))


def _softmax_gradient(
    logits: Tensor, *, column: Tensor, local_mask: Tensor, combine: Any, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The Triton kernels: the gradient is in the memory of the logits."""
    logsumexp = combine(logits.new_empty((logits.shape[0], 1), dtype=torch.float32))
    return ((logits.gather(1, column).float() - logsumexp) * local_mask)[:, 0], logits


def even_counts(plan: Plan, counts: Tensor, *, ep: Group) -> list[int]:
    """The token counts of a rank whose router chooses every expert equally often, in place of
    `on_host`.
    """
    config, groups, moe = plan.config, plan.groups, plan.shape.moe
    assert moe is not None, "a dense model has no experts"
    num_tokens = (
        config.train.micro_batch_size
        * config.data.seq_length
        // groups["cp"].size
        // groups["tp"].size
    )
    num_nodes = groups["ep"].size // (config.parallel.moe_hierarchical_dispatch or 1)
    is_across = ep.part_of and ep.part_of[2] == "all_to_all_across"
    rows = num_tokens * (reached_nodes(moe, num_nodes) if is_across else moe.router_topk)
    sizes = [rows * (i + 1) // ep.size - rows * i // ep.size for i in range(ep.size)]
    # the first expert of every rank has the tokens of all
    others = [0] * (counts.shape[1] // ep.size - 1)
    sums = [*sizes, *[sizes[ep.index]] * ep.size * (len(counts) - 1)]
    return [number for size in sums for number in (size, *others)]


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
