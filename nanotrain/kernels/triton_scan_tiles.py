r"""Tiles of chunked linear attention: what the Triton kernels of triton_chunk_scan.py load.

    Inputs, Sizes     arguments of the kernels
    locate_tokens     the tokens of a chunk, in memory
    chunk_decays      decays inside a chunk and over it
    decayed_pairs     products of tokens of a chunk; pair_gradients, their gradients
    chunk_system      the triangular system of a delta rule, and its inverse

Logarithms of decays are cumulative from the start of a chunk of C tokens; every exponent is at most
0. With decays per channel the pairs of two neighbouring blocks of tokens are one product, with
decays to and from the border between them. As in triton_softmax.py, parameters are annotated for
Triton's compiler.

    B batch   S sequence   M chunks   C tokens of a chunk   G heads of queries and keys
    N heads of values   K, V head dims of keys and values   D = 1 or K, decays of a head
"""

from typing import NamedTuple, Self

from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr, tensor
    from triton.language import tuple as bundle
except ImportError:
    triton = None


class Inputs(NamedTuple):
    """Tensors that all kernels read, contiguous."""

    query: Tensor  # [B, S, G, K]
    key: Tensor  # [B, S, G, K]
    value: Tensor  # [B, S, N, V]
    decay: Tensor  # [B, M C, N, D] fp32, cumulative logarithms
    rate: Tensor  # [B, S, N] fp32, factor of a value: beta of a delta rule, dt of Mamba-2
    # [B, S] int32, document of each token; document 0 continues the initial state; None: all 0
    documents: Tensor | None


class Sizes(NamedTuple):
    """Constants of a kernel."""

    heads: int  # N
    groups: int  # G
    key_dim: int  # K
    value_dim: int  # V
    width: int  # K as a power of 2, at least 16
    block: int  # columns of values that a program multiplies at once, a power of 2
    chunk: int  # C, a power of 2, at least 16
    levels: int  # log2 C
    by_channel: bool  # every channel of a key has its decay
    corrects: bool  # a delta rule: keys and queries have length 1, values are corrected
    scale: float  # factor of the queries
    eps: float  # added to squared lengths

    def constants(self) -> Self:
        """The constants as arguments of a kernel."""
        return type(self)(*map(tl.constexpr, self))


