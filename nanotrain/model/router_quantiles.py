"""Quantile balancing: the bias with which every expert gets an even share of the tokens.

    cutoff     of a token: its K+1st highest score + bias
    required   cutoff - score: the bias that an expert would need to be chosen by the token
    bias       the K/E quantile of the required ones, over all tokens of the global batch; so K/E of
               the tokens would choose the expert. The mean over experts is subtracted

Required biases lie in [min(bias) - 1, max(bias) + 1], as scores lie in [0, 1]. They are counted in
bins of equal width, so counts of ranks and microbatches add up, and the quantile is interpolated
inside its bin.

Source: Kimi K3 (2026), section 2.3.3, equations 13 and 14, and appendix D; Su 2026, "MoE Odyssey",
part 6.

    B batch   S tokens of a sequence   E experts   K experts per token   N bins
"""

import torch
from torch import Tensor

from nanotrain.config.model import MoEConfig
from nanotrain.model.router_stats import StatefulModule


class RequiredBias(StatefulModule):
    """Counts of the biases that the experts of one router would need, since the last step.

    Args:
        moe: number of experts and bins.

    Attributes:
        counts: [E, N] int32.
    """

    counts: Tensor

    def __init__(self, moe: MoEConfig) -> None:
        super().__init__()
        self._topk = moe.router_topk
        counts = torch.zeros(moe.num_choices, moe.router_qb_num_bins, dtype=torch.int32)
        self.register_buffer("counts", counts, persistent=False)

    @torch.no_grad()
    def count(self, scores: Tensor, bias: Tensor) -> None:
        """Count a batch.

        Args:
            scores: [B, S, E] fp32, without bias.
            bias: [E], of the selection.
        """
        num_experts, num_bins = self.counts.shape
        best = (scores + bias).topk(self._topk + 1, dim=-1).values
        required = best[..., -1:] - scores
        low, width = bin_range(bias, num_bins)
        bins = ((required - low) / width).long().clamp(min=0, max=num_bins - 1)
        experts = torch.arange(num_experts, device=bins.device)
        flat = (bins + experts * num_bins).flatten()
        ones = torch.ones_like(flat, dtype=self.counts.dtype)
        self.counts.view(-1).scatter_add_(0, flat, ones)


def bin_range(bias: Tensor, num_bins: int) -> tuple[Tensor, Tensor]:
    """The lower edge of the first bin, and the width of a bin."""
    low = bias.min() - 1.0
    width = (bias.max() + 1.0 - low) / num_bins
    return low, width


def quantile_bias(counts: Tensor, bias: Tensor, *, fraction: float) -> Tensor:
    """The bias that the given fraction of the tokens require at most, of every expert.

    Args:
        counts: [E, N] over all tokens of the global batch.
        bias: [E], of the selection of these tokens.
        fraction: K / E.

    Returns:
        [E] fp64 with mean 0; `bias` where nothing was counted.
    """
    low, width = bin_range(bias.double(), counts.shape[1])
    cumulative = counts.double().cumsum(dim=1)
    target = fraction * cumulative[:, -1:]
    # the first bin that reaches the target and has tokens
    index = (cumulative < target).sum(dim=1, keepdim=True)
    in_bin = counts.double().gather(1, index.clamp(max=counts.shape[1] - 1))
    reached = cumulative.gather(1, index.clamp(max=counts.shape[1] - 1))
    inside = (target - (reached - in_bin)) / in_bin.clamp(min=1.0)
    values = (low + (index + inside) * width).squeeze(1)
    centered = values - values.mean()
    return torch.where(cumulative[:, -1].sum() > 0, centered, bias.double())
