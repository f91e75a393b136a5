"""Arguments of the Triton kernels of scans.

B batch   S sequence   M chunks   C tokens of a chunk   G heads of queries and keys
N heads of values   K, V head dims of keys and values   D = 1 or K, decays of a head
"""

from typing import NamedTuple, Self

from torch import Tensor

try:
    from triton.language import constexpr
except ImportError:
    constexpr = None


class Inputs(NamedTuple):
    """Tensors that all kernels read, contiguous."""

    query: Tensor  # [B, S, G, K]
    key: Tensor  # [B, S, G, K]
    value: Tensor  # [B, S, N, V]
    decay: Tensor  # [B, M C, N, D] fp32, cumulative logarithms
    rate: Tensor  # [B, S, N] fp32, factor of a value: beta of a delta rule, dt of Mamba-2
    # [B, S] int32, document of each token; document 0 continues the initial state; None: all 0
    documents: Tensor | None


class Sizes(NamedTuple):
    """Constants of a kernel."""

    heads: int  # N
    groups: int  # G
    key_dim: int  # K
    value_dim: int  # V
    channels: int  # channels of keys that a program has at once, a power of 2, at least 16
    block: int  # columns of values that a program multiplies at once, a power of 2
    chunk: int  # C, a power of 2, at least 16
    levels: int  # log2 C
    decay_dim: int  # D
    by_channel: bool  # every channel of a key has its decay
    corrects: bool  # a delta rule: keys and queries have length 1, values are corrected
    scale: float  # factor of the queries
    eps: float  # added to squared lengths

    def constants(self) -> Self:
        """The constants as arguments of a kernel."""
        return type(self)(*map(constexpr, self))
