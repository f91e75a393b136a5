"""One gradient norm for the whole model, the same number on every rank, and the factor that follows from it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nanotrain.comm.collectives import all_reduce_scalars
from nanotrain.comm.group import Group

# Keeps the clip factor finite for a vanishing norm; Megatron-LM's value.
EPSILON = 1e-6
# torch's fp32 norm of a long vector loses digits on a CPU (measured: 3e-3 of 40 M elements), and shards of another
# length would lose others; rows of this length lose 3e-9 and cost the same time.
ROW_NUMEL = 4096


def global_norm(grad_shards: Sequence[Tensor], group: Group) -> float:
    """The 2-norm over all elements of all ranks' shards; not finite if any element anywhere is not.

    Args:
        grad_shards: flat gradients of this rank; padding is zero and every element is given by one rank only.
        group: the ranks that have all elements among them.
    """
    squared = sum((_squared_norm(shard) for shard in grad_shards), start=torch.zeros(())).item()
    return math.sqrt(all_reduce_scalars([squared], group)[0])


def _squared_norm(shard: Tensor) -> Tensor:
    """The sum of squares, an fp64 scalar: fp32 within rows, fp64 across them."""
    whole = shard.numel() // ROW_NUMEL * ROW_NUMEL
    rows = torch.linalg.vector_norm(shard[:whole].view(-1, ROW_NUMEL), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(shard[whole:], dtype=torch.float32)
    return rows.double().square().sum() + rest.double().square()


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients are multiplied by so that their norm is at most `max_norm`; 0 means no limit.

    >>> round(clip_factor(4.0, 1.0), 6)
    0.25
    >>> clip_factor(4.0, 0.0)
    1.0
    """
    return min(1.0, max_norm / (norm + EPSILON)) if max_norm > 0 else 1.0
