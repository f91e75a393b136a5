r"""Triton kernels of chunked linear attention, forward: Mamba-2, Gated DeltaNet and KDA.

    prepare   pairs of tokens in a chunk, and the WY form of delta rules     all chunks at once
    walk      states and outputs, chunk after chunk, the state in registers  all heads at once

In a chunk of C tokens, with cumulative logarithms g of decays, d = exp(g), e = exp(g_C - g), and
T = (I + tril(beta pairs(k, k), -1))^-1 (nanotrain/attention/delta_rule.py has the derivation):

    W = T beta d k       U = T beta v              delta rules
    U' = U - W S         or dt v without a W       corrections of a delta rule, inputs of Mamba-2
    o = d q S + pairs(q, k) U'
    S <- d_C S + (e k)^T U'

Operands of products are in the dtype of the values and sums in fp32; decays, the inverse and the
states are in fp32. Values in fp32, bf16 or fp16; with TRITON_INTERPRET=1 the kernels run on CPU
tensors. Names of sizes are those of triton_scan_tiles.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanotrain.kernels.triton_scan_tiles import Inputs, Sizes

try:
    import triton
    import triton.language as tl
    from triton.language import tensor
    from triton.language import tuple as bundle

    from nanotrain.kernels.triton_scan_tiles import (
        allowed_pairs,
        chunk_decays,
        decayed_pairs,
        load_channels,
        load_decay,
        load_queries,
        load_rates,
        load_state,
        load_values,
        load_vectors,
        locate_tokens,
        pairs_below,
        square_offsets,
        store_channels,
        store_decay,
        store_state,
        store_values,
        unit_lower_inverse,
    )
except ImportError:
    triton = None

CHUNK_SIZE = 64  # tokens of a chunk
VALUE_BLOCK = 64  # most columns of a state that a program has in registers
NORM_EPS = 1e-6  # added to squared lengths, as in attention/delta_rule.py
MIN_TILE = 16  # least rows and columns of a product
WARPS = 8
WALK_STAGES = 2  # chunks in flight: 164 kB of shared memory at most, with heads of 128


class Prepared(NamedTuple):
    """What a chunk is computed from, besides the inputs."""

    pairs: Tensor  # [B, N, M, C, C], queries and keys
    reads: Tensor | None  # [B, S, N, K], W of a delta rule
    targets: Tensor  # [B, S, N, V], U of a delta rule; else the values


class Kept(NamedTuple):
    """What the backward needs of all chunks."""

    states: Tensor  # [B, N, M, K, V], before each chunk
    corrections: Tensor  # [B, S, N, V], U' of a delta rule; else the values


class Written(NamedTuple):
    """What the walk of a forward writes."""

    out: Tensor | None  # [B, S, N, V]
    final: Tensor | None  # [B, N, K, V] fp32


if triton is not None:

    @triton.jit
    def chunk_system(
        keys: tensor,
        rates: tensor,
        decay: tensor,
        data: bundle,
        rows: tensor,
        allowed: tensor,
        sizes: bundle,
    ) -> bundle:
        """[C, C] fp32 twice: pairs of keys with earlier ones, and the inverse of the system."""
        pairs = decayed_pairs(keys, keys, decay, data, rows, sizes)
        is_earlier = pairs_below(allowed, sizes)
        pairs = tl.where(is_earlier, pairs, 0.0)
        inverse = unit_lower_inverse(pairs * rates, sizes)
        return pairs, inverse

    @triton.jit
    def add_decays(
        single: tensor, total: tensor, tokens: tensor, rows: tensor, inside: tensor, sizes: bundle
    ) -> None:
        """Write the cumulative logarithms of a chunk, from those of single tokens."""
        decay = load_decay(single, tokens, inside, sizes)
        store_decay(total, tl.cumsum(decay, 0), rows, sizes)
        # tokens at borders of blocks are read from memory, which other threads have written
        tl.debug_barrier()

    @triton.jit
    def _prepare(
        data: bundle, single_decay: tensor, out: bundle, length: tensor, sizes: bundle
    ) -> None:
        """Pairs of queries and keys, and W and U of a delta rule, of one chunk of a head.

        Where decays of single tokens are given, their sums are written first.
        """
        chunk = tl.program_id(0)
        row = tl.program_id(1)
        num_chunks = tl.num_programs(0)
        inside, vectors, tokens, rows = locate_tokens(chunk, row, length, num_chunks, sizes)
        dtype = data.value.dtype.element_ty
        if single_decay is not None:
            add_decays(single_decay, data.decay, tokens, rows, inside, sizes)
        keys = load_vectors(data.key, vectors, inside, sizes)
        queries = load_queries(data, vectors, inside, sizes)
        allowed = allowed_pairs(data.documents, row, chunk, length, sizes)
        decay, from_start, _, _ = chunk_decays(data, rows, row, chunk, length, sizes)
        scores = decayed_pairs(queries, keys, decay, data, rows, sizes)
        scores = tl.where(allowed, scores, 0.0)
        here = row.to(tl.int64) * num_chunks + chunk
        square = out.pairs + square_offsets(here, sizes)
        tl.store(square, scores.to(dtype))
        if sizes.corrects:
            rates = load_rates(data, tokens, inside)
            _, inverse = chunk_system(keys, rates, decay, data, rows, allowed, sizes)
            inverse = inverse.to(dtype)
            decayed_keys = rates * from_start
            decayed_keys *= keys
            reads = tl.dot(inverse, decayed_keys.to(dtype))
            store_channels(out.reads, reads, tokens, inside, sizes)
            for start in range(0, sizes.value_dim, sizes.block):
                values = load_values(data.value, tokens, inside, start, sizes)
                scaled = rates * values
                solved = tl.dot(inverse, scaled.to(dtype))
                store_values(out.targets, solved, tokens, inside, start, sizes)

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
        """[C, block] fp32: U', what a chunk adds to its state at its keys."""
        target = load_values(prepared.targets, tokens, inside, start, sizes)
        target = target.to(tl.float32)
        if sizes.corrects:
            reads = load_channels(prepared.reads, tokens, inside, sizes)
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
        state = tl.zeros([sizes.width, sizes.block], tl.float32)
        if initial is not None:
            state += load_state(initial, row, start, sizes)
        for chunk in range(num_chunks):
            inside, vectors, tokens, rows = locate_tokens(chunk, row, length, num_chunks, sizes)
            _, from_start, to_end, over = chunk_decays(data, rows, row, chunk, length, sizes)
            low_state = state.to(dtype)
            change = load_change(data, prepared, low_state, tokens, inside, start, sizes)
            change = change.to(dtype)
            here = row.to(tl.int64) * num_chunks + chunk
            if kept is not None:
                store_state(kept.states, low_state, here, start, sizes)
                if sizes.corrects:
                    store_values(kept.corrections, change, tokens, inside, start, sizes)
            else:
                queries = load_queries(data, vectors, inside, sizes)
                queries *= from_start
                square = prepared.pairs + square_offsets(here, sizes)
                pairs = tl.load(square)
                result = tl.dot(queries.to(dtype), low_state)
                result += tl.dot(pairs, change)
                store_values(out, result, tokens, inside, start, sizes)
            keys = load_vectors(data.key, vectors, inside, sizes)
            keys *= to_end
            keys = tl.trans(keys.to(dtype))
            state *= over
            state += tl.dot(keys, change)
        if kept is None:
            store_state(final, state, row, start, sizes)


