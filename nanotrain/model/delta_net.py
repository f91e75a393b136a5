"""Linear attention by the gated delta rule (attention/delta_rule.py), in place of attention.

    hidden --+-- query, key, value -- short convolutions, SiLU --.
             +-- dt -- decay ------------------------------------+-- delta rule -- norm --*-- output
             +-- beta -- correction -----------------------------'                        |
             +-- gate -- activation ------------------------------------------------------'

    GatedDeltaNet        one decay per head; Qwen3-Next, Qwen3.5 (Yang et al. 2025, "Gated Delta
                         Networks")
    KimiDeltaAttention   one decay per channel; gate and dt are low-rank projections ("Kimi
                         Linear", 2025) or full ones (Ling 3)

decay = -exp(A_log) * softplus(dt + dt_bias), the logarithm of a factor of the state, or with a
bound -bound * sigmoid(exp(A_log) * (dt + dt_bias)) (Ling 3). tp shards the heads; a convolution
belongs to its heads. The norm has one weight for all heads.

    B batch   S sequence   H hidden   G heads of queries and keys, N of values, on this tp rank
    K, V head dims of keys and values
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.attention.chunks import accumulate_dtype
from nanotrain.attention.delta_rule import delta_rule
from nanotrain.attention.scan_inputs import DeltaInputs
from nanotrain.config.model import ModelConfig
from nanotrain.model.context import (
    DropoutPlace,
    HiddenDropout,
    LayerContext,
    ModelParallel,
    TokenCache,
    split_heads,
)
from nanotrain.model.norm import RMSNorm
from nanotrain.model.parameters import Parameters
from nanotrain.model.recurrence import (
    CachedScan,
    ScanFunctions,
    ShortConvolution,
    project_inputs,
)
from nanotrain.parallel.cp.linear_attention import delta_rule_over
from nanotrain.parallel.tp.layers import ColumnParallelLinear, RowParallelLinear, column_parallel
from nanotrain.spec.shape import ModelShape


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet; the same interface as `Attention`.

    Args:
        model_config: sizes of the heads.
        params: decay (A_log), step_bias (dt_bias); query, key, value and their convolutions; gate,
            step (dt) and beta; norm, output.
        parallel: tp shards the heads, cp the sequence.
        layer: index in the model.
    """

    activation: Callable[[Tensor], Tensor] = staticmethod(F.silu)  # function of the gate

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        super().__init__()
        sizes = ModelShape.of(model_config).linear_attention
        assert sizes is not None, "linear_attention_type is set"
        self.key_head_dim = sizes.key_head_dim
        self.value_head_dim = sizes.value_head_dim
        self.max_beta = 2.0 if sizes.allow_neg_eigval else 1.0
        self.decay_bound = sizes.decay_bound
        self.has_full_gates = sizes.full_rank_gates
        self.decay = params["decay"]
        self.step_bias = params["step_bias"]
        self.functions = ScanFunctions()
        column = partial(ColumnParallelLinear, tensor_parallel=parallel.tp)
        self.query = column(*params.linear("query"))
        self.key = column(*params.linear("key"))
        self.value = column(*params.linear("value"))
        conv = partial(ShortConvolution, cp=parallel.cp, activation=F.silu)
        self.query_conv = conv(params.submodule("query_conv"))
        self.key_conv = conv(params.submodule("key_conv"))
        self.value_conv = conv(params.submodule("value_conv"))
        self.add_gates(params, parallel)
        norm_epsilon = sizes.norm_epsilon or model_config.norm_epsilon
        self.norm = RMSNorm(params["norm.weight"], eps=norm_epsilon)
        self.output = RowParallelLinear(*params.linear("output"), tensor_parallel=parallel.tp)
        self.dropout = HiddenDropout(
            model_config.hidden_dropout, layer, DropoutPlace.attention, parallel.tp
        )
        self.scan: Callable[[DeltaInputs], Tensor] = partial(
            delta_rule_over, group=parallel.cp, comm_type=parallel.cp_comm_type
        )

    def add_gates(self, params: Parameters, parallel: ModelParallel) -> None:
        """Register gate, dt and beta; dt and beta have too few outputs for fp8."""
        narrow = replace(parallel.tp, fp8=None)
        self.gate = ColumnParallelLinear(*params.linear("gate"), tensor_parallel=parallel.tp)
        self.step = ColumnParallelLinear(*params.linear("step"), tensor_parallel=narrow)
        self.beta = ColumnParallelLinear(*params.linear("beta"), tensor_parallel=narrow)

    def project(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Query, key, value, gate, dt and beta, [B, S, ...]."""
        wide = (self.query, self.key, self.value, self.gate)
        return project_inputs(hidden, wide, narrow=(self.step, self.beta))

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """[B, S or S/tp, H] -> the same shape."""
        query, key, value, gate, dt, beta = self.project(hidden)
        query, key, value, decay, beta = self.prepare_scan(
            query, key, value=value, dt=dt, beta=beta, context=context
        )
        out = self.run_scan(query, key, value=value, decay=decay, beta=beta, starts=context.starts)
        out = self.output(self.gate_output(out, gate))
        return self.dropout(out, context.dropout)

    def prepare_scan(
        self,
        query: Tensor,
        key: Tensor,
        *,
        value: Tensor,
        dt: Tensor,
        beta: Tensor,
        context: LayerContext,
    ) -> tuple[Tensor, ...]:
        """Convolutions, decay and correction: the first five fields of `DeltaInputs`."""
        dtype = accumulate_dtype(dt)
        num_heads = len(self.decay)
        dt = dt.to(dtype) + self.functions.per_token(self.step_bias, dt)
        decay = self.log_decay(dt.unflatten(-1, (num_heads, -1)))
        query = self.query_conv(query, context)
        key = self.key_conv(key, context)
        value = self.value_conv(value, context)
        beta = self.max_beta * self.functions.sigmoid(beta.to(dtype))
        query = split_heads(query, self.key_head_dim)
        key = split_heads(key, self.key_head_dim)
        value = split_heads(value, self.value_head_dim)
        return query, key, value, decay, beta[..., None]

    def log_decay(self, dt: Tensor) -> Tensor:
        """The logarithms of the decays, at most 0: [B, S, N, 1 or K] -> the same shape."""
        decay = self.functions.per_token(self.decay, dt[..., 0]).to(dt.dtype)
        rate = self.functions.exp(decay)[..., None]
        if self.decay_bound is not None:
            return -self.decay_bound * self.functions.sigmoid(rate * dt)
        A = -rate
        return A * self.functions.softplus(dt)

    def run_scan(
        self,
        query: Tensor,
        key: Tensor,
        *,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        starts: Tensor | None,
    ) -> Tensor:
        """The results of `prepare_scan` -> [B, S, N, V]."""
        return self.scan(DeltaInputs(query, key, value, decay, beta, starts))

    def gate_output(self, out: Tensor, gate: Tensor) -> Tensor:
        """[B, S, N, V] -> [B, S, N V], normalized, times the activation of a gate [B, S, N V]."""
        out = self.norm(out).flatten(2)
        return out * self.activation(gate)

    def cached_function(self, cache: TokenCache) -> Callable[..., Any]:
        """The scan that starts from the state after the tokens so far."""
        return CachedScan(cache, delta_rule)

    def swap_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Use another scan; returns the one used until now."""
        before = self.scan
        self.scan = function
        return before


class KimiDeltaAttention(GatedDeltaNet):
    """KDA: gated DeltaNet with a decay per key channel; gate and dt may be of low rank."""

    activation = staticmethod(torch.sigmoid)

    def add_gates(self, params: Parameters, parallel: ModelParallel) -> None:
        """Register beta, gate and dt; down-projections are outside the tensor-parallel region."""
        column = partial(ColumnParallelLinear, tensor_parallel=parallel.tp)
        replicated = partial(ColumnParallelLinear, tensor_parallel=parallel.tp.unsharded)
        narrow = replace(parallel.tp, fp8=None)
        self.beta = ColumnParallelLinear(*params.linear("beta"), tensor_parallel=narrow)
        if self.has_full_gates:
            self.gate = column(*params.linear("gate"))
            self.step = column(*params.linear("step"))
            return
        self.gate_down = replicated(*params.linear("gate_down"))
        self.gate_up = column(*params.linear("gate_up"))
        self.step_down = replicated(*params.linear("step_down"))
        self.step_up = column(*params.linear("step_up"))

    def project(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Query, key, value, gate, dt and beta, [B, S, ...]."""
        wide = (self.query, self.key, self.value)
        if self.has_full_gates:
            return project_inputs(hidden, (*wide, self.gate, self.step), narrow=(self.beta,))
        query, key, value, beta = project_inputs(hidden, wide, narrow=(self.beta,))
        gate, dt = column_parallel(hidden, (self.gate_down, self.step_down))
        gate = self.gate_up(gate)
        dt = self.step_up(dt)
        return query, key, value, gate, dt, beta
