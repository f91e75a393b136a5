"""Rotary position embeddings (RoPE), and the factors of queries by position.

    inverse_frequencies    the angle per position of each pair of channels
    RotaryTables           cosines and sines of positions, kept per device and dtype
    QueryScale             a factor of each query that grows with its position
    PositionTables         the tables of a model's layers
    apply_rotary, scale_query

R channels of a head are R/2 pairs (x[i], x[i + R/2]), the half-rotation convention of Llama and
Hugging Face. Pair i at position p is rotated by the angle p * inverse_frequency[i]. The remaining
channels stay as they are.

Su et al. 2021 (RoFormer), section 3.4. For long contexts the scaling of Llama 3.1, or YaRN (Peng et
al. 2023, section 3), which also lengthens queries and keys, and with MLA raises the scale of the
softmax (DeepSeek-V2, section 3.1.4), or LongRoPE (Ding et al. 2024), which has a factor per pair
for sequences up to the original context and another one for longer sequences.

    B batch   S sequence   N heads   D width of a head   R rotary channels of a head
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanotrain.config.model import ModelConfig, YarnConfig


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines, each [S, 1, R/2] or [B, S, 1, R/2], in the dtype of the activations."""

    cos: Tensor
    sin: Tensor
    # [S, 1, 1] or [B, S, 1, 1], a factor of each query by its position
    query_scale: Tensor | None = None

    def first(self, length: int) -> "Rotary":
        """The tables of the first positions."""
        scale = self.query_scale
        if scale is not None:
            scale = scale[:length]
        return Rotary(self.cos[:length], self.sin[:length], scale)


def inverse_frequencies(
    model_config: ModelConfig, *, is_local: bool = False, is_long: bool = False
) -> Tensor:
    """The angle per position of each pair: [R/2] fp32, on the CPU.

    Args:
        model_config: base and scaling.
        is_long: use the factors of LongRoPE for sequences longer than the original context.
        is_local: use the base of layers with a window, without scaling, where the model has one,
            and the width of their heads.
    """
    size = model_config.window_rotary_dim if is_local else model_config.rotary_dim
    exponents = torch.arange(0, size, 2, dtype=torch.int64, device="cpu").float() / size
    if is_local and model_config.rotary_base_local is not None:
        return 1.0 / model_config.rotary_base_local**exponents
    longrope = model_config.longrope
    if longrope is not None:
        factors = longrope.long_factor if is_long else longrope.short_factor
        return 1.0 / (exponents.new_tensor(factors) * model_config.rotary_base**exponents)
    unscaled = 1.0 / model_config.rotary_base**exponents
    unscaled = unscaled / model_config.rotary_seq_len_interpolation_factor
    if model_config.rotary_proportional and not is_local:
        unscaled[int(model_config.rotary_percent * size) // 2 :] = 0  # not rotated
    if model_config.yarn is not None:
        return _scale_yarn(unscaled, model_config.yarn, base=model_config.rotary_base)
    if model_config.use_rope_scaling:
        return _scale_llama3(unscaled, model_config)
    return unscaled


def _scale_yarn(unscaled: Tensor, yarn: YarnConfig, *, base: float) -> Tensor:
    """YaRN: divide low frequencies by the factor, keep high frequencies.

    Frequencies in between are interpolated by the index of the pair.
    """
    size = 2 * len(unscaled)
    original = yarn.original_max_position_embeddings

    def pair_with(rotations: float) -> float:
        """The index of the pair that turns this often in the original context."""
        turns = math.log(original / (rotations * 2 * math.pi))
        return size * turns / (2 * math.log(base))

    first = pair_with(yarn.beta_fast)
    last = pair_with(yarn.beta_slow)
    if yarn.correction_range_round_to_int:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, size - 1)
    pairs = torch.arange(len(unscaled), device="cpu")
    # 0 for fast pairs, 1 for slow ones
    ramp = ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)
    return unscaled / yarn.rotary_scaling_factor * ramp + unscaled * (1 - ramp)