def scan_sizes(inputs: Inputs, *, corrects: bool) -> Sizes:
    """The constants of the kernels for some inputs."""
    heads, value_dim = inputs.value.shape[2:]
    groups, key_dim = inputs.key.shape[2:]
    width = triton.next_power_of_2(key_dim)
    value_width = triton.next_power_of_2(value_dim)
    block = max(MIN_TILE, value_width)
    scale = key_dim**-0.5 if corrects else 1.0
    return Sizes(
        heads=heads,
        groups=groups,
        key_dim=key_dim,
        value_dim=value_dim,
        width=max(MIN_TILE, width),
        block=min(VALUE_BLOCK, block),
        chunk=CHUNK_SIZE,
        levels=CHUNK_SIZE.bit_length() - 1,
        by_channel=inputs.decay.shape[-1] > 1,
        corrects=corrects,
        scale=scale,
        eps=NORM_EPS,
    )


def empty_sums(decay: Tensor) -> Tensor:
    """Memory of cumulative decays [B, M C, N, D], for those of single tokens [B, S, N, D]."""
    batch, length, heads, width = decay.shape
    padded = triton.cdiv(length, CHUNK_SIZE) * CHUNK_SIZE
    return decay.new_empty(batch, padded, heads, width)


def prepare(inputs: Inputs, sizes: Sizes, *, decay: Tensor | None = None) -> Prepared:
    """Pairs of all chunks, and W and U of a delta rule.

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
    prepared = Prepared(pairs, None, value)
    if sizes.corrects:
        reads = value.new_empty(batch, length, heads, sizes.key_dim)
        prepared = Prepared(pairs, reads, torch.empty_like(value))
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
    _walk[walk_grid(inputs, sizes)](
        inputs,
        prepared,
        initial,
        kept,
        outputs.out,
        outputs.final,
        inputs.value.shape[1],
        prepared.pairs.shape[2],
        sizes.constants(),
        num_warps=WARPS,
        num_stages=WALK_STAGES,
    )


def walk_grid(inputs: Inputs, sizes: Sizes) -> tuple[int, int]:
    """A program per block of columns and head."""
    batch, _, heads, value_dim = inputs.value.shape
    return triton.cdiv(value_dim, sizes.block), batch * heads
