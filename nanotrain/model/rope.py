"""Rotary positions: `frequencies` (pure), `RotaryTables` (their cosines and sines), `rotate`.

A head of width D is read as D/2 pairs (x[i], x[i + D/2]), the half-rotation convention of Llama and Hugging Face;
pair i at position p is turned by the angle p * frequency[i].

Su et al., "RoFormer", section 3.4; the scaling of long contexts is Llama 3.1's.

    B batch   S sequence   N heads   D width of a head
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanotrain.config.config import ModelConfig
from nanotrain.config.derive import head_dim


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of the angles, each [S, 1, D/2] or [B, S, 1, D/2], in the dtype of the activations."""

    cos: Tensor
    sin: Tensor


def frequencies(model_config: ModelConfig) -> Tensor:
    """The angle by which each pair turns per position; latent attention turns a part of every head only.

    Returns:
        [D/2] fp32, on the CPU.
    """
    size = model_config.mla.qk_pos_emb_head_dim if model_config.multi_latent_attention else head_dim(model_config)
    exponents = torch.arange(0, size, 2, dtype=torch.int64, device="cpu").float() / size
    plain = 1.0 / model_config.rotary_base**exponents
    return _stretch(plain, model_config) if model_config.use_rope_scaling else plain


def _stretch(plain: Tensor, model_config: ModelConfig) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by the factor, short ones kept, those between blended."""
    original, low, high = (
        model_config.rope_original_max_positions,
        model_config.rope_low_freq_factor,
        model_config.rope_high_freq_factor,
    )
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > original / low, plain / model_config.rope_scaling_factor, plain)
    share = (original / wavelength - low) / (high - low)
    blended = (1 - share) * stretched / model_config.rope_scaling_factor + share * stretched
    between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(between, blended, stretched)


class RotaryTables:
    """Computes rotations and keeps the longest one made so far per device and dtype.

    Not a module: the tables follow the activations, are never saved and never built on the meta device by mistake.
    """

    def __init__(self, model_config: ModelConfig) -> None:
        self._model = model_config
        self._made: dict[tuple[torch.device, torch.dtype], Rotation] = {}

    def at(self, positions: int | Tensor, *, like: Tensor) -> Rotation:
        """The rotation of every position.

        Args:
            positions: S for the positions 0..S-1, or position ids [B, S] int64.
            like: activations whose device and dtype the rotation takes.
        """
        if isinstance(positions, Tensor):
            return self._compute(positions, like)
        key = (like.device, like.dtype)
        made = self._made.get(key)
        if made is None or made.cos.shape[0] < positions:
            made = self._compute(torch.arange(positions, device=like.device), like)
            self._made[key] = made
        return Rotation(made.cos[:positions], made.sin[:positions])

    def _compute(self, positions: Tensor, like: Tensor) -> Rotation:
        # Angles need fp32: bf16 cannot tell position 257 from 256.
        with torch.no_grad():
            angles = positions.float()[..., None, None] * frequencies(self._model).to(like.device)
            return Rotation(angles.cos().to(like.dtype), angles.sin().to(like.dtype))


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn every pair of every head by its angle.

    Args:
        x: [B, S, N, D] queries or keys.
        rotation: of the S positions, in the dtype of x.

    Returns:
        [B, S, N, D], same dtype.
    """
    if torch.compiler.is_compiling():  # the compiler fuses the plain formula; the hand-written passes would hide it
        low, high = x.chunk(2, dim=-1)
        cos, sin = rotation.cos, rotation.sin
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    turned: Tensor = _Rotate.apply(x, rotation.cos, rotation.sin)
    return turned


class _Rotate(torch.autograd.Function):
    """Rotation in four half-size passes each way; keeps no activation (the backward turns the other way)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos=cos, sin=sin, sign=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grads[0], cos=cos, sin=sin, sign=-1), None, None


def _turn(x: Tensor, *, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    low, high = x.chunk(2, dim=-1)
    out_low, out_high = out.chunk(2, dim=-1)
    torch.mul(low, cos, out=out_low)
    out_low.addcmul_(high, sin, value=-sign)
    torch.mul(high, cos, out=out_high)
    out_high.addcmul_(low, sin, value=sign)
    return out
