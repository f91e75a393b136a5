r"""Triton kernels of chunked linear attention, backward; the forward is triton_chunk_scan.py.

    walk_back          gradients of the states and of U', the last chunk first
    chunk_gradients    of queries, keys, decays, and of W or of values and their factors
    system_gradients   of keys, values, decays and factors through the WY form of a delta rule
    sum_back           of the decays of single tokens

The forward's first kernel and its walk run again before them. With dS the gradient of the state
after a chunk:

    dU' = pairs^T do + e k dS           dS <- d_C dS + (d q)^T do - W^T dU'
    dpairs = do U'^T                    d(d q) = do S^T      d(e k) = U' dS^T     dW = -dU' S^T
    dT = dU (beta v)^T + dW (beta d k)^T        d(beta v) = T^T dU         d(beta d k) = T^T dW
    d(beta pairs(k, k)) = -T^T dT T^T, below the diagonal

A decay's logarithm g of a token multiplies by its exponential, so that its gradient is the product
of what it multiplies and of the gradient of that: of d q and d k with a plus, of e k with a minus,
which the last token gets with a plus. Names of sizes are those of triton_scan_tiles.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanotrain.kernels.triton_chunk_scan import (
    WALK_STAGES,
    WARPS,
    keep_states,
    prepare,
    walk_grid,
)
from nanotrain.kernels.triton_scan_tiles import Inputs, Sizes

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr, tensor
    from triton.language import tuple as bundle

    from nanotrain.kernels.triton_chunk_scan import chunk_system
    from nanotrain.kernels.triton_scan_tiles import (
        allowed_pairs,
        chunk_decays,
        column,
        line,
        load_channels,
        load_queries,
        load_rates,
        load_state,
        load_sums,
        load_values,
        load_vectors,
        locate_tokens,
        pair_gradients,
        pairs_below,
        square_offsets,
        store_channels,
        store_decay,
        store_state,
        store_values,
        tile_mask,
        tile_offsets,
        unit_gradient,
    )
except ImportError:
    triton = None


class Gradients(NamedTuple):
    """Gradients of the inputs; of queries and keys per head of values."""

    query: Tensor  # [B, S, N, K]
    key: Tensor  # [B, S, N, K]
    value: Tensor  # [B, S, N, V]
    decay: Tensor  # [B, S, N, D] fp32, of single tokens; with padding [B, M C, N, D]
    rate: Tensor  # [B, S, N] fp32


class Between(NamedTuple):
    """Gradients that one kernel leaves to the next."""

    states: Tensor  # [B, N, M, K, V], of the states after the chunks
    corrections: Tensor  # [B, S, N, V], of U', and of U
    reads: Tensor | None  # [B, S, N, K], of W


if triton is not None:

    @triton.jit
    def _walk_back(
        data: bundle,
        prepared: bundle,
        grad_out: tensor,
        grad_final: tensor,
        between: bundle,
        grad_initial: tensor,
        length: tensor,
        num_chunks: tensor,
        sizes: bundle,
    ) -> None:
        """Some columns of the gradients of a head's states, from the last chunk to the first."""
        start = tl.program_id(0) * sizes.block
        row = tl.program_id(1)
        dtype = data.value.dtype.element_ty
        grad = tl.zeros([sizes.width, sizes.block], tl.float32)
        if grad_final is not None:
            grad += load_state(grad_final, row, start, sizes)
        for index in range(num_chunks):
            chunk = num_chunks - 1 - index
            inside, vectors, tokens, rows = locate_tokens(chunk, row, length, num_chunks, sizes)
            _, from_start, to_end, over = chunk_decays(data, rows, row, chunk, length, sizes)
            here = row.to(tl.int64) * num_chunks + chunk
            low_grad = grad.to(dtype)
            store_state(between.states, low_grad, here, start, sizes)
            out = load_values(grad_out, tokens, inside, start, sizes)
            out = out.to(dtype)
            square = prepared.pairs + square_offsets(here, sizes)
            pairs = tl.load(square)
            keys = load_vectors(data.key, vectors, inside, sizes)
            keys *= to_end
            change = tl.dot(tl.trans(pairs), out)
            change += tl.dot(keys.to(dtype), low_grad)
            change = change.to(dtype)
            store_values(between.corrections, change, tokens, inside, start, sizes)
            queries = load_queries(data, vectors, inside, sizes)
            queries *= from_start
            queries = tl.trans(queries.to(dtype))
            grad *= over
            grad += tl.dot(queries, out)
            if sizes.corrects:
                reads = load_channels(prepared.reads, tokens, inside, sizes)
                grad -= tl.dot(tl.trans(reads), change)
        if grad_initial is not None:
            store_state(grad_initial, grad, row, start, sizes)

    @triton.jit
    def store_decay_gradient(
        grad: tensor, decay: tensor, rows: tensor, sizes: bundle, adds: constexpr
    ) -> None:
        """Write or add [C, width], of one head's decays, summed where channels share theirs."""
        if sizes.by_channel:
            pointers = decay + tile_offsets(rows, 0, sizes.key_dim, sizes.width)
            exists = rows >= 0
            mask = tile_mask(exists, 0, sizes.key_dim, sizes.width)
            if adds:
                grad += tl.load(pointers, mask=mask, other=0.0)
            tl.store(pointers, grad, mask=mask)
        else:
            total = tl.sum(grad, 1)
            if adds:
                total += tl.load(decay + rows)
            tl.store(decay + rows, total)

    @triton.jit
    def vector_gradients(
        data: bundle,
        grads: bundle,
        read: tensor,
        write: tensor,
        pairs: tensor,
        carried: tensor,
        row: tensor,
        chunk: tensor,
        length: tensor,
        num_chunks: tensor,
        sizes: bundle,
    ) -> None:
        """Write the gradients of queries, keys and decays of a chunk.

        Args:
            data: inputs.
            grads: where they are written.
            read: [C, width], of d q.
            write: [C, width], of e k.
            pairs: [C, C], of the pairs of queries and keys.
            carried: [width], of d_C without the factor d_C.
            row: index of the head.
            chunk: index of the chunk.
            length: tokens of a sequence.
            num_chunks: chunks of a sequence.
            sizes: constants.
        """
        size: constexpr = sizes.chunk
        dtype = data.value.dtype.element_ty
        inside, vectors, tokens, rows = locate_tokens(chunk, row, length, num_chunks, sizes)
        decay, from_start, to_end, over = chunk_decays(data, rows, row, chunk, length, sizes)
        keys = load_vectors(data.key, vectors, inside, sizes)
        queries = load_queries(data, vectors, inside, sizes)
        read *= from_start
        write *= to_end
        written = tl.sum(keys * write, 0)
        last = line(carried) * tl.trans(over)
        last += line(written)
        allowed = allowed_pairs(data.documents, row, chunk, length, sizes)
        pairs = tl.where(allowed, pairs, 0.0)
        low_queries = queries.to(dtype)
        low_keys = keys.to(dtype)
        query_grad, key_grad = pair_gradients(
            pairs, low_queries, low_keys, read, write, decay, data, rows, sizes
        )
        decay_grad = low_queries * query_grad
        decay_grad -= low_keys * key_grad
        index = tl.arange(0, size)
        is_last = index == size - 1
        decay_grad += tl.where(column(is_last), last, 0.0)
        store_decay_gradient(decay_grad, grads.decay, rows, sizes, False)
        key_grad = unit_gradient(key_grad, data.key, vectors, inside, sizes)
        query_grad = unit_gradient(query_grad, data.query, vectors, inside, sizes)
        query_grad *= sizes.scale
        store_channels(grads.key, key_grad, tokens, inside, sizes)
        store_channels(grads.query, query_grad, tokens, inside, sizes)

    @triton.jit
    def _chunk_gradients(
        data: bundle,
        kept: bundle,
        grad_out: tensor,
        between: bundle,
        grads: bundle,
        length: tensor,
        sizes: bundle,
    ) -> None:
        """Gradients of one chunk of a head, given the states before and after it."""
        chunk = tl.program_id(0)
        row = tl.program_id(1)
        num_chunks = tl.num_programs(0)
        dtype = data.value.dtype.element_ty
        inside, vectors, tokens, rows = locate_tokens(chunk, row, length, num_chunks, sizes)
        here = row.to(tl.int64) * num_chunks + chunk
        size: constexpr = sizes.chunk
        width: constexpr = sizes.width
        read = tl.zeros([size, width], tl.float32)
        write = tl.zeros([size, width], tl.float32)
        reads = tl.zeros([size, width], tl.float32)
        pairs = tl.zeros([size, size], tl.float32)
        carried = tl.zeros([width], tl.float32)
        rate_grad = tl.zeros([size], tl.float32)
        rates = load_rates(data, tokens, inside)
        for start in range(0, sizes.value_dim, sizes.block):
            out = load_values(grad_out, tokens, inside, start, sizes)
            out = out.to(dtype)
            change = load_values(kept.corrections, tokens, inside, start, sizes)
            change_grad = load_values(between.corrections, tokens, inside, start, sizes)
            state = load_state(kept.states, here, start, sizes)
            state_grad = load_state(between.states, here, start, sizes)
            wide_state = state.to(tl.float32)
            wide_state *= state_grad
            carried += tl.sum(wide_state, 1)
            if sizes.corrects:
                reads -= tl.dot(change_grad, tl.trans(state))
            else:
                wide_grad = change_grad.to(tl.float32)
                rate_grad += tl.sum(wide_grad * change, 1)
                wide_grad *= rates
                store_values(grads.value, wide_grad, tokens, inside, start, sizes)
                change = (change * rates).to(dtype)
            state = tl.trans(state)
            read += tl.dot(out, state)
            state_grad = tl.trans(state_grad)
            write += tl.dot(change, state_grad)
            change = tl.trans(change)
            pairs += tl.dot(out, change)
        if sizes.corrects:
            store_channels(between.reads, reads, tokens, inside, sizes)
        else:
            tl.store(grads.rate + tokens, rate_grad, mask=inside)
        vector_gradients(
            data, grads, read, write, pairs, carried, row, chunk, length, num_chunks, sizes
        )

    @triton.jit
    def _system_gradients(
        data: bundle, between: bundle, grads: bundle, length: tensor, sizes: bundle
    ) -> None:
        """What the WY form of one chunk of a head adds to the gradients."""
        chunk = tl.program_id(0)
        row = tl.program_id(1)
        num_chunks = tl.num_programs(0)
        dtype = data.value.dtype.element_ty
        inside, vectors, tokens, rows = locate_tokens(chunk, row, length, num_chunks, sizes)
        keys = load_vectors(data.key, vectors, inside, sizes)
        rates = load_rates(data, tokens, inside)
        decay, from_start, _, _ = chunk_decays(data, rows, row, chunk, length, sizes)
        allowed = allowed_pairs(data.documents, row, chunk, length, sizes)
        pairs, inverse = chunk_system(keys, rates, decay, data, rows, allowed, sizes)
        transposed = tl.trans(inverse).to(dtype)
        decayed_keys = from_start * keys
        reads_grad = load_channels(between.reads, tokens, inside, sizes)
        scaled_keys = rates * decayed_keys
        scaled_keys = tl.trans(scaled_keys.to(dtype))
        inverse_grad = tl.dot(reads_grad, scaled_keys)
        target_grad = tl.dot(transposed, reads_grad)
        decayed_keys *= target_grad
        rate_grad = tl.sum(decayed_keys, 1)
        target_grad *= rates
        target_grad *= from_start
        for start in range(0, sizes.value_dim, sizes.block):
            values = load_values(data.value, tokens, inside, start, sizes)
            solved_grad = load_values(between.corrections, tokens, inside, start, sizes)
            scaled = rates * values
            scaled = tl.trans(scaled.to(dtype))
            inverse_grad += tl.dot(solved_grad, scaled)
            value_grad = tl.dot(transposed, solved_grad)
            rate_grad += tl.sum(value_grad * values, 1)
            value_grad *= rates
            store_values(grads.value, value_grad, tokens, inside, start, sizes)
        wide = tl.trans(inverse)
        system_grad = tl.dot(wide, inverse_grad)
        system_grad = tl.dot(system_grad, wide)
        is_earlier = pairs_below(allowed, sizes)
        system_grad = tl.where(is_earlier, -system_grad, 0.0)
        rate_grad += tl.sum(system_grad * pairs, 1)
        tl.store(grads.rate + tokens, rate_grad, mask=inside)
        system_grad *= rates
        low_keys = keys.to(dtype)
        no_grad = tl.zeros([sizes.chunk, sizes.width], tl.float32)
        row_grad, key_grad = pair_gradients(
            system_grad, low_keys, low_keys, target_grad, no_grad, decay, data, rows, sizes
        )
        decay_grad = row_grad - key_grad
        decay_grad *= low_keys
        store_decay_gradient(decay_grad, grads.decay, rows, sizes, True)
        key_grad += row_grad
        key_grad = unit_gradient(key_grad, data.key, vectors, inside, sizes)
        key_grad += load_channels(grads.key, tokens, inside, sizes)
        store_channels(grads.key, key_grad, tokens, inside, sizes)

    @triton.jit
    def _sum_back(grad: tensor, length: tensor, sizes: bundle) -> None:
        """Gradients of the decays of single tokens, from those of their sums, in their place."""
        chunk = tl.program_id(0)
        row = tl.program_id(1)
        num_chunks = tl.num_programs(0)
        _, _, _, rows = locate_tokens(chunk, row, length, num_chunks, sizes)
        sums = tl.cumsum(load_sums(grad, rows, sizes), 0, reverse=True)
        store_decay(grad, sums, rows, sizes)


