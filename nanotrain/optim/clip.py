"""Global gradient norm, equal on every rank, and the clip factor computed from it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nanotrain.comm.collectives import all_reduce_scalars
from nanotrain.comm.group import Group

# Keeps the clip factor finite for a vanishing norm; Megatron-LM's value.
EPSILON = 1e-6
# torch's fp32 norm of a long vector loses digits on a CPU (measured: 3e-3 of 40 M elements), and the loss depends on
# the length of the shard. The norm of rows of this length has a relative error of 3e-9 at the same cost.
ROW_NUMEL = 4096


def global_norm(grad_shards: Sequence[Tensor], group: Group) -> float:
    """2-norm over the elements of all ranks' shards; not finite if any element of any rank is not.

    `grad_shards` are flat gradients of this rank: padding is zero and each element is passed by one rank only.
    """
    squared = sum((_squared_norm(shard) for shard in grad_shards), start=torch.zeros(())).item()
    return math.sqrt(all_reduce_scalars([squared], group)[0])


def _squared_norm(shard: Tensor) -> Tensor:
    """Sum of squares as an fp64 scalar: fp32 within rows, fp64 across rows."""
    in_rows = shard.numel() // ROW_NUMEL * ROW_NUMEL
    rows = torch.linalg.vector_norm(shard[:in_rows].view(-1, ROW_NUMEL), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(shard[in_rows:], dtype=torch.float32)
    return rows.double().square().sum() + rest.double().square()


def clip_factor(norm: float, max_norm: float) -> float:
    """Factor that reduces gradients of norm `norm` to norm `max_norm`; 0 means no limit.

    >>> round(clip_factor(4.0, 1.0), 6)
    0.25
    >>> clip_factor(4.0, 0.0)
    1.0
    """
    return min(1.0, max_norm / (norm + EPSILON)) if max_norm > 0 else 1.0
