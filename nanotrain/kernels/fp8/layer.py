"""fp8 in the layers of a stage.

    fp8_options    options from the configuration; `expert_fp8_options` of the experts of an MoE layer
    SharedAmax     amaxes reduced over the ranks that share a tensor: tp x cp, for the tokens of an expert also etp
    StoredWeight   a weight that is kept in fp8
    Fp8Layer       the options of a layer, and its amax history for delayed scaling

    history [3, E, L]     amaxes of the last L steps: operands x expert x step, newest first; E = 1 in a dense layer
    step_amax [3, E]      the largest amaxes of this step so far, on this rank

    forward, backward     record(amax)                       largest over microbatches, so recomputation changes nothing
    end of a step         step_amax -- max over ranks --> update(amax): history shifts by one

A scale is that of the whole tensor, the same that a single rank would compute for the microbatch.
The history is the same on all ranks of a stage. While it is empty (in the first step of a run, or
for an expert that had no tokens) tensors are scaled by their own amax.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor, nn

from nanotrain.comm.collectives import all_reduce
from nanotrain.comm.group import Group
from nanotrain.config.config import Fp8Config
from nanotrain.kernels.fp8.quantize import Forms, Quantized, inverse_scales
from nanotrain.precision.fp8 import (
    FP8_FORMATS,
    GROUPED_CAPABILITY,
    RECIPES,
    Block,
    Fp8Dtypes,
    Recipe,
)

# The largest amaxes over the ranks that share a tensor: [number of tensors, E of this rank] -> the
# same shape.
ReduceAmax = Callable[[Tensor], Tensor]


class Operand(IntEnum):
    """An operand of the products of a linear layer."""

    INPUT = 0
    WEIGHT = 1
    GRAD = 2  # of the output


@dataclass(frozen=True)
class ExpertRange:
    """The experts of this rank."""

    first: int
    num_local: int
    num_global: int


@dataclass(frozen=True)
class Fp8Options:
    """fp8 options of the linear layers of a run."""

    recipe: Recipe
    dtypes: Fp8Dtypes
    wgrad: bool = True  # whether weight gradients are fp8 products
    margin: int = 0  # delayed: scales are lower by 2^margin
    history_length: int = 1  # delayed
    uses_largest: bool = False  # delayed: the largest amax of the history instead of the newest
    # whether torch multiplies all experts in one product, with scales per row
    has_grouped_mm: bool = False
    is_fused: bool = False  # whether kernels of Triton cast operands
    keeps_weights: bool = False  # whether weights are cast once per step
    # one scale per tensor: over the ranks that share one; None: not shared
    reduce_amax: ReduceAmax | None = None

    def dtype(self, operand: Operand) -> torch.dtype:
        """The fp8 dtype of an operand."""
        return self.dtypes.backward if operand is Operand.GRAD else self.dtypes.forward


@dataclass(frozen=True)
class StoredWeight:
    """A weight that this rank stores in fp8 instead of params_dtype (`--fp8-param-gather`)."""

    values: Tensor  # [E, O, I] fp8, contiguous; E = 1 in a dense layer
    # [E, O / o, I / i] fp32, one per block (o, i); one per matrix with a scale per tensor
    inverse_scales: Tensor
    amax: Tensor  # [E] fp32, of the whole weight over all ranks that share it
    block: Block

    def matrix(
        self, *, expert: int = 0, rows: slice = slice(None), transposed: bool = False
    ) -> Quantized:
        """Rows of a weight [R, I], or [I, R]; all rows where scales are per block."""
        values, scales = self.values[expert, rows], self.inverse_scales[expert]
        if transposed:
            values, scales = values.t().contiguous(), scales.t().contiguous()
        return Quantized(values, scales, self.block)

    def matrices(self, *, transposed: bool = False) -> Quantized:
        """The rows of all matrices, [E * O, I], or of all transposed ones."""
        values, scales = self.values, self.inverse_scales
        if transposed:
            values, scales = values.mT.contiguous(), scales.mT.contiguous()
        return Quantized(values.flatten(0, 1), scales.flatten(0, 1), self.block)


class Fp8Layer(nn.Module):
    """The options and amax history of one weight; for experts, of all stacked weights."""

    history: Tensor | None
    step_amax: Tensor | None

    def __init__(self, options: Fp8Options, experts: ExpertRange | None = None) -> None:
        super().__init__()
        self.options, self.experts = options, experts or ExpertRange(0, 1, 1)
        self.stored: StoredWeight | None = None  # the weight in fp8, if it is kept so
        # the weight, cast in this step, for the products that sum over its columns and over its
        # rows
        self.kept: Forms | None = None
        self.has_history = False  # whether `history` has amaxes of an earlier step
        shape = (len(Operand), self.experts.num_global)
        keeps = options.recipe.has_history
        self.register_buffer(
            "history", torch.zeros(*shape, options.history_length) if keeps else None
        )
        self.register_buffer("step_amax", torch.zeros(shape) if keeps else None, persistent=False)

    @torch.no_grad()
    def record(self, operand: Operand, amax: Tensor) -> None:
        """Raise the amaxes of this step to those [E of this rank] of a microbatch."""
        if self.step_amax is not None:
            local = self._local(self.step_amax[operand])
            torch.maximum(local, amax, out=local)

    def inverse_scales(self, operand: Operand, amax: Tensor) -> Tensor:
        """The inverse scales [E of this rank] for tensors with these amaxes."""
        dtype, earlier = self.options.dtype(operand), self.earlier_amax(operand)
        used = amax if earlier is None else torch.where(earlier > 0, earlier, amax)
        inverse = inverse_scales(used, dtype, power_of_two=False) * 2.0**self.options.margin
        # clamping must not hide an overflow
        return torch.where(amax.isfinite(), inverse, torch.nan)

    def earlier_amax(self, operand: Operand) -> Tensor | None:
        """[E of this rank], from the history; 0 without one, None where scales do not follow from
        it.
        """
        if self.history is None:
            return None
        history = self._local(self.history[operand])
        return history.amax(-1) if self.options.uses_largest else history[:, 0]

    def weight_scales(self, amax: Tensor) -> Tensor:
        """The inverse scales of a weight, from the amaxes [E, O / o, I / i] of its blocks (o, i)."""
        recipe = self.options.recipe
        if recipe.is_per_tensor:
            return self.inverse_scales(Operand.WEIGHT, amax.flatten()).view(amax.shape)
        return inverse_scales(
            amax, self.options.dtype(Operand.WEIGHT), power_of_two=recipe.power_of_two
        )

    @torch.no_grad()
    def update(self, amax: Tensor) -> None:
        """Append the amaxes [3, E] of a step, over all ranks, and reset them; those of an overflow
        are left out.
        """
        assert self.history is not None and self.step_amax is not None, (
            "only delayed scaling keeps a history"
        )
        amax = torch.where(amax.isfinite(), amax, self.history[..., 0])
        self.history.copy_(torch.cat([amax[..., None], self.history[..., :-1]], dim=-1))
        self.step_amax.zero_()
        self.has_history = True

    def restored(self) -> None:
        """Note that `history` was read from a checkpoint."""
        self.has_history = self.history is not None and bool((self.history > 0).any())

    def _local(self, per_expert: Tensor) -> Tensor:
        return per_expert.narrow(0, self.experts.first, self.experts.num_local)


@dataclass(frozen=True)
class SharedAmax:
    """The largest amaxes over the ranks that hold the tokens of one sequence; of experts also over
    their shards.
    """

    sequence: Group
    etp: Group
    experts: ExpertRange  # of a dense layer one, on every rank

    def __call__(self, amax: Tensor) -> Tensor:
        """[number of tensors, local experts]; may be overwritten."""
        all_reduce(amax, self.etp, op="max")
        first, num_local = self.experts.first, self.experts.num_local
        # ranks of a sequence have different experts
        full = amax.new_zeros((len(amax), self.experts.num_global))
        full[:, first : first + num_local] = amax
        all_reduce(full, self.sequence, op="max")
        return full[:, first : first + num_local]


def fp8_options(
    fp8: Fp8Config | None,
    *,
    sequence: Group,
    capability: tuple[int, int] | None = None,
    is_fused: bool = False,
    keeps_weights: bool = False,
) -> Fp8Options | None:
    """The options of dense layers; None without fp8.

    Args:
        fp8: section of the configuration; None for no layer in fp8.
        sequence: ranks that hold the tokens of one sequence (tp x cp).
        capability: CUDA compute capability; None on a CPU, which emulates every product.
        is_fused: whether Triton kernels can run.
        keeps_weights: whether weights are cast once per step, and kept in fp8 beside those in
            params_dtype.
    """
    if fp8 is None:
        return None
    recipe = RECIPES[fp8.recipe]
    return Fp8Options(
        recipe,
        FP8_FORMATS[fp8.format],
        wgrad=fp8.wgrad,
        margin=fp8.margin,
        history_length=fp8.amax_history_len,
        uses_largest=fp8.amax_compute_algo == "max",
        has_grouped_mm=capability == GROUPED_CAPABILITY,
        is_fused=is_fused,
        keeps_weights=keeps_weights,
        reduce_amax=_share(recipe, sequence, etp=Group.single_rank("etp")),
    )


def expert_fp8_options(
    options: Fp8Options | None, experts: ExpertRange, *, etp: Group, sequence: Group
) -> Fp8Options | None:
    """The options of an MoE layer's experts, from those of dense layers; None without fp8."""
    if options is None:
        return None
    reduce_amax = _share(options.recipe, sequence, etp=etp, experts=experts)
    return replace(options, reduce_amax=reduce_amax)


def _share(
    recipe: Recipe, sequence: Group, *, etp: Group, experts: ExpertRange = ExpertRange(0, 1, 1)
) -> SharedAmax | None:
    is_shared = recipe.is_per_tensor and sequence.size * etp.size > 1
    return SharedAmax(sequence, etp, experts) if is_shared else None


def layers_in_bf16(fp8: Fp8Config | None, num_layers: int) -> frozenset[int]:
    """The layers without fp8 products."""
    if fp8 is None or not fp8.first_last_layers_bf16:
        return frozenset()
    start, end = fp8.num_layers_at_start_in_bf16, fp8.num_layers_at_end_in_bf16
    return frozenset(range(num_layers)) - frozenset(range(start, num_layers - end))
