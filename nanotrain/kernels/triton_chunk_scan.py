r"""Triton kernels of chunked linear attention, forward: Mamba-2, Gated DeltaNet and KDA.

    prepare   pairs of tokens in a chunk, the WY form of delta rules, and
              d q and e k with decays per channel                            all chunks at once
    walk      states and outputs, chunk after chunk, the state in registers  all heads at once

In a chunk of C tokens, with cumulative logarithms g of decays, d = exp(g), e = exp(g_C - g), and
T = (I + tril(beta pairs(k, k), -1))^-1 (nanotrain/attention/delta_rule.py has the derivation):

    W = T beta d k       U = T beta v              delta rules
    U' = U - W S         or dt v without a W       corrections of a delta rule, inputs of Mamba-2
    o = d q S + pairs(q, k) U'
    S <- d_C S + (e k)^T U'

Operands of products are in the dtype of the values and sums in fp32; decays, the inverse and the
states are in fp32. Values in fp32, bf16 or fp16; with TRITON_INTERPRET=1 the kernels run on CPU
tensors. Names of sizes are those of triton_scan_inputs.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanotrain.kernels.triton_scan_inputs import Inputs, Sizes

try:
    import triton
    import triton.language as tl
    from triton.language import tensor
    from triton.language import tuple as bundle

    from nanotrain.kernels.triton_scan_tiles import (
        allowed_pairs,
        chunk_index,
        decayed_pairs,
        decays_from_start,
        decays_over,
        decays_to_end,
        load_channels,
        load_decay,
        load_last,
        load_queries,
        load_rates,
        load_scaled,
        load_state,
        load_sums,
        load_values,
        load_vectors,
        locate_tokens,
        pairs_below,
        square_offsets,
        store_channels,
        store_decay,
        store_state,
        store_values,
        unit_factors,
        unit_lower_inverse,
    )
except ImportError:
    triton = None

CHUNK_SIZE = 64  # tokens of a chunk
VALUE_BLOCK = 64  # most columns of a state that a program has in registers
CHANNEL_BLOCK = 64  # most channels of a chunk's keys that a program has in registers
DELTA_BLOCK = 32  # the same of a delta rule, whose gradients need more tiles at once
NORM_EPS = 1e-6  # added to squared lengths, as in attention/delta_rule.py
MIN_TILE = 16  # least rows and columns of a product
WARPS = 8
WALK_STAGES = 2  # chunks in flight: 164 kB of shared memory at most, with heads of 128


class Prepared(NamedTuple):
    """Tensors of all chunks at once, from which a walk computes one chunk after another."""

    pairs: Tensor  # [B, N, M, C, C], queries and keys
    reads: Tensor | None  # [B, S, N, K], W of a delta rule
    targets: Tensor  # [B, S, N, V], U of a delta rule; else the values
    # with decays per channel, which a walk would need registers for
    queries: Tensor | None  # [B, S, N, K], d q
    keys: Tensor | None  # [B, S, N, K], e k


class Kept(NamedTuple):
    """Tensors of all chunks that the forward keeps for the backward."""

    states: Tensor  # [B, N, M, K, V], before each chunk
    corrections: Tensor  # [B, S, N, V], U' of a delta rule; else the values


class Written(NamedTuple):
    """Results of the walk through the chunks in a forward."""

    out: Tensor | None  # [B, S, N, V]
    final: Tensor | None  # [B, N, K, V] fp32


if triton is not None:

    @triton.jit
    def add_decays(
        single: tensor, total: tensor, tokens: tensor, rows: tensor, inside: tensor, sizes: bundle
    ) -> None:
        """Write the cumulative logarithms of a chunk, from the logarithms of single tokens."""
        for start in range(0, sizes.decay_dim, sizes.channels):
            decay = load_decay(single, tokens, inside, start, sizes)
            store_decay(total, tl.cumsum(decay, 0), rows, start, sizes)
        # tokens at borders of blocks are read from memory, which other threads have written
        tl.debug_barrier()

    @triton.jit
    def key_pairs(
        data: bundle, factors: tensor, place: bundle, allowed: tensor, sizes: bundle
    ) -> tensor:
        """[C, C] fp32: pairs of keys with earlier ones, of a delta rule."""
        inside, vectors, _, rows = locate_tokens(place, sizes)
        pairs = tl.zeros([sizes.chunk, sizes.chunk], tl.float32)
        for start in range(0, sizes.key_dim, sizes.channels):
            keys = load_scaled(data.key, factors, vectors, inside, start, sizes)
            decay = load_sums(data.decay, rows, start, sizes)
            pairs += decayed_pairs(keys, keys, decay, data, rows, start, sizes)
        is_earlier = pairs_below(allowed, sizes)
        return tl.where(is_earlier, pairs, 0.0)

    @triton.jit
    def score_pairs(
        data: bundle,
        query_factors: tensor,
        key_factors: tensor,
        place: bundle,
        allowed: tensor,
        sizes: bundle,
    ) -> tensor:
        """[C, C] fp32: pairs of queries with keys that are at most as late."""
        inside, vectors, _, rows = locate_tokens(place, sizes)
        pairs = tl.zeros([sizes.chunk, sizes.chunk], tl.float32)
        for start in range(0, sizes.key_dim, sizes.channels):
            queries = load_scaled(data.query, query_factors, vectors, inside, start, sizes)
            keys = load_scaled(data.key, key_factors, vectors, inside, start, sizes)
            decay = load_sums(data.decay, rows, start, sizes)
            pairs += decayed_pairs(queries, keys, decay, data, rows, start, sizes)
        return tl.where(allowed, pairs, 0.0)

    @triton.jit
    def store_decayed(
        data: bundle,
        query_factors: tensor,
        key_factors: tensor,
        out: bundle,
        place: bundle,
        sizes: bundle,
    ) -> None:
        """Write d q and e k of a chunk."""
        inside, vectors, tokens, rows = locate_tokens(place, sizes)
        for start in range(0, sizes.key_dim, sizes.channels):
            decay = load_sums(data.decay, rows, start, sizes)
            queries = load_scaled(data.query, query_factors, vectors, inside, start, sizes)
            queries *= decays_from_start(decay, data, place, sizes)
            store_channels(out.queries, queries, tokens, inside, start, sizes)
            last = load_last(data.decay, rows, start, sizes)
            keys = load_scaled(data.key, key_factors, vectors, inside, start, sizes)
            keys *= decays_to_end(decay, last, data, place, sizes)
            store_channels(out.keys, keys, tokens, inside, start, sizes)

    @triton.jit
    def _prepare(
        data: bundle, single_decay: tensor, out: bundle, length: tensor, sizes: bundle
    ) -> None:
        """All that is prepared of one chunk of a head.

        Where decays of single tokens are given, their sums are written first.
        """
        chunk = tl.program_id(0)
        row = tl.program_id(1)
        num_chunks = tl.num_programs(0)
        place = (chunk, row, length, num_chunks)
        inside, vectors, tokens, rows = locate_tokens(place, sizes)
        dtype = data.value.dtype.element_ty
        if single_decay is not None:
            add_decays(single_decay, data.decay, tokens, rows, inside, sizes)
        allowed = allowed_pairs(data, place, sizes)
        factors = unit_factors(data.key, vectors, inside, sizes)
        query_factors = unit_factors(data.query, vectors, inside, sizes)
        query_factors *= sizes.scale
        scores = score_pairs(data, query_factors, factors, place, allowed, sizes)
        here = chunk_index(place)
        square = out.pairs + square_offsets(here, sizes)
        tl.store(square, scores.to(dtype))
        if sizes.by_channel:
            store_decayed(data, query_factors, factors, out, place, sizes)
        if sizes.corrects:
            rates = load_rates(data, tokens, inside)
            pairs = key_pairs(data, factors, place, allowed, sizes)
            inverse = unit_lower_inverse(pairs * rates, sizes)
            inverse = inverse.to(dtype)
            factors *= rates
            for start in range(0, sizes.key_dim, sizes.channels):
                keys = load_scaled(data.key, factors, vectors, inside, start, sizes)
                decay = load_sums(data.decay, rows, start, sizes)
                keys *= decays_from_start(decay, data, place, sizes)
                reads = tl.dot(inverse, keys.to(dtype))
                store_channels(out.reads, reads, tokens, inside, start, sizes)
            for start in range(0, sizes.value_dim, sizes.block):
                values = load_values(data.value, tokens, inside, start, sizes)
                scaled = rates * values
                solved = tl.dot(inverse, scaled.to(dtype))
                store_values(out.targets, solved, tokens, inside, start, sizes)

    @triton.jit
    def load_reading(
        data: bundle,
        prepared: bundle,
        place: bundle,
        sizes: bundle,
    ) -> tensor:
        """[C, channels]: d q, the decayed queries, which read the state before a chunk."""
        inside, vectors, tokens, rows = locate_tokens(place, sizes)
        if sizes.by_channel:
            return load_channels(prepared.queries, tokens, inside, 0, sizes)
        queries = load_queries(data, vectors, inside, sizes)
        decay = load_sums(data.decay, rows, 0, sizes)
        queries *= decays_from_start(decay, data, place, sizes)
        return queries.to(data.value.dtype.element_ty)

    @triton.jit
    def load_writing(
        data: bundle,
        prepared: bundle,
        place: bundle,
        sizes: bundle,
    ) -> tensor:
        """[C, channels]: e k, at which a chunk adds to its state."""
        inside, vectors, tokens, rows = locate_tokens(place, sizes)
        if sizes.by_channel:
            return load_channels(prepared.keys, tokens, inside, 0, sizes)
        keys = load_vectors(data.key, vectors, inside, sizes)
        decay = load_sums(data.decay, rows, 0, sizes)
        last = load_last(data.decay, rows, 0, sizes)
        keys *= decays_to_end(decay, last, data, place, sizes)
        return keys.to(data.value.dtype.element_ty)

    @triton.jit
    def load_change(
        data: bundle,
        prepared: bundle,
        state: tensor,
        tokens: tensor,
        inside: tensor,
        start: tensor,
        sizes: bundle,
    ) -> tensor:
        """[C, block] fp32: U', the values that a chunk adds to its state at its keys."""
        target = load_values(prepared.targets, tokens, inside, start, sizes)
        target = target.to(tl.float32)
        if sizes.corrects:
            reads = load_channels(prepared.reads, tokens, inside, 0, sizes)
            change = target - tl.dot(reads, state)
        else:
            change = target * load_rates(data, tokens, inside)
        return change

    @triton.jit
    def _walk(
        data: bundle,
        prepared: bundle,
        initial: tensor,
        kept: bundle,
        out: tensor,
        final: tensor,
        length: tensor,
        num_chunks: tensor,
        sizes: bundle,
    ) -> None:
        """Some columns of the states of a head: outputs and the final state.

        Where `kept` is given: instead the states before the chunks, and the corrections.
        """
        start = tl.program_id(0) * sizes.block
        row = tl.program_id(1)
        dtype = data.value.dtype.element_ty
        state = tl.zeros([sizes.channels, sizes.block], tl.float32)
        if initial is not None:
            state += load_state(initial, row, 0, start, sizes)
        for chunk in range(num_chunks):
            place = (chunk, row, length, num_chunks)
            inside, _, tokens, rows = locate_tokens(place, sizes)
            low_state = state.to(dtype)
            change = load_change(data, prepared, low_state, tokens, inside, start, sizes)
            change = change.to(dtype)
            here = chunk_index(place)
            if kept is not None:
                store_state(kept.states, low_state, here, start, sizes)
                if sizes.corrects:
                    store_values(kept.corrections, change, tokens, inside, start, sizes)
            else:
                queries = load_reading(data, prepared, place, sizes)
                square = prepared.pairs + square_offsets(here, sizes)
                pairs = tl.load(square)
                result = tl.dot(queries, low_state)
                result += tl.dot(pairs, change)
                store_values(out, result, tokens, inside, start, sizes)
            keys = load_writing(data, prepared, place, sizes)
            last = load_last(data.decay, rows, 0, sizes)
            over = decays_over(last, data, place, sizes)
            state *= tl.trans(over)
            state += tl.dot(tl.trans(keys), change)
        if kept is None:
            store_state(final, state, row, start, sizes)


