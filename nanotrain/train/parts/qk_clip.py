"""QK-clip: scale down query and key weights of heads with too large attention logits.

QKClip              scales the rows of the main params after every update
MaxAttentionLogit   `--log-max-attention-logit`: the largest logit since the last logged step, over
                    all layers and ranks

    factor of a head    f = min(1, threshold / its largest logit)
    attention           query rows f^alpha, key rows f^(1 - alpha);
                        heads that share a key have the smallest f of all of them
    MLA                 query rows f^alpha, rotary query rows f, key rows f^(1 - alpha);
                        values and the rotary key, which all heads share, stay as they are

So every logit of a head is scaled by f, biases included. A layer is clipped after the update of the
step in which the logits were observed (`model/attention.py`).

Source: Kimi K2 (2025), section 2.1, algorithm 1 (MuonClip), with alpha 1/2; Megatron-LM for heads
that share a key.
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
from nanotrain.train.parts.since_logged import SinceLogged


class QKClip(StepPart):
    """Scales query and key weights by the logits of the step, unless the step is skipped."""

    def __init__(self, model: BuiltModel) -> None:
        self._model = model

    @staticmethod
    def is_enabled(model: BuiltModel) -> bool:
        return model.config.optim.qk_clip

    def after_update(self, update: Update, sums: Tensor, *, is_logged: bool) -> Tensor:
        """Scale the weights of heads with large logits.

        Two all-reduces per stage, of one number per layer and head.
        """
        model = self._model
        config = model.config.optim
        shape = model.plan.shape
        groups = model.context.groups
        for stage in model.stages.values():
            factors = collect_factors(
                stage, config, shape=shape, tp=groups["tp"], dp_cp=groups["dp_cp"]
            )
            for name, rows in factors.items():
                factors[name] = torch.where(update.skipped, 1.0, rows)
            model.optimizer.scale_rows(factors)
        return sums


class MaxAttentionLogit(SinceLogged):
    """Logs the largest attention logit since the last logged step."""

    def __init__(self, model: BuiltModel) -> None:
        self._context = model.context
        self.collected: list[Tensor] = []  # a peak of every layer
        for stage in model.stages.values():
            self.collected += [logits.peak for logits in logits_of(stage).values()]

    @staticmethod
    def is_enabled(model: BuiltModel) -> bool:
        return model.config.train.log_max_attention_logit

    def after_update(self, update: Update, sums: Tensor, *, is_logged: bool) -> Tensor:
        """[1], the largest logit on any rank since the last logged step; empty in other steps."""
        if not is_logged:
            return sums
        largest = torch.full((1,), -torch.inf, device=self._context.device)
        for peak in self.collected:
            largest = torch.maximum(largest, peak)
            peak.fill_(-torch.inf)
        all_reduce(largest, self._context.groups["world"], op="max")
        return largest

    def metrics(self, numbers: Sequence[float]) -> dict[str, Any]:
        return {"max_attention_logit": numbers[0]}


def collect_factors(
    stage: nn.Module, config: OptimConfig, *, shape: ModelShape, tp: Group, dp_cp: Group
) -> dict[str, Tensor]:
    """Row factors of a stage's query and key parameters by name, equal on every rank.

    Resets the logits.

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
    any_logits = next(iter(tracked.values())).largest
    largest = any_logits.new_full((len(tracked), shape.num_heads), -torch.inf)
    for row, logits in zip(largest, tracked.values(), strict=True):
        row.chunk(tp.size)[tp.index].copy_(logits.largest)
        logits.largest.fill_(-torch.inf)
    for group in (tp, dp_cp):
        all_reduce(largest, group, op="max")
    threshold = config.qk_clip_threshold
    is_clipped = (largest > threshold) & largest.isfinite()
    head_factors = torch.where(is_clipped, threshold / largest, 1.0)
    names = {name for name, _ in stage.named_parameters()}
    factors = {}
    for layer, layer_factors in zip(tracked, head_factors, strict=True):
        rows = row_factors(layer_factors, shape, alpha=config.qk_clip_alpha)
        for name, row_factor in rows.items():
            if f"{layer}.{name}" in names:
                factors[f"{layer}.{name}"] = row_factor
    return factors


def logits_of(stage: nn.Module) -> dict[str, MaxLogits]:
    """The tracked attention layers of a stage by name ("layers.3.attention"), in order."""
    tracked = {}
    for name, module in stage.named_modules():
        if isinstance(module, MaxLogits):
            tracked[name.removesuffix(".max_logits")] = module
    return tracked


def row_factors(head_factors: Tensor, shape: ModelShape, *, alpha: float) -> Mapping[str, Tensor]:
    """Factors of the rows of query and key parameters, by their name in the layer.

    The result may name parameters that the layer does not have (biases, a query without
    q_lora_rank).

    Args:
        head_factors: [N] factors of the query heads over all tp ranks.
        shape: shape of the model.
        alpha: exponent of the query.
    """
    shared = head_factors.view(shape.query_groups, -1).amin(dim=1)
    heads_per_group = shape.num_heads // shape.query_groups
    factors = {
        "query": (shared**alpha).repeat_interleave(heads_per_group),
        "key": shared ** (1 - alpha),
        "both": shared.repeat_interleave(heads_per_group),
        "none": torch.ones_like(shared),
    }
    result = {}
    for name, channels in _clipped_rows(shape).items():
        columns = [factors[kind][:, None].expand(-1, size) for kind, size in channels]
        result[name] = torch.cat(columns, dim=1).flatten()
    return result


def _clipped_rows(shape: ModelShape) -> Mapping[str, tuple[tuple[str, int], ...]]:
    """Kinds of factors and numbers of channels in one head of each parameter."""
    for mixer in shape.mixers:
        if mixer and (clipped_rows := MIXERS[mixer].clipped_rows):
            return clipped_rows(shape)
    raise AssertionError("a model with tracked logits has an attention that is clipped")