def scan_backward(
    inputs: Inputs,
    initial: Tensor | None,
    *,
    sizes: Sizes,
    grad_out: Tensor,
    grad_final: Tensor | None,
) -> tuple[Gradients, Tensor | None]:
    """Gradients of the inputs, and of the initial state where there is one.

    Args:
        inputs: inputs of the forward.
        initial: [B, N, K, V] fp32, or None for zeros.
        sizes: constants of the kernels.
        grad_out: gradient of the outputs, [B, S, N, V].
        grad_final: gradient of the final state, [B, N, K, V] fp32, or None for zeros.
    """
    value = inputs.value
    batch, length, heads, _ = value.shape
    prepared = prepare(inputs, sizes)
    kept = keep_states(inputs, prepared, initial=initial, sizes=sizes)
    reads = None if prepared.reads is None else torch.empty_like(prepared.reads)
    between = Between(torch.empty_like(kept.states), torch.empty_like(value), reads)
    grad_initial = None if initial is None else torch.empty_like(initial)
    num_chunks = prepared.pairs.shape[2]
    constants = sizes.constants()
    _walk_back[walk_grid(inputs, sizes)](
        inputs,
        prepared,
        grad_out,
        grad_final,
        between,
        grad_initial,
        length,
        num_chunks,
        constants,
        num_warps=WARPS,
        num_stages=WALK_STAGES,
    )
    grads = _empty_gradients(inputs, sizes)
    chunks = (num_chunks, batch * heads)
    _chunk_gradients[chunks](
        inputs, kept, grad_out, between, grads, length, constants, num_warps=WARPS
    )
    if sizes.corrects:
        _system_gradients[chunks](inputs, between, grads, length, constants, num_warps=WARPS)
    _sum_back[chunks](grads.decay, length, constants, num_warps=WARPS)
    return grads._replace(decay=grads.decay[:, :length]), grad_initial


def _empty_gradients(inputs: Inputs, sizes: Sizes) -> Gradients:
    """Memory of the gradients, with a head of queries and keys per head of values."""
    tokens = inputs.value.shape[:3]
    query = inputs.query.new_empty(*tokens, sizes.key_dim)
    return Gradients(
        query,
        torch.empty_like(query),
        torch.empty_like(inputs.value),
        torch.empty_like(inputs.decay),
        torch.empty_like(inputs.rate),
    )