def scan_sizes(inputs: Inputs, *, corrects: bool) -> Sizes:
    """The constants of the kernels for some inputs."""
    heads, value_dim = inputs.value.shape[2:]
    groups, key_dim = inputs.key.shape[2:]
    key_width = triton.next_power_of_2(key_dim)
    channels = max(MIN_TILE, key_width)
    decay_dim = inputs.decay.shape[-1]
    most_channels = DELTA_BLOCK if corrects else CHANNEL_BLOCK
    value_width = triton.next_power_of_2(value_dim)
    block = max(MIN_TILE, value_width)
    scale = key_dim**-0.5 if corrects else 1.0
    return Sizes(
        heads=heads,
        groups=groups,
        key_dim=key_dim,
        value_dim=value_dim,
        channels=min(most_channels, channels),
        block=min(VALUE_BLOCK, block),
        chunk=CHUNK_SIZE,
        levels=CHUNK_SIZE.bit_length() - 1,
        decay_dim=decay_dim,
        by_channel=decay_dim > 1,
        corrects=corrects,
        scale=scale,
        eps=NORM_EPS,
    )


def empty_sums(decay: Tensor) -> Tensor:
    """Memory of cumulative decays [B, M C, N, D] for decays of single tokens [B, S, N, D]."""
    batch, length, heads, width = decay.shape
    padded = triton.cdiv(length, CHUNK_SIZE) * CHUNK_SIZE
    return decay.new_empty(batch, padded, heads, width)


