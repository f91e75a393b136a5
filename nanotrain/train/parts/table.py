"""`PARTS`: the features that take part in every training step.

The order is a law. Those that change weights come in this order between the update rule and the
all-gather:

    qk_clip          scales query and key weights
    moving_average   averages the weights as they are used: after QK-clip
    fp8_amaxes       last: the all-gather quantizes with the scales of the next step

Norms are measured after QK-clip.
"""

from collections.abc import Callable

from nanotrain.data.build import source_names
from nanotrain.train.parts.fp8_amaxes import Fp8Amaxes
from nanotrain.train.parts.losses import IndexerLoss, MTPLosses, SourceLosses
from nanotrain.train.parts.moving_average import MovingAverage
from nanotrain.train.parts.norms import GroupNorms, ParamsNorm
from nanotrain.train.parts.part import BuiltModel, StepPart, StepParts
from nanotrain.train.parts.qk_clip import MaxAttentionLogit, QKClip
from nanotrain.train.parts.rank_capacity import RankCapacity
from nanotrain.train.parts.router_balance import RouterBalance

# by name: whether a model has the part, and the part
PARTS: dict[str, tuple[Callable[[BuiltModel], object], Callable[[BuiltModel], StepPart]]] = {
    "mtp_losses": (lambda model: model.plan.shape.num_mtp_layers, MTPLosses),
    "indexer_loss": (
        lambda model: model.plan.shape.dsa and model.plan.shape.dsa.loss_coeff,
        IndexerLoss,
    ),
    "source_losses": (lambda model: source_names(model.dataset), SourceLosses),
    "router_balance": (lambda model: model.config.model.moe, RouterBalance),
    "rank_capacity": (
        lambda model: (
            model.context.group("ep").size > 1
            and model.config.parallel.moe_expert_rank_capacity_factor
        ),
        RankCapacity,
    ),
    "max_attention_logit": (
        lambda model: model.config.train.log_max_attention_logit,
        MaxAttentionLogit,
    ),
    "qk_clip": (lambda model: model.config.optim.qk_clip, QKClip),
    "moving_average": (lambda model: model.config.optim.ema_decay is not None, MovingAverage),
    "params_norm": (
        lambda model: (
            model.config.train.log_params_norm or model.config.train.log_num_zeros_in_grad
        ),
        ParamsNorm,
    ),
    "group_norms": (lambda model: model.config.train.log_norms_by_group, GroupNorms),
    "fp8_amaxes": (lambda model: model.config.precision.fp8, Fp8Amaxes),
}


def build_parts(model: BuiltModel) -> StepParts:
    """The parts that the configuration of a built model asks for; collective."""
    return StepParts(
        {name: part(model) for name, (has, part) in PARTS.items() if has(model)}, model.context
    )