def _scale_llama3(unscaled: Tensor, model_config: ModelConfig) -> Tensor:
    """Llama 3.1: divide low frequencies by the factor, keep high ones, interpolate between."""
    original = model_config.rope_original_max_positions
    low = model_config.rope_low_freq_factor
    high = model_config.rope_high_freq_factor
    factor = model_config.rope_scaling_factor
    wavelength = 2 * math.pi / unscaled
    scaled = torch.where(wavelength > original / low, unscaled / factor, unscaled)
    weight = (original / wavelength - low) / (high - low)
    interpolated = (1 - weight) * scaled / factor + weight * scaled
    is_between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(is_between, interpolated, scaled)


@dataclass(frozen=True)
class QueryScale:
    """The factor 1 + coefficient * log(1 + (position + offset) // length) of a query."""

    coefficient: float
    length: int  # positions after which the factor changes
    offset: int = 0

    def at(self, positions: Tensor, *, like: Tensor) -> Tensor:
        """[S] or [B, S] int64 -> [S, 1, 1] or [B, S, 1, 1], with the dtype of `like`."""
        contexts = (positions[..., None, None] + self.offset) // self.length
        return (1 + self.coefficient * contexts.float().log1p()).to(like.dtype)


class RotaryTables:
    """Cosines and sines per device and dtype; the longest table so far is kept.

    Not a module: the tables follow the activations and are never saved.

    Args:
        model_config: base and scaling.
        is_local: use the width of layers with a window, and their base, without scaling, where
            the model has one.
    """

    def __init__(self, model_config: ModelConfig, *, is_local: bool = False) -> None:
        self._inverse_frequencies = inverse_frequencies(model_config, is_local=is_local)
        self._length = 1.0  # factor of rotated queries and keys
        self._query_scale: QueryScale | None = None
        # of LongRoPE: frequencies of sequences longer than the original context, and its length
        self._long_frequencies: Tensor | None = None
        self._original_length = 0
        yarn = model_config.yarn
        longrope = model_config.longrope
        has_own_base = is_local and model_config.rotary_base_local is not None
        if yarn is not None and not has_own_base:
            self._length = yarn.rotary_mscale
            if yarn.query_scaling_beta != 0:
                self._query_scale = QueryScale(
                    yarn.query_scaling_beta, yarn.original_max_position_embeddings
                )
        if longrope is not None and not has_own_base:
            self._length = longrope.attention_factor
            self._original_length = longrope.original_max_positions
            self._long_frequencies = inverse_frequencies(
                model_config, is_local=is_local, is_long=True
            )
        self._cache: dict[tuple[torch.device, torch.dtype, bool], Rotary] = {}

    def at(self, positions: int | Tensor, *, like: Tensor, length: int | None = None) -> Rotary:
        """Cosines and sines of every position.

        Args:
            positions: S for the positions 0..S-1, or position ids [B, S] int64.
            like: a tensor with the device and dtype of the result.
            length: tokens of a full sequence, of which the positions may be a part; None: up to the
                last of the positions.
        """
        if isinstance(positions, Tensor):
            return self._compute(positions, like, length=length)
        key = (like.device, like.dtype, positions > self._original_length)
        cached = self._cache.get(key)
        if cached is None or cached.cos.shape[0] < positions:
            ids = torch.arange(positions, device=like.device)
            cached = self._compute(ids, like, length=positions)
            self._cache[key] = cached
        return cached.first(positions)

    def _frequencies(self, positions: Tensor, *, length: int | None) -> Tensor:
        """The frequencies of a sequence; without a length the device chooses by the positions."""
        # Kept on the device: the host would wait for a copy of every microbatch, as its memory is
        # not pinned.
        device = positions.device
        self._inverse_frequencies = self._inverse_frequencies.to(device)
        if self._long_frequencies is None:
            return self._inverse_frequencies
        self._long_frequencies = self._long_frequencies.to(device)
        if length is None:
            is_long = positions.max() + 1 > self._original_length
            return torch.where(is_long, self._long_frequencies, self._inverse_frequencies)
        if length > self._original_length:
            return self._long_frequencies
        return self._inverse_frequencies

    @torch.no_grad()
    def _compute(self, positions: Tensor, like: Tensor, *, length: int | None) -> Rotary:
        """Cosines and sines [..., 1, R / 2] of positions [...], in the dtype of `like`."""
        frequencies = self._frequencies(positions, length=length)
        # Angles need fp32: bf16 rounds position 257 to 256.
        angles = positions.float()[..., None, None] * frequencies
        # the factor of YaRN or LongRoPE on the length of rotated queries and keys, else 1
        cos = (angles.cos() * self._length).to(like.dtype)
        sin = (angles.sin() * self._length).to(like.dtype)
        if self._query_scale is None:
            return Rotary(cos, sin)
        return Rotary(cos, sin, self._query_scale.at(positions, like=like))


