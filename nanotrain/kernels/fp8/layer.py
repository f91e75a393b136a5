"""fp8 in the layers of a stage.

    fp8_options    options from the configuration; `expert_fp8_options`: options of MoE experts
    SharedAmax     amaxes reduced over the ranks that share a tensor: tp x cp, and etp for experts
    StoredWeight   a weight that is stored in fp8
    Fp8Layer       the options of a layer, and its amax history for delayed scaling

    history [3, E, L]   amaxes of the last L steps: operand, expert, step, newest first; E = 1 in a
                        dense layer
    step_amax [3, E]    the largest amaxes of this step so far, on this rank

    forward, backward   record(amax): largest over microbatches, so recomputation changes nothing
    end of a step       step_amax -- max over ranks --> update(amax): history shifts by one

Scales are computed for whole tensors, as a single rank would compute them for the microbatch. The
history is the same on all ranks of a stage. While it is empty (in the first step of a run, or
for an expert that had no tokens) tensors are scaled by their own amax.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum

import torch
from torch import Tensor, nn

from nanotrain.comm.collectives import all_reduce
from nanotrain.comm.group import Group
from nanotrain.config.config import Fp8Config
from nanotrain.kernels.fp8.quantize import Forms, Quantized, inverse_scales
from nanotrain.kernels.fp8.rounding import LayerKey, RoundingWords
from nanotrain.precision.fp8 import (
    FORMATS,
    GROUPED_CAPABILITY,
    RECIPES,
    Block,
    Fp8Dtypes,
    Recipe,
)

# The largest amaxes over the ranks that share a tensor, of the same shape [tensors, local experts].
ReduceAmax = Callable[[Tensor], Tensor]


class Operand(IntEnum):
    """An operand of the products of a linear layer."""

    INPUT = 0
    WEIGHT = 1
    GRAD = 2  # gradient of the output


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
    margin: int = 0  # delayed scaling: scales are lower by 2^margin
    history_length: int = 1  # delayed scaling: steps of the amax history
    uses_largest: bool = False  # delayed scaling: the largest amax instead of the newest
    # whether torch multiplies all experts in one product, with scales per row
    has_grouped_mm: bool = False
    is_fused: bool = False  # whether Triton kernels cast operands
    keeps_weights: bool = False  # whether weights are cast once per step
    sends_tokens: bool = False  # whether tokens are sent to their experts in fp8
    # reduces amaxes over the ranks that share a tensor; None: tensors or scales are not shared
    reduce_amax: ReduceAmax | None = None
    # random words of this microbatch, in a recipe with stochastic rounding
    rounding: RoundingWords = field(default_factory=RoundingWords)

    @property
    def fits_in_graph(self) -> bool:
        """Whether compiled graphs can have the products: scales need no collective or class."""
        return self.reduce_amax is None and not self.recipe.is_two_level

    def dtype(self, operand: Operand) -> torch.dtype:
        """The fp8 dtype of an operand."""
        return self.dtypes.backward if operand is Operand.GRAD else self.dtypes.forward


@dataclass(frozen=True)
class StoredWeight:
    """A weight that this rank stores in fp8 instead of params_dtype (`--fp8-param-gather`)."""

    values: Tensor  # [E, O, I] fp8, contiguous; E = 1 in a dense layer
    # [E, O / o, I / i] fp32, one per block (o, i); one per matrix with a scale per tensor
    inverse_scales: Tensor
    amax: Tensor  # [E] fp32, over all ranks that share the weight
    block: Block

    def matrix(
        self, *, expert: int = 0, rows: slice = slice(None), transposed: bool = False
    ) -> Quantized:
        """Rows of a weight [R, I], or [I, R]; all rows where scales are per block."""
        values = self.values[expert, rows]
        scales = self.inverse_scales[expert]
        if transposed:
            values = values.t().contiguous()
            scales = scales.t().contiguous()
        return Quantized(values, scales, self.block)

    def matrices(self, *, transposed: bool = False) -> Quantized:
        """The rows of all matrices, [E * O, I], or of all transposed ones, [E * I, O]."""
        values = self.values
        scales = self.inverse_scales
        if transposed:
            values = values.mT.contiguous()
            scales = scales.mT.contiguous()
        return Quantized(values.flatten(0, 1), scales.flatten(0, 1), self.block)


class Fp8Layer(nn.Module):
    """The options and amax history of one weight; for experts, of all stacked weights."""

    history: Tensor | None
    step_amax: Tensor | None

    def __init__(self, options: Fp8Options, experts: ExpertRange | None = None) -> None:
        super().__init__()
        self.options = options
        self.experts = experts or ExpertRange(0, 1, 1)
        self.stored: StoredWeight | None = None  # the weight, if it is stored in fp8
        self.kept: Forms | None = None  # the weight, if it was cast in this step
        self.has_history = False  # whether `history` has amaxes of an earlier step
        self._had_history = False  # the same before the last step
        self.key = LayerKey()  # the layer in the random words of stochastic rounding
        self._oldest: Tensor | None = None  # [3, E, 1], what the last step shifted out
        history = None
        step_amax = None
        if options.recipe.has_history:
            step_amax = torch.zeros(len(Operand), self.experts.num_global)
            history = torch.zeros(*step_amax.shape, options.history_length)
        self.register_buffer("history", history)
        self.register_buffer("step_amax", step_amax, persistent=False)

    @torch.no_grad()
    def record(self, operand: Operand, amax: Tensor) -> None:
        """Raise the amaxes of this step to the amaxes [E of this rank] of a microbatch."""
        if self.step_amax is not None:
            local = self._local_experts(self.step_amax[operand])
            torch.maximum(local, amax, out=local)

    def inverse_scales(self, operand: Operand, amax: Tensor) -> Tensor:
        """The inverse scales [E of this rank] for tensors with these amaxes."""
        dtype = self.options.dtype(operand)
        earlier = self.earlier_amax(operand)
        used = amax if earlier is None else torch.where(earlier > 0, earlier, amax)
        inverse = inverse_scales(used, dtype, power_of_two=False) * 2.0**self.options.margin
        # clamping must not hide an overflow
        return torch.where(amax.isfinite(), inverse, torch.nan)

    def earlier_amax(self, operand: Operand) -> Tensor | None:
        """[E of this rank], from the amax history; 0 if empty, None without delayed scaling."""
        if self.history is None:
            return None
        history = self._local_experts(self.history[operand])
        return history.amax(-1) if self.options.uses_largest else history[:, 0]

    def weight_scales(self, amax: Tensor) -> Tensor:
        """Inverse scales of a weight, from the amaxes [E, O / o, I / i] of its blocks (o, i)."""
        recipe = self.options.recipe
        if recipe.is_per_tensor:
            return self.inverse_scales(Operand.WEIGHT, amax.flatten()).view(amax.shape)
        dtype = self.options.dtype(Operand.WEIGHT)
        return inverse_scales(amax, dtype, power_of_two=recipe.power_of_two)

    @torch.no_grad()
    def update(self, amax: Tensor) -> None:
        """Append the amaxes [3, E] of a step, over all ranks, and reset them.

        Amaxes of an overflow are left out.
        """
        assert self.history is not None, "only delayed scaling has a history"
        assert self.step_amax is not None, "only delayed scaling has a history"
        amax = torch.where(amax.isfinite(), amax, self.history[..., 0])
        self._oldest = self.history[..., -1:].clone()
        self.history.copy_(torch.cat([amax[..., None], self.history[..., :-1]], dim=-1))
        self.step_amax.zero_()
        self._had_history = self.has_history
        self.has_history = True

    @torch.no_grad()
    def take_back(self) -> None:
        """Remove the amaxes of the last step, which is taken again."""
        assert self.history is not None, "only delayed scaling has a history"
        assert self._oldest is not None, "a step has ended"
        self.history.copy_(torch.cat([self.history[..., 1:], self._oldest], dim=-1))
        self.has_history = self._had_history

    def restored(self) -> None:
        """Note that `history` was read from a checkpoint."""
        if self.history is not None:
            self.has_history = bool((self.history > 0).any())

    def _local_experts(self, per_expert: Tensor) -> Tensor:
        return per_expert.narrow(0, self.experts.first, self.experts.num_local)


@dataclass(frozen=True)
class SharedAmax:
    """The largest amaxes over the ranks that share a tensor."""

    sequence: Group  # ranks that hold the tokens of one sequence
    etp: Group  # ranks that hold shards of an expert
    experts: ExpertRange  # experts of this rank; a dense layer counts as one expert

    def __call__(self, amax: Tensor) -> Tensor:
        """[number of tensors, local experts]; may be overwritten."""
        all_reduce(amax, self.etp, op="max")
        first = self.experts.first
        last = first + self.experts.num_local
        # ranks of a sequence have different experts
        full = amax.new_zeros((len(amax), self.experts.num_global))
        full[:, first:last] = amax
        all_reduce(full, self.sequence, op="max")
        return full[:, first:last]


def fp8_options(
    fp8: Fp8Config | None,
    *,
    sequence: Group,
    capability: tuple[int, int] | None = None,
    is_fused: bool = False,
    keeps_weights: bool = False,
    sends_tokens: bool = False,
) -> Fp8Options | None:
    """The options of dense layers; None without fp8.

    Args:
        fp8: section of the configuration; None for no layer in fp8.
        sequence: ranks that hold the tokens of one sequence (tp x cp).
        capability: CUDA compute capability; None on a CPU, which emulates every product.
        is_fused: whether Triton kernels can run.
        keeps_weights: whether weights are cast once per step and kept, in addition to weights in
            params_dtype.
        sends_tokens: whether tokens are sent to their experts in fp8.
    """
    if fp8 is None:
        return None
    recipe = RECIPES[fp8.recipe]
    etp = Group.single_rank("etp")
    reduce_amax = _shared_amax(recipe, sequence, etp=etp)
    return Fp8Options(
        recipe,
        FORMATS[fp8.format],
        wgrad=fp8.wgrad,
        margin=fp8.margin,
        history_length=fp8.amax_history_len,
        uses_largest=fp8.amax_compute_algo == "max",
        has_grouped_mm=capability == GROUPED_CAPABILITY,
        is_fused=is_fused,
        keeps_weights=keeps_weights,
        sends_tokens=sends_tokens,
        reduce_amax=reduce_amax,
    )


def expert_fp8_options(
    options: Fp8Options | None, experts: ExpertRange, *, etp: Group, sequence: Group
) -> Fp8Options | None:
    """The options of an MoE layer's experts, from the options of dense layers."""
    if options is None:
        return None
    reduce_amax = _shared_amax(options.recipe, sequence, etp=etp, experts=experts)
    return replace(options, reduce_amax=reduce_amax)


def _shared_amax(
    recipe: Recipe, sequence: Group, *, etp: Group, experts: ExpertRange = ExpertRange(0, 1, 1)
) -> SharedAmax | None:
    """The ranks that share the amax of a tensor's scale; None if each rank has its own."""
    has_tensor_scale = recipe.is_per_tensor or recipe.is_two_level
    if not has_tensor_scale or sequence.size * etp.size == 1:
        return None
    return SharedAmax(sequence, etp, experts)


def layers_in_bf16(fp8: Fp8Config | None, num_layers: int) -> frozenset[int]:
    """The layers without fp8 products."""
    if fp8 is None or not fp8.first_last_layers_bf16:
        return frozenset()
    first = fp8.num_layers_at_start_in_bf16
    last = num_layers - fp8.num_layers_at_end_in_bf16
    return frozenset(range(num_layers)) - frozenset(range(first, last))
