"""Norms that fp8 layers compute in their casts (kernels/fp8/norm.py).

cast_norms    an RMSNorm of a block whose only readers are fp8 layers that share their input
"""

from collections.abc import Collection, Sequence
from functools import partial

from torch import Tensor, nn

from nanotrain.kernels.fp8.norm import NormCast, fuses_norm, norm_linears
from nanotrain.kernels.linear import Linear
from nanotrain.memory.recompute_modules import unchanged
from nanotrain.model.attention import Attention
from nanotrain.model.context import ModelParallel
from nanotrain.model.mlp import MLP
from nanotrain.model.norm import RMSNorm
from nanotrain.parallel.tp.layers import ColumnParallelLinear
from nanotrain.spec.operators import NORM_MODULES


def cast_norms(block: nn.Module, modules: Collection[str], *, parallel: ModelParallel) -> None:
    """Let the layers of a block on one tp rank normalize their input as they cast it.

    The norm keeps its weight and returns its input.

    Args:
        block: a transformer block.
        modules: recomputed modules, which may drop the output of norms.
        parallel: groups of the layers.
    """
    tensor_parallel = parallel.tp
    if tensor_parallel.group.size > 1 or tensor_parallel.wgrad_queue is not None:
        return
    is_recomputed = not set(NORM_MODULES).isdisjoint(modules)
    for name in ("attention", "mlp"):
        norm = getattr(block, f"{name}_norm", None)
        first = _first_reader(getattr(block, name, None))
        if type(norm) is not RMSNorm or first is None or first.fp8 is None:
            continue
        if fuses_norm(first.fp8.options):
            how = NormCast(norm.eps, keeps=not is_recomputed)
            first.compute = partial(_normalize_and_project, norm=norm, how=how)
            norm.forward = unchanged  # type: ignore[method-assign]
    second = getattr(block, "second", None)  # only a `ShortcutBlock` has one
    if isinstance(second, nn.Module):
        cast_norms(second, modules, parallel=parallel)


def _first_reader(module: object) -> ColumnParallelLinear | None:
    """The first linear layer of a module whose input only linear layers read; None for others."""
    if type(module) is Attention:
        return module.query
    if type(module) is MLP:
        return module.gate or module.up
    return None


def _normalize_and_project(
    x: Tensor, layers: Sequence[Linear], *, norm: RMSNorm, how: NormCast
) -> tuple[Tensor, ...]:
    """[..., H] before the norm -> one [..., O] per layer."""
    return norm_linears(x, norm.channel_factors(x), how=how, linears=layers)
