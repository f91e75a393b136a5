"""QK-clip: query and key weights of heads whose largest attention logit exceeds a threshold are scaled down.

MaxLogits         one attention layer's largest logit of each head since the last collection, a named buffer
build_core        the core attention of a layer, reporting its logits where they are tracked
collect_factors   factors of the rows of query and key weights, from the logits of all ranks; resets them

    factor of a head    f = min(1, threshold / its largest logit)
    attention           query rows f^alpha           key rows f^(1 - alpha); heads that share a key: the smallest f
    MLA                 query rows f^alpha, rotary   key rows f^(1 - alpha); the rotary key, which all heads share,
                        query rows f                 and values stay as they are

So every logit of a head is scaled by f, biases included. A layer is clipped after the update of the step in which the
logits were observed.

Source: Kimi K2 (2025), section 2.1, algorithm 1 (MuonClip), with alpha 1/2; Megatron-LM for heads that share a key.

    N query heads over all tp ranks   G key/value heads
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nanotrain.attention.chunk_attention import AttentionChunk
from nanotrain.attention.max_logits import largest_logits
from nanotrain.comm.autograd import eager
from nanotrain.comm.collectives import all_reduce
from nanotrain.comm.group import Group
from nanotrain.config.config import OptimConfig
from nanotrain.model.parallel import ModelParallel
from nanotrain.model.router_stats import StatefulModule
from nanotrain.spec.shape import ModelShape


class MaxLogits(StatefulModule):
    """The largest attention logit of each query head of this rank since the last collection.

    Attributes:
        largest: [N / tp] fp32, minus infinity before the first microbatch.
        peak: fp32 scalar, the largest of all heads since it was last logged.
    """

    largest: Tensor
    peak: Tensor

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.register_buffer("largest", torch.full((num_heads,), -torch.inf), persistent=False)
        self.register_buffer("peak", torch.tensor(-torch.inf), persistent=False)

    def observe(self, chunk: AttentionChunk, *, first_head: int = 0) -> None:
        """Count the logits of a chunk; as `LogitObserver`."""
        heads = self.largest[first_head : first_head + chunk.query.shape[1]]
        found = largest_logits(chunk)
        torch.maximum(heads, found, out=heads)
        torch.maximum(self.peak, found.amax(), out=self.peak)


def build_core(parallel: ModelParallel, shape: ModelShape) -> tuple[MaxLogits | None, Callable[..., Tensor]]:
    """The core attention of a layer, and its `MaxLogits` if logits are tracked.

    Logits are tracked in training, not in evaluation, and only once if the core attention is recomputed.
    """
    core, recompute = parallel.core_attention, parallel.recompute
    if not parallel.tracks_logits:
        return None, core
    logits = MaxLogits(shape.num_heads // parallel.tp.group.size)

    @eager
    def run(query: Tensor, *, key: Tensor, value: Tensor, mask: object, **options: Any) -> Tensor:
        is_counted = torch.is_grad_enabled() and not recompute.is_recomputing
        return core(query, key=key, value=value, mask=mask, observe=logits.observe if is_counted else None, **options)

    return logits, run


def collect_factors(
    stage: nn.Module, config: OptimConfig, *, shape: ModelShape, tp: Group, dp_cp: Group
) -> dict[str, Tensor]:
    """The factors of the rows of a stage's query and key parameters by name, the same on every rank; resets the logits.

    Args:
        stage: the same layers on every rank of the groups.
        config: threshold and alpha.
        shape: of the model.
        tp: ranks with other heads.
        dp_cp: ranks with other samples or tokens.
    """
    tracked = logits_of(stage)
    if not tracked:
        return {}
    largest = next(iter(tracked.values())).largest.new_full((len(tracked), shape.num_heads), -torch.inf)
    for row, logits in zip(largest, tracked.values(), strict=True):
        row.chunk(tp.size)[tp.index].copy_(logits.largest)
        logits.largest.fill_(-torch.inf)
    for group in (tp, dp_cp):
        all_reduce(largest, group, op="max")
    clipped = config.qk_clip_threshold / largest
    factors = torch.where((largest > config.qk_clip_threshold) & largest.isfinite(), clipped, 1.0)
    names = {name for name, _ in stage.named_parameters()}
    return {
        f"{layer}.{name}": rows
        for layer, of_heads in zip(tracked, factors, strict=True)
        for name, rows in row_factors(of_heads, shape, alpha=config.qk_clip_alpha).items()
        if f"{layer}.{name}" in names
    }


def logits_of(stage: nn.Module) -> dict[str, MaxLogits]:
    """The tracked attention layers of a stage by name ("layers.3.attention"), in order."""
    suffix = ".max_logits"
    modules = stage.named_modules()
    return {name.removesuffix(suffix): module for name, module in modules if isinstance(module, MaxLogits)}


def row_factors(of_heads: Tensor, shape: ModelShape, *, alpha: float) -> Mapping[str, Tensor]:
    """The factors of the rows of query and key parameters, by their name in the layer, from those of the heads [N].

    The result may name parameters that the layer does not have (biases, a query without q_lora_rank).
    """
    if shape.mla is not None:
        nope, rope, value = shape.mla.nope_dim, shape.mla.rope_dim, shape.value_head_dim
        query, key = of_heads**alpha, of_heads ** (1 - alpha)
        query_rows = _rows((query, nope), (of_heads, rope))
        key_rows = _rows((key, nope), (torch.ones_like(key), value))
        return {"query.weight": query_rows, "query_up.weight": query_rows, "kv_up.weight": key_rows}
    shared = of_heads.view(shape.num_query_groups, -1).amin(dim=1)
    query = (shared**alpha).repeat_interleave(shape.num_heads // shape.num_query_groups)
    query_rows, key_rows = _rows((query, shape.head_dim)), _rows((shared ** (1 - alpha), shape.head_dim))
    return {
        f"{name}.{kind}": rows
        for kind in ("weight", "bias")
        for name, rows in (("query", query_rows), ("key", key_rows))
    }


def _rows(*channels: tuple[Tensor, int]) -> Tensor:
    """Factors of heads, each for a number of channels -> of the rows of all heads, head by head."""
    return torch.cat([factors[:, None].expand(-1, size) for factors, size in channels], dim=1).flatten()
