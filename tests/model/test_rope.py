"""Rotary positions: a rotation, relative, and equal in every way to compute it."""

import math
from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanotrain.config.model import LongRopeConfig, MLAConfig, ModelConfig, YarnConfig
from nanotrain.model.rope import (
    PositionTables,
    Rotary,
    RotaryTables,
    apply_rotary,
    inverse_frequencies,
    scale_query,
)
from tests.model.building import LLAMA, LLAMA3, YARN


def heads(length: int = 12, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, length, 3, 8, generator=generator, dtype=dtype)


def rotary(positions: int | torch.Tensor, *, dtype: torch.dtype = torch.float64) -> Rotary:
    return RotaryTables(LLAMA).at(positions, like=torch.empty(0, dtype=dtype))


def by_complex_numbers(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    angles = positions[:, None].double() * inverse_frequencies(LLAMA).double()
    low, high = x.chunk(2, dim=-1)
    rotated = torch.complex(low, high) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((rotated.real, rotated.imag), dim=-1)


def test_every_pair_is_rotated_by_position_times_frequency() -> None:
    x = heads()
    torch.testing.assert_close(
        apply_rotary(x, rotary(12)), by_complex_numbers(x, torch.arange(12)), atol=1e-6, rtol=0
    )


def test_the_gradient_is_that_of_the_formula() -> None:
    x = heads().requires_grad_()
    torch.autograd.gradcheck(lambda x: apply_rotary(x, rotary(12)), x)


@settings(max_examples=25, deadline=None)
@given(shift=st.integers(0, 1000), distance=st.integers(0, 50))
def test_scores_depend_on_the_distance_only(shift: int, distance: int) -> None:
    query, key = heads(1, seed=1)[0, 0, 0], heads(1, seed=2)[0, 0, 0]

    def score(at: int) -> torch.Tensor:
        tables = rotary(torch.tensor([[at + distance, at]]))
        rotated = apply_rotary(torch.stack((query, key))[None, :, None], tables)
        return rotated[0, 0, 0] @ rotated[0, 1, 0]

    torch.testing.assert_close(score(shift), score(0), atol=1e-3, rtol=0)


def test_position_ids_pick_rows_of_the_table() -> None:
    ids = torch.tensor([[0, 1, 2, 0, 1], [3, 4, 5, 6, 0]])
    whole, picked = rotary(7), rotary(ids)
    assert torch.equal(picked.cos, whole.cos[ids])
    assert torch.equal(picked.sin, whole.sin[ids])


def test_a_table_grows_and_shorter_ones_are_its_beginning() -> None:
    tables, like = RotaryTables(LLAMA), torch.empty(0)
    short, long, again = tables.at(4, like=like), tables.at(9, like=like), tables.at(4, like=like)
    assert (len(short.cos), len(long.cos)) == (4, 9)
    assert torch.equal(again.sin, short.sin)
    assert again.sin.data_ptr() == long.sin.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_are_exact_before_they_are_rounded(dtype: torch.dtype) -> None:
    angles = torch.arange(4096).float()[:, None] * inverse_frequencies(LLAMA)
    assert torch.equal(rotary(4096, dtype=dtype).cos[:, 0], angles.cos().to(dtype))


def test_llama3_scaling_keeps_short_waves_and_divides_long_ones() -> None:
    unscaled, scaled = inverse_frequencies(LLAMA), inverse_frequencies(LLAMA3)
    base = 500000.0 ** -(torch.arange(0, 8, 2) / 8)
    wavelength = 2 * torch.pi / base
    assert not torch.equal(unscaled, scaled)
    # original 16, low 1, high 4: waves shorter than 4 are kept, longer than 16 divided by the
    # factor 4.
    torch.testing.assert_close(scaled[wavelength > 16], base[wavelength > 16] / 4)
    between = (wavelength >= 4) & (wavelength <= 16)
    assert between.any()
    assert (scaled[between] < base[between]).all()
    assert (scaled[between] > base[between] / 4).all()


@pytest.mark.parametrize("width", [8, 32, 128])
@pytest.mark.parametrize(("mscale", "mscale_all_dim"), [(1.0, 0.0), (1.0, 1.0), (0.7, 0.4)])
def test_yarn_is_that_of_transformers(width: int, mscale: float, mscale_all_dim: float) -> None:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 24,
        "beta_slow": 2,
    }
    if mscale_all_dim:
        rope |= {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
    config = transformers.LlamaConfig(
        head_dim=width, max_position_embeddings=4096, rope_parameters=rope
    )
    expected, length = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    ours = replace(
        YARN,
        kv_channels=width,
        rotary_base=1e6,
        yarn=YarnConfig(
            rotary_scaling_factor=8.0,
            original_max_position_embeddings=512,
            beta_fast=24.0,
            beta_slow=2.0,
            mscale=mscale,
            mscale_all_dim=mscale_all_dim,
        ),
    )
    torch.testing.assert_close(inverse_frequencies(ours), expected)
    assert ours.yarn.rotary_mscale == pytest.approx(length)
    # DeepSeek-V3's attention multiplies the scale of its softmax as well
    assert ours.yarn.softmax_mscale == pytest.approx((0.1 * mscale_all_dim * math.log(8) + 1) ** 2)


def test_a_share_of_the_channels_is_rotated_and_the_rest_stays() -> None:
    half = replace(LLAMA, rotary_percent=0.5)
    tables, x = RotaryTables(half).at(12, like=torch.empty(0, dtype=torch.float64)), heads()
    rotated = apply_rotary(x, tables)
    assert tables.cos.shape[-1] == 2 and torch.equal(rotated[..., 4:], x[..., 4:])
    narrow = RotaryTables(replace(LLAMA, kv_channels=4)).at(
        12, like=torch.empty(0, dtype=torch.float64)
    )
    torch.testing.assert_close(rotated[..., :4], apply_rotary(x[..., :4].contiguous(), narrow))
    torch.autograd.gradcheck(lambda x: apply_rotary(x, tables), x.requires_grad_())
    latent = replace(half, multi_latent_attention=True, mla=MLAConfig(qk_pos_emb_head_dim=6))
    assert len(inverse_frequencies(latent)) == 3


def test_interleaved_pairs_are_the_same_scores_with_the_channels_in_another_order():
    """Megatron-LM's --rotary-interleaved pairs channels 2i and 2i + 1; the first R channels of a
    head rotate.
    """
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 5, 2, 12, generator=generator, dtype=torch.float64)
    rotary = RotaryTables(
        ModelConfig(hidden_size=24, num_attention_heads=2, rotary_percent=2 / 3)
    ).at(5, like=query)

    def interleaved(x: torch.Tensor) -> torch.Tensor:
        even, odd = x[..., 0:8:2], x[..., 1:8:2]
        pairs = torch.stack(
            (even * rotary.cos - odd * rotary.sin, odd * rotary.cos + even * rotary.sin), dim=-1
        )
        return torch.cat((pairs.flatten(-2), x[..., 8:]), dim=-1)

    def scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bqnd,bknd->bnqk", queries, keys)

    order = [0, 2, 4, 6, 1, 3, 5, 7, 8, 9, 10, 11]
    ours = scores(*(apply_rotary(x[..., order], rotary) for x in (query, key)))
    assert torch.allclose(ours, scores(interleaved(query), interleaved(key)), atol=1e-12)


