"""Mamba-2: a scan over tokens with a state per head, in place of attention.

    hidden --+-- value -- value_conv --+
             +-- key ---- key_conv ----+-- scan (attention/ssd.py) -- + skip * value -- norm(. * silu(gate)) -- output
             +-- query -- query_conv --+
             +-- step -- softplus(. + step_bias)    the step of a token; exp(-exp(decay) * step) is its decay
             +-- gate

Dao and Gu 2024, "Transformers are SSMs", section 7; there value is x, key B, query C, step dt,
decay A_log, skip D and gate z. Heads share the key and query of their group. The norm is of the
channels of a group. tp shards groups with their heads, so nothing between the projections is
communicated over tp.

    B batch   S sequence   L local tokens   N heads   G groups   V, K head dims of values and keys
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.attention.chunks import accumulate_dtype
from nanotrain.attention.delta_rule import DeltaInputs
from nanotrain.attention.ssd import span_map, ssd
from nanotrain.config.model import ModelConfig
from nanotrain.model.context import (
    DropoutPlace,
    HiddenDropout,
    LayerContext,
    ModelParallel,
    TokenCache,
)
from nanotrain.model.parameters import Parameters
from nanotrain.model.recurrence import CachedScan, ShortConvolution, project_inputs
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
        self.sizes, self.eps = model_config.mamba, model_config.norm_epsilon
        self.step_bias, self.decay, self.skip = (
            params[name] for name in ("step_bias", "decay", "skip")
        )
        self.norm, self.normalize = (
            params.get("norm"),
            self._normalize if self.sizes.rms_norm else _in_dtype,
        )
        self.scale = _scale_by(self.sizes.multipliers)
        column = partial(ColumnParallelLinear, tensor_parallel=parallel.tp)
        self.gate, self.value = column(*params.linear("gate")), column(*params.linear("value"))
        self.key, self.query = column(*params.linear("key")), column(*params.linear("query"))
        self.step = ColumnParallelLinear(
            *params.linear("step"), tensor_parallel=replace(parallel.tp, fp8=None)
        )
        conv = partial(ShortConvolution, cp=parallel.cp, activation=F.silu)
        names = ("value_conv", "key_conv", "query_conv")
        self.value_conv, self.key_conv, self.query_conv = (
            conv(params.submodule(name)) for name in names
        )
        self.output = RowParallelLinear(*params.linear("output"), tensor_parallel=parallel.tp)
        self.scan = partial(scan_over, group=parallel.cp, comm_type=parallel.cp_comm_type, rule=SSD)
        self.dropout = HiddenDropout(
            model_config.hidden_dropout, layer, DropoutPlace.attention, parallel.tp
        )

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """[B, S or S/tp, H] -> the same shape."""
        wide = (self.gate, self.value, self.key, self.query)
        gate, value, key, query, step = self.scale(
            project_inputs(hidden, wide, narrow=(self.step,))
        )
        value = self.value_conv(value, context).unflatten(-1, (-1, self.sizes.head_dim))
        key = self.key_conv(key, context).unflatten(-1, (-1, self.sizes.state_dim))
        query = self.query_conv(query, context).unflatten(-1, (-1, self.sizes.state_dim))
        dtype = accumulate_dtype(hidden)
        step = F.softplus(step.to(dtype) + self.step_bias.to(dtype)).clamp(
            min=self.sizes.time_step_min
        )[..., None]
        decay = step * -self.decay.to(dtype).exp()[:, None]
        out = self.scan(DeltaInputs(query, key, value, decay, step, context.starts))
        out = (out + value * self.skip.to(dtype)[:, None]).flatten(2) * F.silu(gate.to(dtype))
        return self.dropout(self.output(self.normalize(out, key)), context.dropout)

    def _normalize(self, out: Tensor, key: Tensor) -> Tensor:
        """[B, S, channels] -> the same shape, in the dtype of the keys [B, S, G, K]."""
        num_groups = key.shape[2]
        normed = F.rms_norm(
            out.unflatten(-1, (num_groups, -1)), (out.shape[-1] // num_groups,), eps=self.eps
        )
        assert self.norm is not None, "outputs that are normalized have weights"
        return self.norm * normed.flatten(2).to(key.dtype)

    def cached(self, cache: TokenCache) -> dict[str, Callable[..., Any]]:
        """In generation the scan goes on from the state after the tokens so far."""
        return {"scan": CachedScan(cache, ssd)}


def _in_dtype(out: Tensor, key: Tensor) -> Tensor:
    return out.to(key.dtype)


def _scale_by(factors: Sequence[float]) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """Multiplies projections by their factors; the identity where all are 1."""
    if all(factor == 1.0 for factor in factors):
        return lambda projected: projected
    return lambda projected: [x * factor for x, factor in zip(projected, factors, strict=True)]
