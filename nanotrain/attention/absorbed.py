"""`UpProjection`: up-projections of compressed keys and values, applied to queries and outputs.

    query . (key_up c)       = (key_up^T query) . c
    sum_k w_k (value_up c_k) = value_up (sum_k w_k c_k)

DeepSeek-V2 (2024), section 2.1.2.

    B batch   Q queries   N heads   Dn channels without position   R rotary channels
    Dv channels of a value   C width of compressed keys and values
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class UpProjection:
    """The weight of the up-projections of keys and values, which are joined per head."""

    weight: Tensor  # [N * (Dn + Dv), C]
    key_dim: int  # Dn
    value_dim: int  # Dv

    @property
    def key(self) -> Tensor:
        """[N, Dn, C]."""
        return self._per_head[:, : self.key_dim]

    @property
    def value(self) -> Tensor:
        """[N, Dv, C]."""
        return self._per_head[:, self.key_dim :]

    @property
    def _per_head(self) -> Tensor:
        return self.weight.unflatten(0, (-1, self.key_dim + self.value_dim))

    def absorb(self, query: Tensor) -> Tensor:
        """Queries [B, Q, N, Dn + R] in compressed channels, [B, Q, N, C + R]."""
        nope = query[..., : self.key_dim]
        rope = query[..., self.key_dim :]
        compressed = torch.einsum("bqnd,ndc->bqnc", nope, self.key)
        return torch.cat((compressed, rope), dim=-1)

    def expand(self, compressed: Tensor) -> Tensor:
        """Outputs [B, Q, N, C] -> [B, Q, N, Dv]."""
        return torch.einsum("bqnc,ndc->bqnd", compressed, self.value)