def test_queries_of_layers_without_rotary_positions_have_the_factors_of_llama4() -> None:
    model = replace(LLAMA, no_rope_freq="2", attn_scale=0.5, floor_scale=3)
    query = torch.rand(1, 20, 2, 8)
    positions = PositionTables.of(model).at(20, like=query)
    expected = torch.tensor([1 + 0.5 * math.log(1 + (position + 1) // 3) for position in range(20)])
    torch.testing.assert_close(
        scale_query(query, positions.query_scale), query * expected[:, None, None]
    )
    later = PositionTables.of(model).at(torch.tensor([[17, 8]]), like=query)
    torch.testing.assert_close(later.query_scale.flatten(), expected[[17, 8]])
    assert positions.windowed is positions.full and positions.full.query_scale is None
    absent = PositionTables.of(replace(model, position_embedding_type="none")).at(20, like=query)
    assert (absent.full, absent.windowed, absent.query_scale) == (None, None, None)
    assert PositionTables.of(LLAMA).at(20, like=query).query_scale is None


def test_queries_of_later_contexts_are_longer() -> None:
    yarn = YarnConfig(
        rotary_scaling_factor=4.0, original_max_position_embeddings=8, query_scaling_beta=0.5
    )
    model = ModelConfig(
        hidden_size=16, num_attention_heads=2, position_embedding_type="yarn", yarn=yarn
    )
    query, tables = torch.ones(1, 20, 2, 8), RotaryTables(model)
    expected = torch.tensor([1 + 0.5 * math.log(1 + position // 8) for position in range(20)])
    scale = tables.at(20, like=query).query_scale
    torch.testing.assert_close(scale_query(query, scale)[0, :, 1, 3], expected)
    later = tables.at(torch.tensor([[17, 8]]), like=query).query_scale
    torch.testing.assert_close(scale_query(query[:, :2], later)[0, :, 0, 0], expected[[17, 8]])
    assert scale_query(query, None) is query


def test_a_shorter_sequence_after_a_longer_one_has_its_own_tables() -> None:
    """Tables are kept: those of a longer sequence begin with those of a shorter one."""
    model = replace(YARN, yarn=replace(YARN.yarn, query_scaling_beta=0.3))
    like, kept = torch.zeros(1), RotaryTables(model)
    longest = 3 * model.yarn.original_max_position_embeddings
    for length in (longest, 5, longest - 1):
        tables, fresh = kept.at(length, like=like), RotaryTables(model).at(length, like=like)
        for name in ("cos", "sin", "query_scale"):
            assert torch.equal(getattr(tables, name), getattr(fresh, name)), (name, length)


LONGROPE = replace(
    LLAMA,
    position_embedding_type="longrope",
    longrope=LongRopeConfig([1.0, 1.5, 2.0, 2.5], [2.0, 3.0, 4.0, 5.0], 8, 1.3),
)


@pytest.mark.parametrize("length, is_long", [(8, False), (9, True)])
def test_longrope_has_other_factors_beyond_the_original_context(length, is_long):
    like, tables = torch.zeros(1), RotaryTables(LONGROPE)
    tables.at(17 - length, like=like)  # what is kept of the other length changes nothing
    found = tables.at(length, like=like)
    longrope = LONGROPE.longrope
    factors = torch.tensor(longrope.long_factor if is_long else longrope.short_factor)
    frequencies = LLAMA.rotary_base ** -(torch.arange(4) / 4) / factors
    angles = torch.arange(length)[:, None, None] * frequencies
    torch.testing.assert_close(found.cos, angles.cos() * 1.3)
    torch.testing.assert_close(found.sin, angles.sin() * 1.3)
    # positions of a chunk by the length of the full sequence; else by the last of them
    ids = torch.arange(length)[None]
    chunk = tables.at(ids[:, :3], like=like, length=length)
    assert torch.equal(chunk.cos[0], found.cos[:3]) and torch.equal(chunk.sin[0], found.sin[:3])
    last = tables.at(ids[:, -1:], like=like)
    assert torch.equal(last.cos[0], found.cos[-1:])


def test_layers_with_a_window_rotate_their_share_as_the_other_layers_do():
    """Without a base of their own they are scaled alike, which also lengthens them."""
    model = replace(YARN, rotary_percent=1.0, window_rotary_percent=0.5)
    like = torch.zeros(1)
    local = RotaryTables(model, is_local=True).at(40, like=like)
    half = RotaryTables(replace(YARN, rotary_percent=0.5)).at(40, like=like)
    assert local.cos.shape[-1] == model.head_dim // 4
    assert torch.equal(local.cos, half.cos) and torch.equal(local.sin, half.sin)


def test_layers_with_a_window_have_plain_frequencies_beside_yarn():
    """Their base is another one, and neither factors nor lengths of the other layers apply."""
    model = replace(
        YARN,
        rotary_base_local=100.0,
        yarn=replace(YARN.yarn, query_scaling_beta=0.3, mscale=1.0, mscale_all_dim=0.5),
    )
    like = torch.zeros(1)
    local = RotaryTables(model, is_local=True).at(40, like=like)
    plain = RotaryTables(replace(LLAMA, rotary_base=100.0)).at(40, like=like)
    torch.testing.assert_close(local.cos, plain.cos)
    torch.testing.assert_close(local.sin, plain.sin)
    assert local.query_scale is None
    full = RotaryTables(model).at(40, like=like)
    length = (full.cos**2 + full.sin**2).sqrt()
    torch.testing.assert_close(length, torch.full_like(length, model.yarn.rotary_mscale))
    assert model.yarn.rotary_mscale != 1.0 and full.query_scale is not None