def prepare(inputs: Inputs, sizes: Sizes, *, decay: Tensor | None = None) -> Prepared:
    """The tensors from which all chunks are computed.

    Args:
        inputs: inputs of the scan.
        sizes: constants of the kernels.
        decay: [B, S, N, D] fp32, logarithms of single tokens, whose sums are written to
            `inputs.decay`; None where it has them.
    """
    value = inputs.value
    batch, length, heads, _ = value.shape
    chunk = sizes.chunk
    num_chunks = triton.cdiv(length, chunk)
    pairs = value.new_empty(batch, heads, num_chunks, chunk, chunk)
    channels = (batch, length, heads, sizes.key_dim)
    prepared = Prepared(pairs, None, value, None, None)
    if sizes.corrects:
        reads = value.new_empty(channels)
        prepared = prepared._replace(reads=reads, targets=torch.empty_like(value))
    if sizes.by_channel:
        queries = value.new_empty(channels)
        prepared = prepared._replace(queries=queries, keys=torch.empty_like(queries))
    grid = (num_chunks, batch * heads)
    _prepare[grid](inputs, decay, prepared, length, sizes.constants(), num_warps=WARPS)
    return prepared


def walk(
    inputs: Inputs, prepared: Prepared, *, initial: Tensor | None, sizes: Sizes, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Outputs [B, S, N, V] in a dtype, and the final state [B, N, K, V] fp32."""
    value = inputs.value
    batch, _, heads, value_dim = value.shape
    out = torch.empty_like(value, dtype=dtype)
    shape = (batch, heads, sizes.key_dim, value_dim)
    final = value.new_empty(shape, dtype=torch.float32)
    _launch_walk(inputs, prepared, initial=initial, sizes=sizes, written=Written(out, final))
    return out, final


def keep_states(
    inputs: Inputs, prepared: Prepared, *, initial: Tensor | None, sizes: Sizes
) -> Kept:
    """The states before all chunks, and the corrections."""
    value = inputs.value
    batch, _, heads, value_dim = value.shape
    num_chunks = prepared.pairs.shape[2]
    states = value.new_empty(batch, heads, num_chunks, sizes.key_dim, value_dim)
    corrections = torch.empty_like(value) if sizes.corrects else value
    kept = Kept(states, corrections)
    _launch_walk(inputs, prepared, initial=initial, sizes=sizes, written=kept)
    return kept


def _launch_walk(
    inputs: Inputs,
    prepared: Prepared,
    *,
    initial: Tensor | None,
    sizes: Sizes,
    written: Written | Kept,
) -> None:
    """A program per head and block of columns."""
    kept = written if isinstance(written, Kept) else None
    outputs = written if isinstance(written, Written) else Written(None, None)
    grid = walk_grid(inputs, sizes)
    length = inputs.value.shape[1]
    num_chunks = prepared.pairs.shape[2]
    constants = walk_constants(sizes)
    _walk[grid](
        inputs,
        prepared,
        initial,
        kept,
        outputs.out,
        outputs.final,
        length,
        num_chunks,
        constants,
        num_warps=WARPS,
        num_stages=WALK_STAGES,
    )


def walk_constants(sizes: Sizes) -> Sizes:
    """The constants of a walk, which has all channels of a state in registers."""
    key_width = triton.next_power_of_2(sizes.key_dim)
    channels = max(MIN_TILE, key_width)
    whole = sizes._replace(channels=channels)
    return whole.constants()


def walk_grid(inputs: Inputs, sizes: Sizes) -> tuple[int, int]:
    """A program per block of columns and head."""
    batch, _, heads, value_dim = inputs.value.shape
    blocks = triton.cdiv(value_dim, sizes.block)
    return blocks, batch * heads
