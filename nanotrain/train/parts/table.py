"""`PARTS`: the features that take part in every training step.

The order is a law. Parts that change weights come in this order between the update rule and the
all-gather:

    qk_clip          scales query and key weights
    moving_average   averages the weights as they are used: after QK-clip
    fp8_amaxes       last: the all-gather quantizes with the scales of the next step

Norms are measured after QK-clip.
"""

from nanotrain.train.parts.exact_range import ExactRange
from nanotrain.train.parts.fp8_amaxes import Fp8Amaxes
from nanotrain.train.parts.losses import IndexerLoss, MTPLosses, SourceLosses
from nanotrain.train.parts.moving_average import MovingAverage
from nanotrain.train.parts.norms import GroupNorms, ParamsNorm
from nanotrain.train.parts.part import BuiltModel, StepPart, StepParts
from nanotrain.train.parts.qk_clip import MaxAttentionLogit, QKClip
from nanotrain.train.parts.quantile_balance import QuantileBalance
from nanotrain.train.parts.rank_capacity import RankCapacity
from nanotrain.train.parts.repeated_step import RepeatedStep
from nanotrain.train.parts.router_balance import RouterBalance
from nanotrain.train.parts.stochastic_rounding import StochasticRounding
from nanotrain.train.parts.trained_params import TrainedParams
from nanotrain.train.parts.zero_grads import ZeroGrads

PARTS: dict[str, type[StepPart]] = {
    "trained_params": TrainedParams,
    "mtp_losses": MTPLosses,
    "indexer_loss": IndexerLoss,
    "source_losses": SourceLosses,
    "router_balance": RouterBalance,
    "quantile_balance": QuantileBalance,
    "rank_capacity": RankCapacity,
    "max_attention_logit": MaxAttentionLogit,
    "qk_clip": QKClip,
    "moving_average": MovingAverage,
    "params_norm": ParamsNorm,
    "group_norms": GroupNorms,
    "zero_grads": ZeroGrads,
    "stochastic_rounding": StochasticRounding,
    "exact_range": ExactRange,
    "repeated_step": RepeatedStep,
    "fp8_amaxes": Fp8Amaxes,
}


def build_parts(model: BuiltModel) -> StepParts:
    """The parts that the configuration of a built model enables; collective."""
    parts = {name: part(model) for name, part in PARTS.items() if part.is_enabled(model)}
    return StepParts(parts, model.context)
