"""`--optimizer normuon`: Muon with a second moment per neuron, after the orthogonalization.

    O = transform(momentum)                              `muon.py`
    v = beta2 v + (1 - beta2) mean over columns of O^2   one number per row (output)
    N = O / (sqrt(v) + epsilon)                          row by row
    W = W (1 - lr weight_decay) - 0.2 lr sqrt(numel) / ||N|| N

so an update has the root mean square 0.2 of Adam's updates, times `--muon-extra-scale-factor`. The
owner of a matrix keeps v. With `--muon-split-qkv-per-head` every slice of a head has its own ||N||.

Source: Li et al. 2025, "NorMuon" (arXiv 2510.05491), algorithm 1.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from nanotrain.config.config import OptimConfig
from nanotrain.optim.heads import transform_heads
from nanotrain.optim.muon import MUON, MUON_MATRIX
from nanotrain.optim.newton_schulz import EPSILON, frobenius_norm
from nanotrain.optim.rule import Shape, UpdateStep, WholeMatrixState

ROOT_MEAN_SQUARE = 0.2


def normalize_neurons(
    update: Tensor, moment: Tensor, *, head_rows: Sequence[int], step: UpdateStep
) -> Tensor:
    """Divide the rows of an orthogonalized matrix by their second moment, which is updated.

    Args:
        update: [rows, columns].
        moment: [rows] fp32; a skipped step leaves it unchanged.
        head_rows: rows of the slices of one head; empty: the matrix has one norm.
        step: hyperparameters.

    Returns:
        [rows, columns] with a root mean square of 1.
    """
    config = step.config
    values = update.to(moment.dtype)
    weight = (1.0 - config.normuon_beta2) * (1.0 - step.found_inf)
    moment.lerp_(values.square().mean(dim=1), weight.to(moment.dtype))
    values = values / (moment.sqrt() + config.normuon_eps)[:, None]
    return transform_heads(values, head_rows, transform=_unit_root_mean_square).to(update.dtype)


def _unit_root_mean_square(x: Tensor) -> Tensor:
    numel = x.shape[-2] * x.shape[-1]
    return x * (math.sqrt(numel) / frobenius_norm(x).clamp(min=EPSILON))


def scale_of(shape: Shape, config: OptimConfig) -> float:
    """Root mean square of the update."""
    return ROOT_MEAN_SQUARE * config.muon_extra_scale_factor


NORMUON = replace(
    MUON,
    matrix=replace(
        MUON_MATRIX,
        scale=scale_of,
        state=WholeMatrixState("neuron_exp_avg_sq", lambda shape: shape[0]),
        normalize=normalize_neurons,
    ),
)
