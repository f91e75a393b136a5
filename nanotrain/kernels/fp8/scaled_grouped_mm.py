"""Products of fp8 tokens and stacked fp8 matrices, all experts in one: the grouped forms of `scaled_mm`.

    Groups              which tokens belong to which expert, on the device
    multiply_tokens     a [T, K], b [E, N, K]      -> [T, N], of each token with the matrix of its expert
    multiply_matrices   a [T, M], b [T, N]         -> [E, M, N], one product over the tokens of each expert

On CUDA by torch's scaled grouped product, which has row-wise scales: fp8 rows [M, K] and columns [K, N] of each expert.
Other devices emulate it with the bits of one product per expert.

    tokens       | expert 0 | expert 1       | dropped |
    padded       | expert 0 |..| expert 1       |.| dropped | ...      torch sums over multiples of 16 tokens
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.kernels.fp8.quantize import Quantized
from nanotrain.kernels.fp8.scaled_mm import ALIGNMENT
from nanotrain.kernels.grouped import GroupedMM

_PRODUCTS = GroupedMM()


@dataclass(frozen=True)
class Groups:
    """The tokens of each expert."""

    offs: Tensor  # [E] int32, the end of each expert's tokens
    experts: Tensor  # [T] int64, the expert of each token; E for a dropped one

    @classmethod
    def of(cls, offs: Tensor, *, num_tokens: int) -> Self:
        """The groups of `num_tokens` tokens sorted by expert, without a host sync."""
        positions = torch.arange(num_tokens, device=offs.device, dtype=offs.dtype)
        return cls(offs, torch.searchsorted(offs, positions, right=True))

    def per_token(self, per_expert: Tensor) -> Tensor:
        """[E, n] -> [T, n]; dropped tokens get those of the last expert."""
        return per_expert[self.experts.clamp(max=len(self.offs) - 1)]

    def largest(self, per_token: Tensor) -> Tensor:
        """[T, n], not negative -> [E, n], the largest of each expert's tokens; 0 without any."""
        found = per_token.new_zeros(len(self.offs) + 1, per_token.shape[1])
        index = self.experts[:, None].expand_as(per_token)
        return found.scatter_reduce_(0, index, per_token, "amax")[:-1]

    def pad(self) -> tuple[Tensor, Tensor, int]:
        """Pad every expert to a multiple of 16 tokens: the new offsets, the new row of each token, and all rows."""
        starts = F.pad(self.offs, (1, 0))  # of each expert, and of the dropped tokens
        counts = starts.diff()
        padded = F.pad((counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT, (1, 0)).cumsum(0)
        rows = torch.arange(len(self.experts), device=starts.device) + (padded - starts)[self.experts]
        length = len(self.experts) + ALIGNMENT * len(self.offs)  # enough whatever the counts are
        return padded[1:].int(), rows, -(-length // ALIGNMENT) * ALIGNMENT


def multiply_tokens(a: Quantized, b: Quantized, *, groups: Groups, dtype: torch.dtype) -> Tensor:
    """[T, K], [E * N, K] with a scale per row -> [T, N] in `dtype`; rows of dropped tokens are undefined."""
    matrices, scales = b.values.unflatten(0, (len(groups.offs), -1)), b.inverse_scales.view(len(groups.offs), -1)
    if a.values.is_cuda:
        return _multiply(a.values, matrices.mT, scales=(a.inverse_scales[:, 0], scales), offs=groups.offs).to(dtype)
    out = _PRODUCTS.multiply(a.values.float(), matrices.float().mT, offs=groups.offs)
    return out.mul_(a.inverse_scales).mul_(groups.per_token(scales)).to(dtype)


def multiply_matrices(a: Quantized, b: Quantized, *, groups: Groups, dtype: torch.dtype) -> Tensor:
    """[T, M], [T, N] with scales [E, M] and [E, N], or [E, 1] -> [E, M, N] in `dtype`."""
    if a.values.is_cuda:
        offs, rows, length = groups.pad()
        values = [_scatter_rows(x.values, rows, length=length).t().contiguous() for x in (a, b)]
        rows_a, rows_b = (x.inverse_scales.expand(-1, x.values.shape[1]).flatten() for x in (a, b))
        return _multiply(values[0], values[1].t(), scales=(rows_a, rows_b), offs=offs).to(dtype)
    out = _PRODUCTS.multiply(a.values.float().t(), b.values.float(), offs=groups.offs)
    return out.mul_(a.inverse_scales[:, :, None]).mul_(b.inverse_scales[:, None]).to(dtype)


def _multiply(a: Tensor, b: Tensor, *, scales: tuple[Tensor, Tensor], offs: Tensor) -> Tensor:
    functional: Any = F
    row_wise, none = functional.ScalingType.RowWise, functional.SwizzleType.NO_SWIZZLE
    scale_a, scale_b = (scale.contiguous() for scale in scales)
    out: Tensor = functional.scaled_grouped_mm(
        a, b, scale_a, row_wise, scale_b, row_wise, none, none, offs=offs, output_dtype=torch.bfloat16
    )
    return out


def _scatter_rows(values: Tensor, rows: Tensor, *, length: int) -> Tensor:
    """fp8 rows at new places among rows of zeros; the byte 0 is 0.0."""
    padded = torch.zeros(length, values.shape[1], dtype=torch.uint8, device=values.device)
    return padded.index_copy_(0, rows, values.view(torch.uint8)).view(values.dtype)
