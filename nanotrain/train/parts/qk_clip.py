"""QK-clip: query and key weights of heads whose largest attention logit exceeds a threshold are
scaled down.

QKClip              scales the rows of the main params after every update
MaxAttentionLogit   `--log-max-attention-logit`: the largest logit since the last logged step, over all layers and ranks

    factor of a head    f = min(1, threshold / its largest logit)
    attention           query rows f^alpha           key rows f^(1 - alpha); heads that share a key: the smallest f
    MLA                 query rows f^alpha, rotary   key rows f^(1 - alpha); the rotary key, which all heads share,
                        query rows f                 and values stay as they are

So every logit of a head is scaled by f, biases included. A layer is clipped after the update of the
step in which the logits were observed (`model/attention.py`).

Source: Kimi K2 (2025), section 2.1, algorithm 1 (MuonClip), with alpha 1/2; Megatron-LM for heads
that share a key.

    N query heads over all tp ranks   G key/value heads
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nanotrain.comm.collectives import all_reduce
from nanotrain.comm.group import Group
from nanotrain.config.config import OptimConfig
from nanotrain.model.attention import MaxLogits
from nanotrain.optim.distributed import Update
from nanotrain.spec.kinds import MIXERS
from nanotrain.spec.shape import ModelShape
from nanotrain.train.parts.part import BuiltModel, StepPart


class QKClip(StepPart):
    """Scales query and key weights by the logits of the step; no weight of a skipped step."""

    def __init__(self, model: BuiltModel) -> None:
        self._model = model

    def after_update(self, update: Update, sums: Tensor, *, is_logged: bool) -> Tensor:
        """Two all-reduces of one number per layer and head of each stage."""
        model, groups = self._model, self._model.context.groups
        config, shape = model.config.optim, model.plan.shape
        for stage in model.stages.values():
            factors = collect_factors(
                stage, config, shape=shape, tp=groups["tp"], dp_cp=groups["dp_cp"]
            )
            model.optimizer.scale_rows(
                {name: torch.where(update.skipped, 1.0, f) for name, f in factors.items()}
            )
        return sums


class MaxAttentionLogit(StepPart):
    """The largest attention logit."""

    def __init__(self, model: BuiltModel) -> None:
        self._stages, self._context = model.stages, model.context

    def after_update(self, update: Update, sums: Tensor, *, is_logged: bool) -> Tensor:
        if not is_logged:
            return sums
        largest = torch.full((1,), -torch.inf, device=self._context.device)
        for stage in self._stages.values():
            for logits in logits_of(stage).values():
                largest = torch.maximum(largest, logits.peak)
                logits.peak.fill_(-torch.inf)
        all_reduce(largest, self._context.groups["world"], op="max")
        return largest

    def metrics(self, numbers: Sequence[float]) -> dict[str, Any]:
        return {"max_attention_logit": numbers[0]}


def collect_factors(
    stage: nn.Module, config: OptimConfig, *, shape: ModelShape, tp: Group, dp_cp: Group
) -> dict[str, Tensor]:
    """The factors of the rows of a stage's query and key parameters by name, the same on every
    rank; resets the logits.

    Args:
        stage: stage with the same layers on every rank of the groups.
        config: threshold and alpha.
        shape: shape of the model.
        tp: ranks with other heads.
        dp_cp: ranks with other samples or tokens.
    """
    tracked = logits_of(stage)
    if not tracked:
        return {}
    largest = next(iter(tracked.values())).largest.new_full(
        (len(tracked), shape.num_heads), -torch.inf
    )
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
    return {
        name.removesuffix(suffix): module
        for name, module in modules
        if isinstance(module, MaxLogits)
    }


def row_factors(of_heads: Tensor, shape: ModelShape, *, alpha: float) -> Mapping[str, Tensor]:
    """The factors of the rows of query and key parameters, by their name in the layer, from those
    of the heads [N].

    The result may name parameters that the layer does not have (biases, a query without
    q_lora_rank).
    """
    shared = of_heads.view(shape.query_groups, -1).amin(dim=1)
    heads_per_group = shape.num_heads // shape.query_groups
    factors = {
        "query": (shared**alpha).repeat_interleave(heads_per_group),
        "key": shared ** (1 - alpha),
        "both": shared.repeat_interleave(heads_per_group),
        "none": torch.ones_like(shared),
    }
    rows = next(rows for mixer in shape.mixers if mixer and (rows := MIXERS[mixer].clipped_rows))
    return {
        name: _rows(*((factors[heads], size) for heads, size in parts))
        for name, parts in rows(shape).items()
    }


def _rows(*channels: tuple[Tensor, int]) -> Tensor:
    """Factors of heads, each for a number of channels -> of the rows of all heads, head by head."""
    return torch.cat(
        [factors[:, None].expand(-1, size) for factors, size in channels], dim=1
    ).flatten()
