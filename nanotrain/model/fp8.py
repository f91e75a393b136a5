"""fp8 in the layers of a stage: options from the configuration, and amaxes reduced over the ranks that share a tensor.

    dense     activations, their gradients and weights are shared by tp x cp     one number per tensor
    experts   the tokens of an expert by etp and the sequence's ranks            one number per expert and tensor

So a scale is that of the whole tensor, the same that a single rank would compute for the microbatch.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from nanotrain.comm.collectives import all_reduce
from nanotrain.comm.group import Group
from nanotrain.config.config import AmaxAlgo, Fp8Config
from nanotrain.kernels.fp8.layer import ExpertRange, Fp8Options
from nanotrain.precision.fp8 import FP8_FORMATS, GROUPED_CAPABILITY, RECIPES


@dataclass(frozen=True)
class DenseAmax:
    """The largest amaxes over the ranks that hold the tokens of one sequence."""

    sequence: Group

    def __call__(self, amax: Tensor) -> Tensor:
        """[number of tensors, 1]; may be overwritten."""
        all_reduce(amax, self.sequence, op="max")
        return amax


@dataclass(frozen=True)
class ExpertAmax:
    """The largest amaxes of each expert over its shards and over the ranks that hold the tokens of one sequence."""

    etp: Group
    sequence: Group
    experts: ExpertRange

    def __call__(self, amax: Tensor) -> Tensor:
        """[number of tensors, local experts]; may be overwritten."""
        all_reduce(amax, self.etp, op="max")
        if self.sequence.size == 1:
            return amax
        first, num_local = self.experts.first, self.experts.num_local
        full = amax.new_zeros((len(amax), self.experts.num_global))  # ranks of a sequence have different experts
        full[:, first : first + num_local] = amax
        all_reduce(full, self.sequence, op="max")
        return full[:, first : first + num_local]


def fp8_options(
    fp8: Fp8Config | None, *, sequence: Group, capability: tuple[int, int] | None = None
) -> Fp8Options | None:
    """The options of dense layers; None without fp8.

    Args:
        fp8: section of the configuration; None for no layer in fp8.
        sequence: ranks that hold the tokens of one sequence (tp x cp).
        capability: CUDA compute capability; None on a CPU, which emulates every product.
    """
    if fp8 is None:
        return None
    recipe = RECIPES[fp8.recipe]
    return Fp8Options(
        recipe,
        FP8_FORMATS[fp8.format.value],
        wgrad=fp8.wgrad,
        margin=fp8.margin,
        history_length=fp8.amax_history_len,
        uses_largest=fp8.amax_compute_algo is AmaxAlgo.max,
        has_grouped_mm=capability in (None, GROUPED_CAPABILITY),
        reduce_amax=DenseAmax(sequence) if recipe.is_per_tensor and sequence.size > 1 else None,
    )


def expert_fp8_options(options: Fp8Options, experts: ExpertRange, *, etp: Group, sequence: Group) -> Fp8Options:
    """The options of an MoE layer's experts, from those of dense layers."""
    is_shared = options.recipe.is_per_tensor and etp.size * sequence.size > 1
    return replace(options, reduce_amax=ExpertAmax(etp, sequence, experts) if is_shared else None)


def layers_in_bf16(fp8: Fp8Config | None, num_layers: int) -> frozenset[int]:
    """The layers without fp8 products."""
    if fp8 is None or not fp8.first_last_layers_bf16:
        return frozenset()
    start, end = fp8.num_layers_at_start_in_bf16, fp8.num_layers_at_end_in_bf16
    return frozenset(range(num_layers)) - frozenset(range(start, num_layers - end))
