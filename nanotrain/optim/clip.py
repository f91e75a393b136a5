"""Global gradient norm, equal on every rank, and the clip factor computed from it: scalars on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

# Keeps the clip factor finite for a vanishing norm; Megatron-LM's value.
EPSILON = 1e-6
# torch's fp32 norm of a long vector loses digits on a CPU (measured: 3e-3 of 40 M elements), and the loss depends on
# the length of the shard. The norm of rows of this length has a relative error of 3e-9 at the same cost.
ROW_NUMEL = 4096


def squared_norm(grad_shards: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """Sum of the squares of this rank's shards, an fp64 scalar; not finite if any element is not.

    The norm is the root of the sum over all ranks.

    Args:
        grad_shards: flat gradients of this rank: padding is zero and each element is passed by one rank only.
        device: of the result.
    """
    return sum((_squared_norm(shard) for shard in grad_shards), start=torch.zeros((), device=device)).double()


def _squared_norm(shard: Tensor) -> Tensor:
    """Sum of squares as an fp64 scalar: fp32 within rows, fp64 across rows."""
    in_rows = shard.numel() // ROW_NUMEL * ROW_NUMEL
    rows = torch.linalg.vector_norm(shard[:in_rows].view(-1, ROW_NUMEL), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(shard[in_rows:], dtype=torch.float32)
    return rows.double().square().sum() + rest.double().square()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Factor that reduces gradients of norm `norm` to norm `max_norm`; 0 means no limit.

    >>> norm = torch.tensor(4.0, dtype=torch.float64)
    >>> round(float(clip_factor(norm, 1.0)), 6), float(clip_factor(norm, 0.0))
    (0.25, 1.0)
    """
    if max_norm <= 0:
        return torch.ones_like(norm)
    return (torch.full_like(norm, max_norm) / (norm + EPSILON)).clamp(max=1.0)