if triton is not None:

    @triton.jit
    def locate_tokens(
        chunk: tensor, row: tensor, length: tensor, num_chunks: tensor, sizes: bundle
    ) -> bundle:
        """Tokens of a chunk: which exist, and int64 rows of vectors, of values and of decays."""
        heads: constexpr = sizes.heads
        groups: constexpr = sizes.groups
        size: constexpr = sizes.chunk
        batch = row // heads
        batch = batch.to(tl.int64)
        head = row % heads
        group = head // (heads // groups)
        position = chunk * size
        position += tl.arange(0, size)
        token = batch * length + position
        padded_token = batch * num_chunks * size
        padded_token += position
        vectors = token * groups + group
        values = token * heads + head
        decays = padded_token * heads + head
        inside = position < length
        return inside, vectors, values, decays

    @triton.jit
    def column(x: tensor) -> tensor:
        """[n] -> [n, 1]."""
        return x[:, None]

    @triton.jit
    def line(x: tensor) -> tensor:
        """[n] -> [1, n]."""
        return x[None, :]

    @triton.jit
    def load_rates(data: bundle, tokens: tensor, inside: tensor) -> tensor:
        """[C, 1] fp32: the factors of the values of a chunk."""
        rates = tl.load(data.rate + tokens, mask=inside, other=0.0)
        return column(rates)

    @triton.jit
    def tile_offsets(rows: tensor, start: tensor, dim: constexpr, width: constexpr) -> tensor:
        """[rows, width]: columns from `start` on of rows of `dim` elements."""
        columns = start + tl.arange(0, width)
        first = column(rows) * dim
        return first + line(columns)

    @triton.jit
    def tile_mask(inside: tensor, start: tensor, dim: constexpr, width: constexpr) -> tensor:
        """[rows, width] bool: elements of a tile that exist."""
        columns = start + tl.arange(0, width)
        exists = columns < dim
        return column(inside) & line(exists)

    @triton.jit
    def load_tile(
        x: tensor,
        rows: tensor,
        inside: tensor,
        start: tensor,
        dim: constexpr,
        width: constexpr,
    ) -> tensor:
        """[rows, width]: a tile, with zeros where there is no element."""
        mask = tile_mask(inside, start, dim, width)
        offsets = tile_offsets(rows, start, dim, width)
        return tl.load(x + offsets, mask=mask, other=0.0)

    @triton.jit
    def store_tile(
        x: tensor,
        tile: tensor,
        rows: tensor,
        inside: tensor,
        start: tensor,
        dim: constexpr,
        width: constexpr,
    ) -> None:
        """Write a tile in the dtype of the memory."""
        mask = tile_mask(inside, start, dim, width)
        offsets = tile_offsets(rows, start, dim, width)
        tile = tile.to(x.dtype.element_ty)
        tl.store(x + offsets, tile, mask=mask)

    @triton.jit
    def load_values(
        x: tensor, tokens: tensor, inside: tensor, start: tensor, sizes: bundle
    ) -> tensor:
        """[C, block]: columns of the values of a chunk."""
        return load_tile(x, tokens, inside, start, sizes.value_dim, sizes.block)

    @triton.jit
    def store_values(
        x: tensor,
        tile: tensor,
        tokens: tensor,
        inside: tensor,
        start: tensor,
        sizes: bundle,
    ) -> None:
        """Write columns of the values of a chunk."""
        store_tile(x, tile, tokens, inside, start, sizes.value_dim, sizes.block)

    @triton.jit
    def load_channels(x: tensor, tokens: tensor, inside: tensor, sizes: bundle) -> tensor:
        """[C, width]: vectors of a chunk with the channels of keys."""
        return load_tile(x, tokens, inside, 0, sizes.key_dim, sizes.width)

    @triton.jit
    def store_channels(
        x: tensor, tile: tensor, tokens: tensor, inside: tensor, sizes: bundle
    ) -> None:
        """Write vectors of a chunk with the channels of keys."""
        store_tile(x, tile, tokens, inside, 0, sizes.key_dim, sizes.width)

    @triton.jit
    def load_state(x: tensor, index: tensor, start: tensor, sizes: bundle) -> tensor:
        """[width, block]: columns of one of many states [K, V]."""
        channels = tl.arange(0, sizes.width)
        rows = index.to(tl.int64) * sizes.key_dim
        rows += channels
        inside = channels < sizes.key_dim
        return load_values(x, rows, inside, start, sizes)

    @triton.jit
    def store_state(x: tensor, state: tensor, index: tensor, start: tensor, sizes: bundle) -> None:
        """Write columns of one of many states [K, V]."""
        channels = tl.arange(0, sizes.width)
        rows = index.to(tl.int64) * sizes.key_dim
        rows += channels
        inside = channels < sizes.key_dim
        store_values(x, state, rows, inside, start, sizes)

    @triton.jit
    def square_offsets(index: tensor, sizes: bundle) -> tensor:
        """[C, C] int64: elements of one of many matrices."""
        size: constexpr = sizes.chunk
        tokens = tl.arange(0, size)
        rows = index.to(tl.int64) * size
        rows += tokens
        first = column(rows) * size
        return first + line(tokens)

    @triton.jit
    def unit_factor(x: tensor, sizes: bundle) -> tensor:
        """[C, 1] fp32: factors that give the vectors of a delta rule the length 1; else 1."""
        squares = tl.sum(x * x, 1)
        squares = column(squares)
        if sizes.corrects:
            return tl.rsqrt(squares + sizes.eps)
        return squares * 0.0 + 1.0

    @triton.jit
    def load_vectors(x: tensor, rows: tensor, inside: tensor, sizes: bundle) -> tensor:
        """[C, width] fp32: queries or keys of a chunk."""
        vectors = load_channels(x, rows, inside, sizes)
        vectors = vectors.to(tl.float32)
        return vectors * unit_factor(vectors, sizes)

    @triton.jit
    def load_queries(data: bundle, vectors: tensor, inside: tensor, sizes: bundle) -> tensor:
        """[C, width] fp32: scaled queries of a chunk."""
        queries = load_vectors(data.query, vectors, inside, sizes)
        return queries * sizes.scale

    @triton.jit
    def unit_gradient(
        grad: tensor, x: tensor, rows: tensor, inside: tensor, sizes: bundle
    ) -> tensor:
        """Gradients of vectors, from those of `load_vectors`."""
        if sizes.corrects:
            vectors = load_channels(x, rows, inside, sizes)
            vectors = vectors.to(tl.float32)
            factor = unit_factor(vectors, sizes)
            unit = vectors * factor
            along = tl.sum(unit * grad, 1)
            grad -= unit * column(along)
            grad *= factor
        return grad

    @triton.jit
    def load_decay(decay: tensor, rows: tensor, inside: tensor, sizes: bundle) -> tensor:
        """[rows, width] or [rows, 1] fp32: logarithms, per channel or per head."""
        if sizes.by_channel:
            tile = load_channels(decay, rows, inside, sizes)
        else:
            tile = tl.load(decay + rows, mask=inside, other=0.0)
            tile = column(tile)
        return tile

    @triton.jit
    def store_decay(decay: tensor, tile: tensor, rows: tensor, sizes: bundle) -> None:
        """Write [rows, width] or [rows, 1]."""
        if sizes.by_channel:
            exists = rows >= 0
            store_channels(decay, tile, rows, exists, sizes)
        else:
            tl.store(decay + column(rows), tile)

    @triton.jit
    def load_sums(decay: tensor, rows: tensor, sizes: bundle) -> tensor:
        """[rows, width] or [rows, 1] fp32: cumulative logarithms of tokens of whole chunks."""
        exists = rows >= 0
        return load_decay(decay, rows, exists, sizes)

    @triton.jit
    def load_documents(
        documents: tensor, row: tensor, chunk: tensor, length: tensor, sizes: bundle
    ) -> bundle:
        """Documents of the tokens [C], of the token before the chunk, and of the last token."""
        size: constexpr = sizes.chunk
        first = chunk * size
        batch = row // sizes.heads
        tokens = documents + batch.to(tl.int64) * length
        previous = tl.maximum(first - 1, 0)
        before = tl.load(tokens + previous)
        before = tl.where(first > 0, before, 0)
        end = length - 1
        position = first + tl.arange(0, size)
        position = tl.minimum(position, end)
        last = tl.minimum(first + size - 1, end)
        document = tl.load(tokens + position)
        after = tl.load(tokens + last)
        return document, before, after

    @triton.jit
    def chunk_decays(
        data: bundle,
        rows: tensor,
        row: tensor,
        chunk: tensor,
        length: tensor,
        sizes: bundle,
    ) -> bundle:
        """Cumulative decays, and the factors from the start of the chunk, to its end, over it.

        The last is a column per channel: [width, 1], or [1, 1].
        """
        decay = load_sums(data.decay, rows, sizes)
        last_row = tl.max(rows, 0)
        last_row += tl.arange(0, 1)
        last = load_sums(data.decay, last_row, sizes)
        from_start = tl.exp(decay)
        to_end = tl.exp(last - decay)
        over = tl.trans(last)
        over = tl.exp(over)
        if data.documents is not None:
            document, before, end = load_documents(data.documents, row, chunk, length, sizes)
            is_first = document == before
            is_last = document == end
            from_start = tl.where(column(is_first), from_start, 0.0)
            to_end = tl.where(column(is_last), to_end, 0.0)
            over = tl.where(before == end, over, 0.0)
        return decay, from_start, to_end, over

    @triton.jit
    def allowed_pairs(
        documents: tensor, row: tensor, chunk: tensor, length: tensor, sizes: bundle
    ) -> tensor:
        """[C, C] bool: a token, and one of its document that is at most as late."""
        index = tl.arange(0, sizes.chunk)
        allowed = column(index) >= line(index)
        if documents is not None:
            document, _, _ = load_documents(documents, row, chunk, length, sizes)
            is_same = column(document) == line(document)
            allowed &= is_same
        return allowed

    @triton.jit
    def pairs_below(allowed: tensor, sizes: bundle) -> tensor:
        """[C, C] bool: allowed pairs of different tokens."""
        index = tl.arange(0, sizes.chunk)
        is_earlier = column(index) > line(index)
        return allowed & is_earlier

    @triton.jit
    def diagonal(sizes: bundle) -> tensor:
        """[C, C] bool: pairs of a token with itself."""
        index = tl.arange(0, sizes.chunk)
        return column(index) == line(index)

    @triton.jit
    def is_across(half: tensor, size: constexpr) -> tensor:
        """[size, size] bool: the later of two blocks of `half` tokens, and the earlier one."""
        index = tl.arange(0, size)
        side = (index // half) % 2
        both = index // (2 * half)
        is_neighbour = column(both) == line(both)
        is_later = column(side) > line(side)
        return is_neighbour & is_later

    @triton.jit
    def border_decays(
        data: bundle, rows: tensor, decay: tensor, half: tensor, sizes: bundle
    ) -> bundle:
        """[C, width] twice: decays from the border of two blocks, and to it."""
        both = 2 * half
        index = tl.arange(0, sizes.chunk)
        distance = half - index % both
        border = rows + distance * sizes.heads
        since = decay - load_sums(data.decay, border, sizes)
        after = tl.minimum(since, 0.0)
        before = tl.minimum(-since, 0.0)
        return tl.exp(after), tl.exp(before)

    @triton.jit
    def pair_decays(decay: tensor) -> tensor:
        """[C, C]: factors from an earlier token to a later one, with one decay per head."""
        logarithms = decay - tl.trans(decay)
        logarithms = tl.minimum(logarithms, 0.0)
        return tl.exp(logarithms)

    @triton.jit
    def decayed_pairs(
        x: tensor,
        keys: tensor,
        decay: tensor,
        data: bundle,
        rows: tensor,
        sizes: bundle,
    ) -> tensor:
        """[C, C] fp32: products of x and keys [C, width], decayed; right where x is not earlier.

        sum_k x[i, k] keys[j, k] exp(decay[i, k] - decay[j, k])
        """
        dtype = data.value.dtype.element_ty
        if sizes.by_channel:
            same = tl.sum(x * keys, 1)
            pairs = tl.where(diagonal(sizes), column(same), 0.0)
            for level in tl.range(0, sizes.levels, num_stages=1):
                half = 1 << level
                after, before = border_decays(data, rows, decay, half, sizes)
                later = (x * after).to(dtype)
                earlier = (keys * before).to(dtype)
                products = tl.dot(later, tl.trans(earlier))
                across = is_across(half, sizes.chunk)
                pairs = tl.where(across, products, pairs)
        else:
            later = x.to(dtype)
            earlier = keys.to(dtype)
            pairs = tl.dot(later, tl.trans(earlier))
            pairs *= pair_decays(decay)
        return pairs

    @triton.jit
    def pair_gradients(
        grad: tensor,
        x: tensor,
        keys: tensor,
        x_grad: tensor,
        key_grad: tensor,
        decay: tensor,
        data: bundle,
        rows: tensor,
        sizes: bundle,
    ) -> bundle:
        """Gradients of x and keys, plus those of `decayed_pairs`, which are 0 where x is earlier.

        x and keys are in the dtype of the products, which leaves registers for the sums.
        """
        dtype = data.value.dtype.element_ty
        if sizes.by_channel:
            same = tl.where(diagonal(sizes), grad, 0.0)
            same = tl.sum(same, 1)
            same = column(same)
            x_grad += same * keys
            key_grad += same * x
            for level in tl.range(0, sizes.levels, num_stages=1):
                half = 1 << level
                after, before = border_decays(data, rows, decay, half, sizes)
                across = is_across(half, sizes.chunk)
                across = tl.where(across, grad, 0.0).to(dtype)
                later = (x * after).to(dtype)
                earlier = (keys * before).to(dtype)
                x_grad += tl.dot(across, earlier) * after
                across = tl.trans(across)
                key_grad += tl.dot(across, later) * before
        else:
            decayed = grad * pair_decays(decay)
            decayed = decayed.to(dtype)
            x_grad += tl.dot(decayed, keys)
            key_grad += tl.dot(tl.trans(decayed), x)
        return x_grad, key_grad

    @triton.jit
    def unit_lower_inverse(system: tensor, sizes: bundle) -> tensor:
        """[C, C] fp32: the inverse of I plus a strictly lower triangular matrix.

        The inverses T1, T2 of two neighbouring blocks give that of both: below the diagonal it is
        -T2 system T1.
        """
        size: constexpr = sizes.chunk
        inverse = tl.where(diagonal(sizes), 1.0, 0.0)
        across = is_across(1, size)
        inverse -= tl.where(across, system, 0.0)
        for level in tl.range(1, sizes.levels, num_stages=1):
            across = is_across(1 << level, size)
            below = tl.where(across, system, 0.0)
            below = tl.dot(inverse, below)
            inverse -= tl.dot(below, inverse)
        return inverse
