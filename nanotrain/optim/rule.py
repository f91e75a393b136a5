"""The interfaces of update rules and of their arithmetic, and the plain arithmetic.

UpdateRule       one row of `OPTIMIZERS`: an elementwise rule and, optionally, a rule for matrices
MatrixRule       an update that depends on all elements of a matrix (Muon)
MatrixArithmetic how a rule for matrices adds updates and sums products of elements
ParamRange       fp32 main params, gradients and state of consecutive elements
UpdateStep       hyperparameters of one step
param_groups     the ranges with equal learning rate and weight decay
StepArithmetic   how a step sums squares of gradients, and the form of its update rule
squared_norm     the sum of squares of the gradients of a rank
PLAIN_ARITHMETIC rounded sums of squares, and the update rule as it is
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nanotrain.config.config import OptimConfig

Shape = tuple[int, int]  # rows (outputs) and columns (inputs) of a matrix
# torch's fp32 norm of a long vector loses digits on a CPU (measured: 3e-3 of 40 M elements), and
# the loss depends on the length of the shard. With rows of this length the relative error is 3e-9,
# at the same cost.
ROW_NUMEL = 4096


@dataclass(frozen=True)
class ParamRange:
    """Consecutive elements of a shard with the same hyperparameters, as 1-D tensors."""

    main_param: Tensor  # [n] fp32
    grad: Tensor  # [n] unscaled and clipped
    state: Mapping[str, Tensor]  # [n] fp32 state tensors by name
    weight_decay: bool  # whether weight decay applies
    is_decoupled: bool = False  # whether `--decoupled-lr` applies: embedding and output layer
    width_multiplier: float = 1.0  # of the model, with muP
    follows_width: bool = False  # whether it is a matrix whose rates follow the width
    first_update: int = 0  # updates of the run before these elements were trained


@dataclass(frozen=True)
class UpdateStep:
    """Hyperparameters of one step."""

    config: OptimConfig
    number: Tensor  # fp32 scalar, number of the update from 1, for bias correction
    lr: float  # learning rate
    decoupled_lr: float | None  # of the embedding and the output layer; None for `lr`
    weight_decay: float  # weight decay of the ranges to which it applies
    found_inf: Tensor  # fp32 scalar, 1 if the step is skipped, else 0

    @property
    def is_skipped(self) -> Tensor:
        """`found_inf` as a boolean scalar."""
        return self.found_inf > 0

    def on_host(self) -> "UpdateStep":
        """This step for state in host memory; waits for the device."""
        return replace(self, number=self.number.cpu(), found_inf=self.found_inf.cpu())

    def lr_of(self, part: ParamRange) -> float:
        """The learning rate of a range."""
        if part.is_decoupled and self.decoupled_lr is not None:
            return self.decoupled_lr
        return self.lr * width_factors(part, self.config.optimizer).lr

    def adam_eps_of(self, part: ParamRange) -> float:
        """Adam's epsilon of a range."""
        return self.config.adam_eps * width_factors(part, self.config.optimizer).adam_eps


class WidthFactors(NamedTuple):
    """Factors of the hyperparameters of a range, which follow from the width of the model (muP)."""

    lr: float = 1.0
    adam_eps: float = 1.0


def width_factors(part: ParamRange, optimizer: str) -> WidthFactors:
    """The factors of a range; vectors and embeddings have the factor 1, except with SGD.

    Source: Yang et al. 2022, "Tensor Programs V", table 8 and appendix B.3.
    """
    width = part.width_multiplier
    if optimizer == "sgd":
        return WidthFactors() if part.follows_width else WidthFactors(lr=width)
    return WidthFactors(1 / width, 1 / width) if part.follows_width else WidthFactors()


@dataclass(frozen=True)
class WholeMatrixState:
    """State of a whole matrix, in addition to state per element; in fp32."""

    name: str  # in checkpoints, as the names of state of elements
    numel: Callable[[Shape], int]  # from the shape of a full matrix
    is_replicated: bool = False  # whether every rank of the grid has it; else the owner alone


class Normalize(Protocol):
    """Normalizes a transformed matrix by its state."""

    def __call__(
        self, update: Tensor, moment: Tensor, *, head_rows: Sequence[int], step: UpdateStep
    ) -> Tensor:
        """Normalize [rows, columns].

        Args:
            update: the transformed matrix.
            moment: [n] its state, updated in place.
            head_rows: rows of the slices of one head; empty: the matrix has no heads.
            step: hyperparameters of the step.
        """


