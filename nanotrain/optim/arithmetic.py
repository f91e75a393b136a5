"""How the optimizer step adds up numbers, chosen when the optimizer is built.

StepArithmetic     how squares of gradients are summed, and the form of the update rule
PLAIN_ARITHMETIC   one fp64 number per rank, the rule itself
squared_norm       the sum of squares of flat tensors, whose root is the gradient norm
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanotrain.optim.rule import UpdateRule

# torch's fp32 norm of a long vector loses digits on a CPU (measured: 3e-3 of 40 M elements), and
# the loss depends on the length of the shard. With rows of this length the relative error is 3e-9,
# at the same cost.
ROW_NUMEL = 4096


@dataclass(frozen=True)
class StepArithmetic:
    """How squares are summed, and the form of the update rule."""

    # (grad_shards, device=): [n] fp64 of this rank, added over all ranks. The first is not finite
    # if any gradient is not
    local: Callable[..., Tensor]
    join: Callable[[Tensor], Tensor]  # [n] of all ranks -> the sum of squares, an fp64 scalar
    form_of: Callable[[UpdateRule], UpdateRule]


def squared_norm(grad_shards: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """Sum of the squares of this rank's shards, an fp64 scalar; not finite if any element is not.

    The norm is the root of the sum over all ranks.

    Args:
        grad_shards: flat gradients of this rank: padding is zero and each element is passed by one
            rank only.
        device: device of the result.
    """
    total = torch.zeros((), device=device)
    for shard in grad_shards:
        total = total + _squared_norm(shard)
    return total.double()


def _squared_norm(shard: Tensor) -> Tensor:
    """Sum of squares as an fp64 scalar: fp32 within rows, fp64 across rows."""
    numel_in_rows = shard.numel() // ROW_NUMEL * ROW_NUMEL
    full_rows = shard[:numel_in_rows].view(-1, ROW_NUMEL)
    rows = torch.linalg.vector_norm(full_rows, dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(shard[numel_in_rows:], dtype=torch.float32)
    return rows.double().square().sum() + rest.double().square()


def _one_number(grad_shards: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """[1], `squared_norm`."""
    return squared_norm(grad_shards, device=device)[None]


def _first(squares: Tensor) -> Tensor:
    """The only number of [1]."""
    return squares[0]


PLAIN_ARITHMETIC = StepArithmetic(_one_number, _first, form_of=lambda rule: rule)