@dataclass(frozen=True)
class PositionTables:
    """Tables of position encodings, for layers with and without a window."""

    full: RotaryTables | None  # layers without a window
    windowed: RotaryTables | None  # layers with a window, the same tables unless their base differs
    query_scale: QueryScale | None  # layers without rotary positions

    @classmethod
    def of(cls, model_config: ModelConfig) -> "PositionTables":
        """The tables of a model."""
        if not model_config.has_rope:
            return cls(full=None, windowed=None, query_scale=None)
        full = RotaryTables(model_config)
        windowed = full
        has_own_heads = model_config.window_rotary_dim != model_config.rotary_dim
        if model_config.rotary_base_local is not None or has_own_heads:
            windowed = RotaryTables(model_config, is_local=True)
        query_scale = None
        if model_config.attn_scale > 0:
            query_scale = QueryScale(model_config.attn_scale, model_config.floor_scale, offset=1)
        return cls(full, windowed, query_scale)

    def at(
        self, positions: int | Tensor, *, like: Tensor, length: int | None = None
    ) -> "PositionInputs":
        """The position inputs of full and windowed layers; arguments as `RotaryTables.at`."""
        if self.full is None or self.windowed is None:
            return PositionInputs(full=None, windowed=None, query_scale=None)
        full = self.full.at(positions, like=like, length=length)
        windowed = full
        if self.windowed is not self.full:
            windowed = self.windowed.at(positions, like=like, length=length)
        query_scale = None
        if self.query_scale is not None:
            if not isinstance(positions, Tensor):
                positions = torch.arange(positions, device=like.device)
            query_scale = self.query_scale.at(positions, like=like)
        return PositionInputs(full, windowed, query_scale)


@dataclass(frozen=True)
class PositionInputs:
    """Position encodings of a microbatch, for layers with and without a window."""

    full: Rotary | None  # layers without a window
    windowed: Rotary | None  # layers with a window
    query_scale: Tensor | None  # layers without rotary positions


def apply_rotary(x: Tensor, rotary: Rotary | None) -> Tensor:
    """Rotate every pair of every head by its angle.

    Args:
        x: [B, S, N, D] queries or keys.
        rotary: cosines and sines of the S positions, in the dtype of x; None for no rotation.

    Returns:
        [B, S, N, D], same dtype.
    """
    if rotary is None:
        return x
    cos = rotary.cos
    sin = rotary.sin
    num_pairs = cos.shape[-1]
    low, high, rest = x.split((num_pairs, num_pairs, x.shape[-1] - 2 * num_pairs), dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)


def scale_query(query: Tensor, scale: Tensor | None) -> Tensor:
    """[B, S, N, D] -> the same shape, times the factors of the positions where there are any."""
    return query if scale is None else query * scale
