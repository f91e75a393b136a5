"""Linear attention by the gated delta rule (attention/delta_rule.py), in place of softmax
attention.

    hidden --+-- query, key, value -- short convolutions, SiLU ---.
             +-- step -- decay -----------------------------------+-- gated delta rule -- norm --*-- output
             +-- beta -- correction ------------------------------'                              |
             +-- gate ---------------------------------------------------------- activation -----'

GatedDeltaNet         decays per head; Qwen3-Next, Qwen3.5 (Yang et al. 2025, "Gated Delta Networks")
KimiDeltaAttention    decays per channel; gate and steps are projections of low rank ("Kimi Linear", 2025)

tp shards the heads; a convolution belongs to its heads. The norm has one weight for all heads.

    B batch   S sequence   H hidden   G heads of queries and keys, N of values, on this tp rank   K, V their dims
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.attention.chunks import accumulate_dtype
from nanotrain.attention.delta_rule import DeltaInputs, delta_rule
from nanotrain.config.model import ModelConfig
from nanotrain.model.context import (
    DropoutPlace,
    HiddenDropout,
    LayerContext,
    ModelParallel,
    TokenCache,
)
from nanotrain.model.norm import RMSNorm
from nanotrain.model.parameters import Parameters
from nanotrain.model.recurrence import CachedScan, ShortConvolution, project_inputs
from nanotrain.parallel.cp.linear_attention import delta_rule_over
from nanotrain.parallel.tp.layers import ColumnParallelLinear, RowParallelLinear, column_parallel
from nanotrain.spec.shape import ModelShape


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet; the same interface as `Attention`.

    Args:
        model_config: sizes of the heads.
        params: decay (logarithms of the rates), step_bias; query, key, value, their convolutions,
            what `add_gates` takes, norm, output.
        parallel: tp shards the heads, cp the sequence.
        layer: index in the model.
    """

    activation: Callable[[Tensor], Tensor] = staticmethod(F.silu)  # of the gate

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        super().__init__()
        sizes = ModelShape.of(model_config).linear_attention
        assert sizes is not None, "linear_attention_type is set"
        self.key_head_dim, self.value_head_dim = sizes.key_head_dim, sizes.value_head_dim
        self.decay, self.step_bias = params["decay"], params["step_bias"]
        column = partial(ColumnParallelLinear, tensor_parallel=parallel.tp)
        self.query, self.key, self.value = (
            column(*params.linear(name)) for name in ("query", "key", "value")
        )
        conv = partial(ShortConvolution, cp=parallel.cp, activation=F.silu)
        names = ("query_conv", "key_conv", "value_conv")
        self.query_conv, self.key_conv, self.value_conv = (
            conv(params.submodule(name)) for name in names
        )
        self.add_gates(params, parallel)
        self.norm = RMSNorm(
            params["norm.weight"], eps=sizes.norm_epsilon or model_config.norm_epsilon
        )
        self.max_beta = 2.0 if sizes.allow_neg_eigval else 1.0
        self.output = RowParallelLinear(*params.linear("output"), tensor_parallel=parallel.tp)
        self.dropout = HiddenDropout(
            model_config.hidden_dropout, layer, DropoutPlace.attention, parallel.tp
        )
        self.scan: Callable[[DeltaInputs], Tensor]
        self.scan = partial(delta_rule_over, group=parallel.cp, comm_type=parallel.cp_comm_type)

    def add_gates(self, params: Parameters, parallel: ModelParallel) -> None:
        """Register gate, step and beta; the last two have few outputs, so they are never in fp8."""
        narrow = partial(ColumnParallelLinear, tensor_parallel=replace(parallel.tp, fp8=None))
        self.gate = ColumnParallelLinear(*params.linear("gate"), tensor_parallel=parallel.tp)
        self.step, self.beta = narrow(*params.linear("step")), narrow(*params.linear("beta"))

    def project(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Query, key, value, gate, step and beta, [B, S, ...]."""
        return project_inputs(
            hidden, (self.query, self.key, self.value, self.gate), narrow=(self.step, self.beta)
        )

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """[B, S or S/tp, H] -> the same shape."""
        query, key, value, gate, step, beta = self.project(hidden)
        dtype, num_heads = accumulate_dtype(step), len(self.decay)
        steps = F.softplus(step.to(dtype) + self.step_bias).unflatten(-1, (num_heads, -1))
        inputs = DeltaInputs(
            query=self.query_conv(query, context).unflatten(-1, (-1, self.key_head_dim)),
            key=self.key_conv(key, context).unflatten(-1, (-1, self.key_head_dim)),
            value=self.value_conv(value, context).unflatten(-1, (-1, self.value_head_dim)),
            decay=-self.decay.to(dtype).exp()[:, None] * steps,
            beta=self.max_beta * beta.to(dtype).sigmoid()[..., None],
            starts=context.starts,
        )
        out = self.norm(self.scan(inputs)).flatten(2) * self.activation(gate)
        return self.dropout(self.output(out), context.dropout)

    def cached(self, cache: TokenCache) -> dict[str, Callable[..., Tensor]]:
        """In generation the state is that after the tokens so far."""
        return {"scan": CachedScan(cache, delta_rule)}


class KimiDeltaAttention(GatedDeltaNet):
    """KDA: gated DeltaNet with a decay per key channel."""

    activation = staticmethod(torch.sigmoid)

    def add_gates(self, params: Parameters, parallel: ModelParallel) -> None:
        """Register beta and both halves of gate and step; the first halves are outside the
        tensor-parallel region.
        """
        column = partial(ColumnParallelLinear, tensor_parallel=parallel.tp)
        replicated = partial(ColumnParallelLinear, tensor_parallel=parallel.tp.unsharded)
        self.beta = ColumnParallelLinear(
            *params.linear("beta"), tensor_parallel=replace(parallel.tp, fp8=None)
        )
        self.gate_down, self.gate_up = (
            replicated(*params.linear("gate_down")),
            column(*params.linear("gate_up")),
        )
        self.step_down, self.step_up = (
            replicated(*params.linear("step_down")),
            column(*params.linear("step_up")),
        )

    def project(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Query, key, value, gate, step and beta, [B, S, ...]."""
        query, key, value, beta = project_inputs(
            hidden, (self.query, self.key, self.value), narrow=(self.beta,)
        )
        gate, step = column_parallel(hidden, (self.gate_down, self.step_down))
        return query, key, value, self.gate_up(gate), self.step_up(step), beta
