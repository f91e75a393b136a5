"""Short depthwise causal convolutions, as before linear attention.

out_t = sum_k weight_k x_{t - K + 1 + k} + bias          tokens of other documents are zeros

R rows: sequences, or chunks of them   C tokens   K kernel size   D channels
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.attention.chunks import accumulate_dtype
from nanotrain.attention.scan_kernels import CONVOLUTION, kernel_for
from nanotrain.comm.autograd import eager


def short_convolution(
    window: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None,
    segment_ids: Tensor | None,
    activation: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """`causal_conv` and an activation, in one kernel of the package causal_conv1d where it is."""
    is_known = activation is None or activation is F.silu
    if is_known and kernel_for(CONVOLUTION, window) == "causal_conv1d":
        return package_conv(
            window, weight, bias=bias, segment_ids=segment_ids, has_silu=activation is not None
        )
    out = causal_conv(window, weight, bias=bias, segment_ids=segment_ids)
    return out if activation is None else activation(out)


@eager  # the extension is no operator of a graph
def package_conv(
    window: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None,
    segment_ids: Tensor | None,
    has_silu: bool,
) -> Tensor:
    """The convolution by causal_conv1d, over the whole window, of which the tokens are kept."""
    convolve: Any = import_module("causal_conv1d").causal_conv1d_fn
    if segment_ids is not None:
        segment_ids = segment_ids.to(torch.int32)
    activation = "silu" if has_silu else None
    out: Tensor = convolve(window.mT, weight, bias, seq_idx=segment_ids, activation=activation)
    return out.mT[:, weight.shape[1] - 1 :]


def causal_conv(
    window: Tensor, weight: Tensor, *, bias: Tensor | None = None, segment_ids: Tensor | None = None
) -> Tensor:
    """Causal convolution: every token with itself and the tokens before it.

    Args:
        window: [R, K - 1 + C, D], the tokens and the K - 1 before them.
        weight: [D, K].
        bias: [D] or None.
        segment_ids: [R, K - 1 + C], documents of the tokens; None for one document.

    Returns:
        [R, C, D].
    """
    if segment_ids is None:
        out = F.conv1d(window.mT, weight[:, None], bias, groups=len(weight))
        return out.mT
    kernel_size = weight.shape[1]
    length = window.shape[1] - kernel_size + 1
    token_ids = segment_ids[:, kernel_size - 1 :]
    dtype = accumulate_dtype(window)
    total: Tensor | None = None if bias is None else bias.to(dtype)
    for k, tap in enumerate(weight.to(dtype).unbind(1)):
        tokens = window[:, k : k + length].to(dtype)
        is_same_document = segment_ids[:, k : k + length] == token_ids
        term = torch.where(is_same_document[..., None], tokens, 0.0) * tap
        total = term if total is None else total + term
    assert total is not None, "a kernel has at least one weight"
    return total.to(window.dtype)
