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
which the last token gets with a plus. Names of sizes are those of triton_scan_inputs.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanotrain.kernels.triton_chunk_scan import (
    WALK_STAGES,
    WARPS,
    keep_states,
    prepare,
    walk_constants,
    walk_grid,
)
from nanotrain.kernels.triton_scan_inputs import Inputs, Sizes

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr, tensor
    from triton.language import tuple as bundle

    from nanotrain.kernels.triton_chunk_scan import key_pairs, load_reading, load_writing
    from nanotrain.kernels.triton_scan_tiles import (
        allowed_pairs,
        chunk_index,
        column,
        decays_from_start,
        decays_over,
        decays_to_end,
        line,
        load_channels,
        load_last,
        load_rates,
        load_scaled,
        load_state,
        load_sums,
        load_values,
        locate_tokens,
        pair_gradients,
        pairs_below,
        project_gradient,
        square_offsets,
        store_channels,
        store_decay,
        store_state,
        store_values,
        tile_mask,
        tile_offsets,
        unit_factors,
        unit_lower_inverse,
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
        grad = tl.zeros([sizes.channels, sizes.block], tl.float32)
        if grad_final is not None:
            grad += load_state(grad_final, row, 0, start, sizes)
        for index in range(num_chunks):
            chunk = num_chunks - 1 - index
            place = (chunk, row, length, num_chunks)
            inside, _, tokens, rows = locate_tokens(place, sizes)
            here = chunk_index(place)
            low_grad = grad.to(dtype)
            store_state(between.states, low_grad, here, start, sizes)
            out = load_values(grad_out, tokens, inside, start, sizes)
            out = out.to(dtype)
            square = prepared.pairs + square_offsets(here, sizes)
            pairs = tl.load(square)
            keys = load_writing(data, prepared, place, sizes)
            change = tl.dot(tl.trans(pairs), out)
            change += tl.dot(keys, low_grad)
            change = change.to(dtype)
            store_values(between.corrections, change, tokens, inside, start, sizes)
            queries = load_reading(data, prepared, place, sizes)
            last = load_last(data.decay, rows, 0, sizes)
            over = decays_over(last, data, place, sizes)
            grad *= tl.trans(over)
            queries = tl.trans(queries)
            grad += tl.dot(queries, out)
            if sizes.corrects:
                reads = load_channels(prepared.reads, tokens, inside, 0, sizes)
                grad -= tl.dot(tl.trans(reads), change)
        if grad_initial is not None:
            store_state(grad_initial, grad, row, start, sizes)

    @triton.jit
    def store_decay_gradient(
        grad: tensor,
        decay: tensor,
        rows: tensor,
        start: tensor,
        sizes: bundle,
        adds: constexpr,
    ) -> None:
        """Write or add [C, channels], of decays per channel."""
        pointers = decay + tile_offsets(rows, start, sizes.key_dim, sizes.channels)
        exists = rows >= 0
        mask = tile_mask(exists, start, sizes.key_dim, sizes.channels)
        if adds:
            grad += tl.load(pointers, mask=mask, other=0.0)
        tl.store(pointers, grad, mask=mask)

    @triton.jit
    def value_side(
        data: bundle,
        kept: bundle,
        grad_out: tensor,
        between: bundle,
        grads: bundle,
        place: bundle,
        sizes: bundle,
    ) -> tensor:
        """[C, C]: gradients of the pairs of queries and keys, do U'^T.

        Without a delta rule also writes the gradients of values and their factors.
        """
        dtype = data.value.dtype.element_ty
        inside, _, tokens, _ = locate_tokens(place, sizes)
        pairs = tl.zeros([sizes.chunk, sizes.chunk], tl.float32)
        rate_grad = tl.zeros([sizes.chunk], tl.float32)
        rates = load_rates(data, tokens, inside)
        for start in range(0, sizes.value_dim, sizes.block):
            out = load_values(grad_out, tokens, inside, start, sizes)
            change = load_values(kept.corrections, tokens, inside, start, sizes)
            if not sizes.corrects:
                grad = load_values(between.corrections, tokens, inside, start, sizes)
                grad = grad.to(tl.float32)
                rate_grad += tl.sum(grad * change, 1)
                grad *= rates
                store_values(grads.value, grad, tokens, inside, start, sizes)
                change = (change * rates).to(dtype)
            out = out.to(dtype)
            change = tl.trans(change)
            pairs += tl.dot(out, change)
        if not sizes.corrects:
            tl.store(grads.rate + tokens, rate_grad, mask=inside)
        return pairs

    @triton.jit
    def state_side(
        data: bundle,
        kept: bundle,
        grad_out: tensor,
        between: bundle,
        place: bundle,
        channel: tensor,
        sizes: bundle,
    ) -> bundle:
        """Gradients through the states before and after a chunk, of some channels.

        Writes those of W, and returns those of d q and e k [C, channels], and of d_C [channels]
        without the factor d_C.
        """
        size: constexpr = sizes.chunk
        channels: constexpr = sizes.channels
        dtype = data.value.dtype.element_ty
        inside, _, tokens, _ = locate_tokens(place, sizes)
        here = chunk_index(place)
        read = tl.zeros([size, channels], tl.float32)
        write = tl.zeros([size, channels], tl.float32)
        reads = tl.zeros([size, channels], tl.float32)
        carried = tl.zeros([channels], tl.float32)
        rates = load_rates(data, tokens, inside)
        for start in range(0, sizes.value_dim, sizes.block):
            out = load_values(grad_out, tokens, inside, start, sizes)
            state = load_state(kept.states, here, channel, start, sizes)
            out = out.to(dtype)
            transposed = tl.trans(state)
            read += tl.dot(out, transposed)
            if sizes.corrects:
                change_grad = load_values(between.corrections, tokens, inside, start, sizes)
                reads -= tl.dot(change_grad, transposed)
            state_grad = load_state(between.states, here, channel, start, sizes)
            wide_state = state.to(tl.float32)
            wide_state *= state_grad
            carried += tl.sum(wide_state, 1)
            change = load_values(kept.corrections, tokens, inside, start, sizes)
            if not sizes.corrects:
                change = (change * rates).to(dtype)
            state_grad = tl.trans(state_grad)
            write += tl.dot(change, state_grad)
        if sizes.corrects:
            store_channels(between.reads, reads, tokens, inside, channel, sizes)
        return read, write, carried

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
        """Gradients of one chunk of a head, given the states before and after it.

        Of a delta rule the gradients of keys are those of their unit vectors.
        """
        chunk = tl.program_id(0)
        row = tl.program_id(1)
        num_chunks = tl.num_programs(0)
        place = (chunk, row, length, num_chunks)
        dtype = data.value.dtype.element_ty
        inside, vectors, tokens, rows = locate_tokens(place, sizes)
        pairs = value_side(data, kept, grad_out, between, grads, place, sizes)
        allowed = allowed_pairs(data, place, sizes)
        pairs = tl.where(allowed, pairs, 0.0)
        index = tl.arange(0, sizes.chunk)
        is_last = index == sizes.chunk - 1
        is_last = column(is_last)
        key_factors = unit_factors(data.key, vectors, inside, sizes)
        query_factors = unit_factors(data.query, vectors, inside, sizes)
        scaled_factors = query_factors * sizes.scale
        along = tl.zeros([sizes.chunk], tl.float32)
        head_decay = tl.zeros([sizes.chunk], tl.float32)
        for start in range(0, sizes.key_dim, sizes.channels):
            read, write, carried = state_side(data, kept, grad_out, between, place, start, sizes)
            decay = load_sums(data.decay, rows, start, sizes)
            last = load_last(data.decay, rows, start, sizes)
            read *= decays_from_start(decay, data, place, sizes)
            write *= decays_to_end(decay, last, data, place, sizes)
            keys = load_scaled(data.key, key_factors, vectors, inside, start, sizes)
            over = decays_over(last, data, place, sizes)
            written = tl.sum(keys * write, 0)
            carried = over * line(carried)
            carried += line(written)
            low_keys = keys.to(dtype)
            queries = load_scaled(data.query, scaled_factors, vectors, inside, start, sizes)
            low_queries = queries.to(dtype)
            query_grad, key_grad = pair_gradients(
                pairs, low_queries, low_keys, read, write, decay, data, rows, start, sizes
            )
            store_channels(grads.key, key_grad, tokens, inside, start, sizes)
            # read again: the products needed the registers
            keys = load_scaled(data.key, key_factors, vectors, inside, start, sizes)
            queries = load_scaled(data.query, scaled_factors, vectors, inside, start, sizes)
            decay_grad = queries * query_grad
            along += tl.sum(decay_grad, 1)
            decay_grad -= keys * key_grad
            decay_grad += tl.where(is_last, carried, 0.0)
            if sizes.by_channel:
                store_decay_gradient(decay_grad, grads.decay, rows, start, sizes, False)
            else:
                head_decay += tl.sum(decay_grad, 1)
            query_grad *= sizes.scale
            store_channels(grads.query, query_grad, tokens, inside, start, sizes)
        if not sizes.by_channel:
            tl.store(grads.decay + rows, head_decay)
        if sizes.corrects:
            project_gradient(grads.query, along, data.query, query_factors, place, sizes)

    @triton.jit
    def key_products(
        data: bundle,
        between: bundle,
        factors: tensor,
        rates: tensor,
        place: bundle,
        sizes: bundle,
    ) -> tensor:
        """[C, C] fp32: dW (beta d k)^T."""
        dtype = data.value.dtype.element_ty
        inside, vectors, tokens, rows = locate_tokens(place, sizes)
        products = tl.zeros([sizes.chunk, sizes.chunk], tl.float32)
        for start in range(0, sizes.key_dim, sizes.channels):
            keys = load_scaled(data.key, factors, vectors, inside, start, sizes)
            decay = load_sums(data.decay, rows, start, sizes)
            keys *= decays_from_start(decay, data, place, sizes)
            keys *= rates
            reads_grad = load_channels(between.reads, tokens, inside, start, sizes)
            keys = tl.trans(keys.to(dtype))
            products += tl.dot(reads_grad, keys)
        return products

    @triton.jit
    def _system_gradients(
        data: bundle, between: bundle, grads: bundle, length: tensor, sizes: bundle
    ) -> None:
        """What the WY form of one chunk of a head adds to the gradients."""
        chunk = tl.program_id(0)
        row = tl.program_id(1)
        num_chunks = tl.num_programs(0)
        place = (chunk, row, length, num_chunks)
        dtype = data.value.dtype.element_ty
        inside, vectors, tokens, rows = locate_tokens(place, sizes)
        rates = load_rates(data, tokens, inside)
        allowed = allowed_pairs(data, place, sizes)
        factors = unit_factors(data.key, vectors, inside, sizes)
        pairs = key_pairs(data, factors, place, allowed, sizes)
        inverse = unit_lower_inverse(pairs * rates, sizes)
        wide = tl.trans(inverse)
        transposed = wide.to(dtype)
        inverse_grad = key_products(data, between, factors, rates, place, sizes)
        rate_grad = tl.zeros([sizes.chunk], tl.float32)
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
        system_grad = tl.dot(wide, inverse_grad)
        system_grad = tl.dot(system_grad, wide)
        is_earlier = pairs_below(allowed, sizes)
        system_grad = tl.where(is_earlier, -system_grad, 0.0)
        rate_grad += tl.sum(system_grad * pairs, 1)
        system_grad *= rates
        along = tl.zeros([sizes.chunk], tl.float32)
        head_decay = tl.zeros([sizes.chunk], tl.float32)
        for start in range(0, sizes.key_dim, sizes.channels):
            keys = load_scaled(data.key, factors, vectors, inside, start, sizes)
            decay = load_sums(data.decay, rows, start, sizes)
            from_start = decays_from_start(decay, data, place, sizes)
            reads_grad = load_channels(between.reads, tokens, inside, start, sizes)
            row_grad = tl.dot(transposed, reads_grad)
            row_grad *= from_start
            rate_grad += tl.sum(keys * row_grad, 1)
            row_grad *= rates
            low_keys = keys.to(dtype)
            no_grad = tl.zeros([sizes.chunk, sizes.channels], tl.float32)
            row_grad, key_grad = pair_gradients(
                system_grad, low_keys, low_keys, row_grad, no_grad, decay, data, rows, start, sizes
            )
            decay_grad = row_grad - key_grad
            decay_grad *= low_keys
            if sizes.by_channel:
                store_decay_gradient(decay_grad, grads.decay, rows, start, sizes, True)
            else:
                head_decay += tl.sum(decay_grad, 1)
            key_grad += row_grad
            key_grad += load_channels(grads.key, tokens, inside, start, sizes)
            along += tl.sum(low_keys * key_grad, 1)
            store_channels(grads.key, key_grad, tokens, inside, start, sizes)
        tl.store(grads.rate + tokens, rate_grad, mask=inside)
        if not sizes.by_channel:
            head_decay += tl.load(grads.decay + rows)
            tl.store(grads.decay + rows, head_decay)
        project_gradient(grads.key, along, data.key, factors, place, sizes)

    @triton.jit
    def _sum_back(grad: tensor, length: tensor, sizes: bundle) -> None:
        """Gradients of the decays of single tokens, in place of the gradients of their sums."""
        chunk = tl.program_id(0)
        row = tl.program_id(1)
        num_chunks = tl.num_programs(0)
        place = (chunk, row, length, num_chunks)
        _, _, _, rows = locate_tokens(place, sizes)
        for start in range(0, sizes.decay_dim, sizes.channels):
            sums = tl.cumsum(load_sums(grad, rows, start, sizes), 0, reverse=True)
            store_decay(grad, sums, rows, start, sizes)


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
    walk_sizes = walk_constants(sizes)
    columns = walk_grid(inputs, sizes)
    _walk_back[columns](
        inputs,
        prepared,
        grad_out,
        grad_final,
        between,
        grad_initial,
        length,
        num_chunks,
        walk_sizes,
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
    decay = grads.decay[:, :length]
    return grads._replace(decay=decay), grad_initial


def _empty_gradients(inputs: Inputs, sizes: Sizes) -> Gradients:
    """Memory of the gradients, with a head of queries and keys per head of values."""
    tokens = inputs.value.shape[:3]
    query = inputs.query.new_empty(*tokens, sizes.key_dim)
    key = torch.empty_like(query)
    value = torch.empty_like(inputs.value)
    decay = torch.empty_like(inputs.decay)
    rate = torch.empty_like(inputs.rate)
    return Gradients(query, key, value, decay, rate)
