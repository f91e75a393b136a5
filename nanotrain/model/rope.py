"""Rotary position embeddings (RoPE): `inverse_frequencies`, `RotaryTables` (cosines and sines),
`layer_tables`, `apply_rotary`, `scale_query`.

R channels of a head are R/2 pairs (x[i], x[i + R/2]), the half-rotation convention of Llama and
Hugging Face. Pair i at position p is rotated by the angle p * inverse_frequency[i]. The remaining
channels stay as they are.

Su et al. 2021 (RoFormer), section 3.4. For long contexts the scaling of Llama 3.1, or YaRN (Peng et
al. 2023, section 3), which also lengthens queries and keys, and with MLA raises the scale of the
softmax (DeepSeek-V2, section 3.1.4).

    B batch   S sequence   N heads   D width of a head   R rotary channels of a head
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nanotrain.config.model import ModelConfig, YarnConfig


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines of the angles, each [S, 1, R/2] or [B, S, 1, R/2], in the dtype of the
    activations.

    A layer without rotary positions has R = 0 where its queries have factors.
    """

    cos: Tensor
    sin: Tensor
    # [S, 1, 1] or [B, S, 1, 1], a factor of each query by its position
    query_scale: Tensor | None = None

    def first(self, length: int) -> "Rotary":
        """Those of the first positions."""
        scale = self.query_scale
        return Rotary(
            self.cos[:length], self.sin[:length], None if scale is None else scale[:length]
        )


def inverse_frequencies(model_config: ModelConfig, *, is_local: bool = False) -> Tensor:
    """The angle per position of each pair: [R/2] fp32, on the CPU; of layers with a window where
    `is_local`.
    """
    size = model_config.rotary_dim
    exponents = torch.arange(0, size, 2, dtype=torch.int64, device="cpu").float() / size
    if is_local and model_config.rotary_base_local is not None:
        return 1.0 / model_config.rotary_base_local**exponents
    unscaled = (
        1.0 / model_config.rotary_base**exponents / model_config.rotary_seq_len_interpolation_factor
    )
    if model_config.yarn is not None:
        return _scale_yarn(unscaled, model_config.yarn, base=model_config.rotary_base)
    return _scale(unscaled, model_config) if model_config.use_rope_scaling else unscaled


def _scale_yarn(unscaled: Tensor, yarn: YarnConfig, *, base: float) -> Tensor:
    """YaRN: divide the frequency of slow pairs by the factor, keep that of fast ones, interpolate
    between by index.
    """
    size, original = 2 * len(unscaled), yarn.original_max_position_embeddings

    def pair_with(rotations: float) -> float:
        """The index of the pair that turns this often in the original context."""
        turns = math.log(original / (rotations * 2 * math.pi))
        return size * turns / (2 * math.log(base))

    first, last = pair_with(yarn.beta_fast), pair_with(yarn.beta_slow)
    if yarn.correction_range_round_to_int:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    is_slow = ((torch.arange(len(unscaled), device="cpu") - first) / max(last - first, 1e-3)).clamp(
        0, 1
    )
    return unscaled / yarn.rotary_scaling_factor * is_slow + unscaled * (1 - is_slow)


def _scale(unscaled: Tensor, model_config: ModelConfig) -> Tensor:
    """Llama 3.1: divide low frequencies by the factor, keep high ones, interpolate between."""
    original, low, high = (
        model_config.rope_original_max_positions,
        model_config.rope_low_freq_factor,
        model_config.rope_high_freq_factor,
    )
    wavelength = 2 * math.pi / unscaled
    scaled = torch.where(
        wavelength > original / low, unscaled / model_config.rope_scaling_factor, unscaled
    )
    weight = (original / wavelength - low) / (high - low)
    interpolated = (1 - weight) * scaled / model_config.rope_scaling_factor + weight * scaled
    is_between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(is_between, interpolated, scaled)


class RotaryTables:
    """Cosines and sines per device and dtype; the longest table so far is kept.

    Not a module: the tables follow the activations and are never saved.

    Args:
        model_config: base and scaling.
        layers: those that they are for: "full"; "window" with a base of their own, without scaling;
            or "no rope".
    """

    def __init__(
        self, model_config: ModelConfig, *, layers: Literal["full", "window", "no rope"] = "full"
    ) -> None:
        yarn = model_config.yarn if layers == "full" else None
        self._inverse_frequencies = inverse_frequencies(model_config, is_local=layers == "window")
        self._length = 1.0 if yarn is None else yarn.rotary_mscale
        # the factor of a query by its position: coefficient, positions of a context, those before
        # the first one
        self._scaling = (0.0, 1, 0)
        if yarn is not None:
            self._scaling = (yarn.query_scaling_beta, yarn.original_max_position_embeddings, 0)
        if layers == "no rope":
            self._inverse_frequencies = self._inverse_frequencies[:0]
            self._scaling = (model_config.attn_scale, model_config.floor_scale, 1)
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
        return cached.first(positions)

    def _compute(self, positions: Tensor, like: Tensor) -> Rotary:
        # Kept on the device: the host would wait for a copy of every microbatch, as its memory is
        # not pinned.
        self._inverse_frequencies = self._inverse_frequencies.to(like.device)
        # Angles need fp32: bf16 rounds position 257 to 256.
        with torch.no_grad():
            angles = positions.float()[..., None, None] * self._inverse_frequencies
            cos, sin = ((x * self._length).to(like.dtype) for x in (angles.cos(), angles.sin()))
            return Rotary(cos, sin, self._query_scale(positions, like))

    def _query_scale(self, positions: Tensor, like: Tensor) -> Tensor | None:
        """1 in the original context, and more with every further one."""
        coefficient, length, offset = self._scaling
        if coefficient == 0:
            return None
        contexts = (positions[..., None, None] + offset) // length
        return (1 + coefficient * contexts.float().log1p()).to(like.dtype)


def layer_tables(model_config: ModelConfig) -> tuple[RotaryTables | None, ...]:
    """The tables of layers; of layers with a window where they have others; of layers without
    rotary positions.
    """
    if not model_config.has_rope:
        return None, None, None
    local = (
        RotaryTables(model_config, layers="window")
        if model_config.rotary_base_local is not None
        else None
    )
    factors = RotaryTables(model_config, layers="no rope") if model_config.attn_scale > 0 else None
    return RotaryTables(model_config), local, factors


def apply_rotary(x: Tensor, rotary: Rotary | None) -> Tensor:
    """Rotate every pair of every head by its angle.

    Args:
        x: [B, S, N, D] queries or keys.
        rotary: cosines and sines of the S positions, in the dtype of x; None for no rotation.

    Returns:
        [B, S, N, D], same dtype.
    """
    if rotary is None or rotary.cos.shape[-1] == 0:
        return x
    cos, sin, num_pairs = rotary.cos, rotary.sin, rotary.cos.shape[-1]
    low, high, rest = x.split((num_pairs, num_pairs, x.shape[-1] - 2 * num_pairs), dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)


def scale_query(query: Tensor, rotary: Rotary | None) -> Tensor:
    """[B, S, N, D] -> the same shape, multiplied by the factors of the positions where the tables
    have them.
    """
    return query if rotary is None or rotary.query_scale is None else query * rotary.query_scale