@dataclass(frozen=True)
class MatrixArithmetic:
    """How the elements of a matrix on a rank are updated, and products of them summed."""

    # (main, update, factor=): main += factor * update, in place, [n] each
    add_scaled: Callable[..., None]
    # two flat tensors in fp64 -> [k] fp64, added over all ranks
    dot: Callable[[Tensor, Tensor], Tensor]
    join: Callable[[Tensor], Tensor]  # [..., k] of all ranks -> [...], the sums of products


def _add_scaled(main: Tensor, update: Tensor, *, factor: float) -> None:
    """main += factor * update."""
    main.add_(update, alpha=factor)


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """[1], the product of two flat tensors."""
    return (left @ right)[None]


PLAIN_MATRIX_ARITHMETIC = MatrixArithmetic(
    _add_scaled, _dot, join=lambda products: products[..., 0]
)


@dataclass(frozen=True)
class MatrixRule:
    """The update of a hidden matrix.

    main -= lr * (weight_decay * main + scale * normalize(transform(direction)))

    or, if the rule fixes norms, the update of `fixed_norm.py`, without weight decay.
    """

    state_names: tuple[str, ...]  # state tensors per element of a matrix
    # elementwise: updates the state of a range in place and returns the direction [n]. In a skipped
    # step the gradient is replaced by one that leaves the state unchanged, see `momentum`
    direction: Callable[[ParamRange, UpdateStep], Tensor]
    # transforms full matrices of directions, [rows, columns] or [heads, rows, columns]; None: the
    # direction is the update, and nothing is sent
    transform: Callable[[Tensor, OptimConfig], Tensor] | None
    scale: Callable[[Shape, OptimConfig], float]  # factor of the update of a matrix of this shape
    flops: Callable[[Shape, OptimConfig], int]  # FLOPs of `transform`
    # dtype in which directions and transformed matrices are sent
    dtype: Callable[[OptimConfig], torch.dtype]
    # the state tensor that, as a gradient, leaves the state unchanged; None: zeros do so
    momentum: str | None = None
    state: WholeMatrixState | None = None
    normalize: Normalize | None = None
    fixes_norm: bool = False  # its state is the norm of the weights
    arithmetic: MatrixArithmetic = PLAIN_MATRIX_ARITHMETIC


@dataclass(frozen=True)
class UpdateRule:
    """One row of `OPTIMIZERS`."""

    # state tensors per element of the main params; they are part of checkpoints
    state_names: Callable[[OptimConfig], tuple[str, ...]]
    # elementwise, in place; nothing changes in a step with `found_inf`
    update: Callable[[Sequence[ParamRange], UpdateStep], None]
    matrix: MatrixRule | None = None  # replaces `update` for parameters with `needs_whole_matrix`


@dataclass(frozen=True)
class ParamGroup:
    """Ranges with the same hyperparameters."""

    ranges: list[ParamRange]
    main_params: list[Tensor]  # main params of every range
    grads: list[Tensor]  # gradients of every range
    lr: float
    adam_eps: float
    weight_decay: float
    first_update: int  # updates of the run before the ranges were trained

    def state(self, name: str) -> list[Tensor]:
        """One state tensor of every range."""
        return [part.state[name] for part in self.ranges]


def param_groups(ranges: Sequence[ParamRange], step: UpdateStep) -> list[ParamGroup]:
    """Group ranges by the number of their updates, weight decay and learning rate."""
    chosen: dict[tuple[int, bool, bool, bool], list[ParamRange]] = {}
    for part in ranges:
        key = (part.first_update, not part.weight_decay, part.is_decoupled, part.follows_width)
        chosen.setdefault(key, []).append(part)
    groups = []
    for key in sorted(chosen):
        parts = chosen[key]
        decays = parts[0].weight_decay
        group = ParamGroup(
            ranges=parts,
            main_params=[part.main_param for part in parts],
            grads=[part.grad for part in parts],
            lr=step.lr_of(parts[0]),
            adam_eps=step.adam_eps_of(parts[0]),
            weight_decay=step.weight_decay if decays else 0.0,
            first_update=parts[0].first_update,
        )
        groups.append(group)
    return groups


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
