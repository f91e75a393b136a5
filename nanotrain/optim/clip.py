"""One gradient norm for the whole model, the same number on every rank, and the factor that follows from it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nanotrain.comm.collectives import all_reduce_numbers
from nanotrain.comm.group import Group

# Keeps the clip factor finite for a vanishing norm; Megatron-LM's value.
EPSILON = 1e-6


def global_norm(grad_shards: Sequence[Tensor], group: Group) -> float:
    """The 2-norm over all elements of all ranks' shards; not finite if any element anywhere is not.

    Args:
        grad_shards: this rank's flat shards; padding is zero and every element lies on one rank of the group only.
        group: the ranks that the shards are cut among.
    """
    norms = torch.stack([torch.linalg.vector_norm(shard, dtype=torch.float32) for shard in grad_shards])
    squared = norms.double().square().sum().item()
    return math.sqrt(all_reduce_numbers([squared], group)[0])


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients are multiplied by so that their norm is at most `max_norm`; 0 means no limit.

    >>> round(clip_factor(4.0, 1.0), 6)
    0.25
    >>> clip_factor(4.0, 0.0)
    1.0
    """
    return min(1.0, max_norm / (norm + EPSILON)) if max_norm > 0 else 1.0
