"""`PARTS`: the features that take part in every training step.

The order is a law. Those that change weights come in this order between the update rule and the all-gather:

    qk_clip          scales query and key weights
    moving_average   averages the weights as they are used: after QK-clip
    fp8_amaxes       last: the all-gather quantizes with the scales of the next step

Norms are measured after QK-clip.
"""

from collections.abc import Callable

from nanotrain.train.parts.fp8_amaxes import Fp8Amaxes
from nanotrain.train.parts.losses import MTPLosses, SourceLosses
from nanotrain.train.parts.moving_average import MovingAverage
from nanotrain.train.parts.norms import GroupNorms, ParamsNorm
from nanotrain.train.parts.part import BuiltModel, StepPart, StepParts
from nanotrain.train.parts.qk_clip import MaxAttentionLogit, QKClip
from nanotrain.train.parts.router_balance import RouterBalance

PARTS: dict[str, Callable[[BuiltModel], StepPart | None]] = {
    "mtp_losses": MTPLosses.of,
    "source_losses": SourceLosses.of,
    "router_balance": RouterBalance.of,
    "max_attention_logit": MaxAttentionLogit.of,
    "qk_clip": QKClip.of,
    "moving_average": MovingAverage.of,
    "params_norm": ParamsNorm.of,
    "group_norms": GroupNorms.of,
    "fp8_amaxes": Fp8Amaxes.of,
}


def build_parts(model: BuiltModel) -> StepParts:
    """The parts that the configuration of a built model asks for; collective."""
    built = {name: build(model) for name, build in PARTS.items()}
    return StepParts({name: part for name, part in built.items() if part is not None}, model.context)
