"""Rotary position embeddings (RoPE): `inverse_frequencies`, `RotaryTables` (cosines and sines), `apply_rotary`.

A head of width D is D/2 pairs (x[i], x[i + D/2]), the half-rotation convention of Llama and Hugging Face. Pair i at
position p is rotated by the angle p * inverse_frequency[i].

Su et al. 2021 (RoFormer), section 3.4; the scaling for long contexts is that of Llama 3.1.

    B batch   S sequence   N heads   D width of a head
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanotrain.config.config import ModelConfig
from nanotrain.topology.shape import ModelShape


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines of the angles, each [S, 1, D/2] or [B, S, 1, D/2], in the dtype of the activations."""

    cos: Tensor
    sin: Tensor


def inverse_frequencies(model_config: ModelConfig) -> Tensor:
    """The angle per position of each pair; with MLA only the rotary channels of a head count.

    Returns:
        [D/2] fp32, on the CPU.
    """
    shape = ModelShape.of(model_config)
    size = shape.head_dim if shape.mla is None else shape.mla.rope_dim
    exponents = torch.arange(0, size, 2, dtype=torch.int64, device="cpu").float() / size
    unscaled = 1.0 / model_config.rotary_base**exponents
    return _scale(unscaled, model_config) if model_config.use_rope_scaling else unscaled


def _scale(unscaled: Tensor, model_config: ModelConfig) -> Tensor:
    """Llama 3.1: divide low frequencies by the factor, keep high ones, interpolate between."""
    original, low, high = (
        model_config.rope_original_max_positions,
        model_config.rope_low_freq_factor,
        model_config.rope_high_freq_factor,
    )
    wavelength = 2 * math.pi / unscaled
    scaled = torch.where(wavelength > original / low, unscaled / model_config.rope_scaling_factor, unscaled)
    weight = (original / wavelength - low) / (high - low)
    interpolated = (1 - weight) * scaled / model_config.rope_scaling_factor + weight * scaled
    is_between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(is_between, interpolated, scaled)


class RotaryTables:
    """Cosines and sines per device and dtype; the longest table so far is kept.

    Not a module: the tables follow the activations and are never saved.
    """

    def __init__(self, model_config: ModelConfig) -> None:
        self._inverse_frequencies = inverse_frequencies(model_config)
        self._cache: dict[tuple[torch.device, torch.dtype], Rotary] = {}

    def at(self, positions: int | Tensor, *, like: Tensor) -> Rotary:
        """Cosines and sines of every position.

        Args:
            positions: S for the positions 0..S-1, or position ids [B, S] int64.
            like: a tensor with the device and dtype of the result.
        """
        if isinstance(positions, Tensor):
            return self._compute(positions, like)
        key = (like.device, like.dtype)
        cached = self._cache.get(key)
        if cached is None or cached.cos.shape[0] < positions:
            cached = self._compute(torch.arange(positions, device=like.device), like)
            self._cache[key] = cached
        return Rotary(cached.cos[:positions], cached.sin[:positions])

    def _compute(self, positions: Tensor, like: Tensor) -> Rotary:
        # Angles need fp32: bf16 rounds position 257 to 256.
        with torch.no_grad():
            angles = positions.float()[..., None, None] * self._inverse_frequencies.to(like.device)
            return Rotary(angles.cos().to(like.dtype), angles.sin().to(like.dtype))


def apply_rotary(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate every pair of every head by its angle.

    Args:
        x: [B, S, N, D] queries or keys.
        rotary: of the S positions, in the dtype of x.

    Returns:
        [B, S, N, D], same dtype.
    """
    if torch.compiler.is_compiling():  # the compiler fuses the formula itself
        low, high = x.chunk(2, dim=-1)
        cos, sin = rotary.cos, rotary.sin
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    rotated: Tensor = _Rotate.apply(x, rotary.cos, rotary.sin)
    return rotated


class _Rotate(torch.autograd.Function):
    """Rotation in four half-size passes; saves no activation, as the backward is the inverse rotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos=cos, sin=sin, sign=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos=cos, sin=sin, sign=-1), None, None


def _rotate(x: Tensor, *, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    low, high = x.chunk(2, dim=-1)
    out_low, out_high = out.chunk(2, dim=-1)
    torch.mul(low, cos, out=out_low)
    out_low.addcmul_(high, sin, value=-sign)
    torch.mul(high, cos, out=out_high)
    out_high.addcmul_(low, sin, value=sign)
    return out
