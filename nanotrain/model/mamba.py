"""Mamba-2: a scan over tokens with a state per head, in place of attention.

    hidden --+-- x -- x_conv --+
             +-- B -- B_conv --+-- scan (attention/ssd.py) -- + D * x -- norm(. * silu(z)) -- output
             +-- C -- C_conv --+
             +-- dt -- softplus(. + dt_bias) = step; the decay of a token is exp(-exp(A_log) * step)
             +-- z

Dao and Gu 2024, "Transformers are SSMs", section 7. Heads share the B and C of their group. The
norm is over the channels of a group. tp shards groups with their heads, so nothing between the
projections is communicated over tp.

Parameters keep their first names, which seed their initial values and are in checkpoints
(docs/decisions/0022):

    x value   B key   C query   z gate   dt step   dt_bias step_bias   A_log decay   D skip

    S sequence   N heads   G groups   P head dim of x   K state dim, the head dim of B and C
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.attention.chunks import accumulate_dtype
from nanotrain.attention.scan_inputs import DeltaInputs
from nanotrain.attention.ssd import span_map, ssd
from nanotrain.config.model import ModelConfig
from nanotrain.model.context import (
    DropoutPlace,
    HiddenDropout,
    LayerContext,
    ModelParallel,
    TokenCache,
    split_heads,
)
from nanotrain.model.parameters import Parameters
from nanotrain.model.recurrence import (
    CachedScan,
    ScanFunctions,
    ShortConvolution,
    project_inputs,
)
from nanotrain.parallel.cp.linear_attention import Rule, scan_over
from nanotrain.parallel.tp.layers import ColumnParallelLinear, RowParallelLinear

SSD = Rule(ssd, span_map)


class Mamba2(nn.Module):
    """Mamba-2; the same interface as `Attention`.

    Args:
        model_config: sizes of heads and groups, the least step, epsilon of the norm.
        params: step_bias, decay, skip, norm; gate, value, key, query, step; value_conv, key_conv,
            query_conv; output.
        parallel: tp shards the groups, cp the sequence.
        layer: index in the model.
    """

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        super().__init__()
        self.sizes = model_config.mamba
        self.num_groups = model_config.mamba.num_groups // parallel.tp.group.size
        self.step_bias = params["step_bias"]
        self.decay = params["decay"]
        self.skip = params["skip"]
        self.norm = params.get("norm")
        self.eps = model_config.norm_epsilon
        self.functions = ScanFunctions()
        column = partial(ColumnParallelLinear, tensor_parallel=parallel.tp)
        narrow = replace(parallel.tp, fp8=None)  # too few outputs for fp8
        self.gate = column(*params.linear("gate"))
        self.value = column(*params.linear("value"))
        self.key = column(*params.linear("key"))
        self.query = column(*params.linear("query"))
        self.step = ColumnParallelLinear(*params.linear("step"), tensor_parallel=narrow)
        self.scale = build_projection_scale(self.sizes.multipliers)
        conv = partial(ShortConvolution, cp=parallel.cp, activation=F.silu)
        self.value_conv = conv(params.submodule("value_conv"))
        self.key_conv = conv(params.submodule("key_conv"))
        self.query_conv = conv(params.submodule("query_conv"))
        self.output = RowParallelLinear(*params.linear("output"), tensor_parallel=parallel.tp)
        self.scan: Callable[[DeltaInputs], Tensor] = partial(
            scan_over, group=parallel.cp, comm_type=parallel.cp_comm_type, rule=SSD
        )
        self.dropout = HiddenDropout(
            model_config.hidden_dropout, layer, DropoutPlace.attention, parallel.tp
        )

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """[B, S or S/tp, H] -> the same shape."""
        wide = (self.gate, self.value, self.key, self.query)
        projected = project_inputs(hidden, wide, narrow=(self.step,))
        z, x, B, C, dt = self.scale(projected)
        C, B, x, decay, step = self.prepare_scan(x, B, C=C, dt=dt, context=context)
        y = self.run_scan(C, B, x=x, decay=decay, step=step, starts=context.starts)
        out = self.output(self.gate_output(y, z))
        return self.dropout(out, context.dropout)

    def prepare_scan(
        self, x: Tensor, B: Tensor, *, C: Tensor, dt: Tensor, context: LayerContext
    ) -> tuple[Tensor, ...]:
        """Convolutions, steps and decay: the first five fields of `DeltaInputs`."""
        dtype = accumulate_dtype(x)
        x = self.value_conv(x, context)
        B = self.key_conv(B, context)
        C = self.query_conv(C, context)
        x = split_heads(x, self.sizes.head_dim)
        B = split_heads(B, self.sizes.state_dim)
        C = split_heads(C, self.sizes.state_dim)
        step_bias = self.functions.per_token(self.step_bias, dt).to(dtype)
        decay = self.functions.per_token(self.decay, dt).to(dtype)
        dt = self.functions.softplus(dt.to(dtype) + step_bias)
        dt = dt.clamp(min=self.sizes.time_step_min)
        dt = dt[..., None]
        decay_rate = self.functions.exp(decay)
        A = -decay_rate[..., None]
        return C, B, x, dt * A, dt

    def run_scan(
        self,
        C: Tensor,
        B: Tensor,
        *,
        x: Tensor,
        decay: Tensor,
        step: Tensor,
        starts: Tensor | None,
    ) -> Tensor:
        """The results of `prepare_scan` -> scan + D x, [batch, S, N, P] in fp32."""
        D = self.functions.per_token(self.skip, step[..., 0]).to(decay.dtype)[..., None]
        A = -self.decay.to(decay.dtype).exp()
        inputs = DeltaInputs(C, B, x, decay=decay, beta=step, starts=starts, A=A)
        return self.scan(inputs) + x * D

    def gate_output(self, y: Tensor, z: Tensor) -> Tensor:
        """norm(y * silu(z)), with an RMSNorm per group where the model has one; the dtype of z.

        Args:
            y: [batch, S, N, P].
            z: [batch, S, N P].
        """
        gate = self.functions.silu(z.to(y.dtype))
        y = y.flatten(2) * gate
        if self.norm is None:
            return y.to(z.dtype)
        group_size = y.shape[-1] // self.num_groups
        grouped = y.unflatten(-1, (-1, group_size))
        normed = self.functions.normalize_rows(grouped, self.eps).flatten(2).to(z.dtype)
        return self.functions.per_token(self.norm, normed) * normed

    def cached_function(self, cache: TokenCache) -> Callable[..., Any]:
        """The scan that starts from the state after the tokens so far."""
        return CachedScan(cache, ssd)

    def swap_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Use another scan; returns the one used until now."""
        before = self.scan
        self.scan = function
        return before


class ProjectionScale(nn.Module):
    """Multiplies each of several tensors by its constant factor."""

    def __init__(self, factors: Sequence[float]) -> None:
        super().__init__()
        self.factors = factors

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor times its factor, any shapes."""
        return [x * factor for x, factor in zip(tensors, self.factors, strict=True)]


def build_projection_scale(factors: Sequence[float]) -> nn.Module:
    """Constant factors of the projections; the identity where all are 1."""
    if all(factor == 1.0 for factor in factors):
        return nn.Identity()
    return ProjectionScale(factors)
