r"""Tiles of chunked linear attention: what the Triton kernels of triton_chunk_scan.py load.

    locate_tokens     the tokens of a chunk, in memory
    unit_factors      what gives vectors the length 1
    decays_from_start, decays_to_end, decays_over    decays inside a chunk and over it
    decayed_pairs     products of tokens of a chunk; pair_gradients, their gradients
    unit_lower_inverse    of the triangular system of a delta rule

Kernels of single chunks have a block of channels in registers at a time: 64 tokens with 128
channels in fp32 are an eighth of a multiprocessor's registers, and gradients need ten such tiles.

Logarithms of decays are cumulative from the start of a chunk of C tokens; every exponent is at most
0. With decays per channel the pairs of two neighbouring blocks of tokens are one product, with
decays to and from the border between them. As in triton_softmax.py, parameters are annotated for
Triton's compiler. Names of sizes are those of triton_scan_inputs.py.
"""

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr, tensor
    from triton.language import tuple as bundle
except ImportError:
    triton = None


if triton is not None:

    @triton.jit
    def locate_tokens(place: bundle, sizes: bundle) -> bundle:
        """Tokens of a chunk: which exist, and int64 rows of vectors, of values and of decays.

        A place is the index of the chunk, the row of its head, the tokens of a sequence and its
        number of chunks.
        """
        chunk, row, length, num_chunks = place
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
    def chunk_index(place: bundle) -> tensor:
        """int64: the index of a chunk among the chunks of all heads."""
        chunk, row, _, num_chunks = place
        return row.to(tl.int64) * num_chunks + chunk

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
    def load_channels(
        x: tensor, tokens: tensor, inside: tensor, start: tensor, sizes: bundle
    ) -> tensor:
        """[C, channels]: channels from `start` on of vectors of a chunk."""
        return load_tile(x, tokens, inside, start, sizes.key_dim, sizes.channels)

    @triton.jit
    def store_channels(
        x: tensor,
        tile: tensor,
        tokens: tensor,
        inside: tensor,
        start: tensor,
        sizes: bundle,
    ) -> None:
        """Write channels from `start` on of vectors of a chunk."""
        store_tile(x, tile, tokens, inside, start, sizes.key_dim, sizes.channels)

    @triton.jit
    def load_state(
        x: tensor, index: tensor, channel: tensor, start: tensor, sizes: bundle
    ) -> tensor:
        """[channels, block]: a tile of one of many states [K, V]."""
        channels = channel + tl.arange(0, sizes.channels)
        rows = index.to(tl.int64) * sizes.key_dim
        rows += channels
        inside = channels < sizes.key_dim
        return load_values(x, rows, inside, start, sizes)

    @triton.jit
    def store_state(x: tensor, state: tensor, index: tensor, start: tensor, sizes: bundle) -> None:
        """Write columns of one of many states [K, V], with all channels."""
        channels = tl.arange(0, sizes.channels)
        rows = index.to(tl.int64) * sizes.key_dim
        rows += channels
        inside = channels < sizes.key_dim
        store_values(x, state, rows, inside, start, sizes)

    @triton.jit
    def square_offsets(index: tensor, sizes: bundle) -> tensor:
        """[C, C] int64: offsets of the elements of matrix `index` among [C, C] matrices."""
        size: constexpr = sizes.chunk
        tokens = tl.arange(0, size)
        rows = index.to(tl.int64) * size
        rows += tokens
        first = column(rows) * size
        return first + line(tokens)

    @triton.jit
    def unit_factors(x: tensor, rows: tensor, inside: tensor, sizes: bundle) -> tensor:
        """[C, 1] fp32: factors that give the vectors of a delta rule the length 1; else 1."""
        squares = tl.zeros([sizes.chunk], tl.float32)
        if sizes.corrects:
            for start in range(0, sizes.key_dim, sizes.channels):
                vectors = load_channels(x, rows, inside, start, sizes)
                vectors = vectors.to(tl.float32)
                squares += tl.sum(vectors * vectors, 1)
            factors = tl.rsqrt(squares + sizes.eps)
        else:
            factors = squares + 1.0
        return column(factors)

    @triton.jit
    def load_scaled(
        x: tensor,
        factors: tensor,
        rows: tensor,
        inside: tensor,
        start: tensor,
        sizes: bundle,
    ) -> tensor:
        """[C, channels] fp32: channels of queries or keys, times factors [C, 1]."""
        vectors = load_channels(x, rows, inside, start, sizes)
        vectors = vectors.to(tl.float32)
        return vectors * factors

    @triton.jit
    def load_vectors(x: tensor, rows: tensor, inside: tensor, sizes: bundle) -> tensor:
        """[C, channels] fp32: queries or keys of a chunk, with all channels."""
        factors = unit_factors(x, rows, inside, sizes)
        return load_scaled(x, factors, rows, inside, 0, sizes)

    @triton.jit
    def load_queries(data: bundle, vectors: tensor, inside: tensor, sizes: bundle) -> tensor:
        """[C, channels] fp32: scaled queries of a chunk, with all channels."""
        queries = load_vectors(data.query, vectors, inside, sizes)
        return queries * sizes.scale

    @triton.jit
    def project_gradient(
        grad: tensor,
        along: tensor,
        x: tensor,
        factors: tensor,
        place: bundle,
        sizes: bundle,
    ) -> None:
        """Gradients of the vectors of a delta rule, from the gradients of their unit vectors.

        grad has gradients per head of values, along [C] their products with the unit vectors, x the
        vectors, and factors [C, 1] are those of `unit_factors`.
        """
        tl.debug_barrier()  # the gradients are read from memory, which other threads have written
        inside, rows, tokens, _ = locate_tokens(place, sizes)
        along = column(along)
        for start in range(0, sizes.key_dim, sizes.channels):
            unit = load_scaled(x, factors, rows, inside, start, sizes)
            across = load_channels(grad, tokens, inside, start, sizes)
            across -= unit * along
            across *= factors
            store_channels(grad, across, tokens, inside, start, sizes)

    @triton.jit
    def load_decay(
        decay: tensor, rows: tensor, inside: tensor, start: tensor, sizes: bundle
    ) -> tensor:
        """[rows, channels] or [rows, 1] fp32: logarithms, per channel or per head."""
        if sizes.by_channel:
            tile = load_channels(decay, rows, inside, start, sizes)
        else:
            tile = tl.load(decay + rows, mask=inside, other=0.0)
            tile = column(tile)
        return tile

    @triton.jit
    def store_decay(
        decay: tensor, tile: tensor, rows: tensor, start: tensor, sizes: bundle
    ) -> None:
        """Write [rows, channels] or [rows, 1]."""
        if sizes.by_channel:
            exists = rows >= 0
            store_channels(decay, tile, rows, exists, start, sizes)
        else:
            tl.store(decay + column(rows), tile)

    @triton.jit
    def load_sums(decay: tensor, rows: tensor, start: tensor, sizes: bundle) -> tensor:
        """[rows, channels] or [rows, 1] fp32: cumulative logarithms of tokens of whole chunks."""
        exists = rows >= 0
        return load_decay(decay, rows, exists, start, sizes)

    @triton.jit
    def load_last(decay: tensor, rows: tensor, start: tensor, sizes: bundle) -> tensor:
        """[1, channels] or [1, 1] fp32: the sums over a chunk."""
        row = tl.max(rows, 0)
        row += tl.arange(0, 1)
        return load_sums(decay, row, start, sizes)

    @triton.jit
    def load_documents(data: bundle, place: bundle, sizes: bundle) -> bundle:
        """Documents of the tokens [C], of the token before the chunk, and of the last token."""
        chunk, row, length, _ = place
        size: constexpr = sizes.chunk
        first = chunk * size
        batch = row // sizes.heads
        tokens = data.documents + batch.to(tl.int64) * length
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
    def decays_from_start(
        decay: tensor,
        data: bundle,
        place: bundle,
        sizes: bundle,
    ) -> tensor:
        """Factors from the state before a chunk to its tokens, in the shape of the logarithms."""
        factors = tl.exp(decay)
        if data.documents is not None:
            document, before, _ = load_documents(data, place, sizes)
            is_first = document == before
            factors = tl.where(column(is_first), factors, 0.0)
        return factors

    @triton.jit
    def decays_to_end(
        decay: tensor,
        last: tensor,
        data: bundle,
        place: bundle,
        sizes: bundle,
    ) -> tensor:
        """Factors from the tokens of a chunk to the state after it; last: `load_last`."""
        factors = tl.exp(last - decay)
        if data.documents is not None:
            document, _, after = load_documents(data, place, sizes)
            is_last = document == after
            factors = tl.where(column(is_last), factors, 0.0)
        return factors

    @triton.jit
    def decays_over(
        last: tensor,
        data: bundle,
        place: bundle,
        sizes: bundle,
    ) -> tensor:
        """[1, channels] or [1, 1] fp32: factors from the state before a chunk to that after it."""
        factors = tl.exp(last)
        if data.documents is not None:
            _, before, after = load_documents(data, place, sizes)
            factors = tl.where(before == after, factors, 0.0)
        return factors

    @triton.jit
    def allowed_pairs(data: bundle, place: bundle, sizes: bundle) -> tensor:
        """[C, C] bool: a token, and one of its document that is at most as late."""
        index = tl.arange(0, sizes.chunk)
        allowed = column(index) >= line(index)
        if data.documents is not None:
            document, _, _ = load_documents(data, place, sizes)
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
        data: bundle, rows: tensor, decay: tensor, half: tensor, start: tensor, sizes: bundle
    ) -> tensor:
        """[C, channels]: decays from the border of two blocks to a token, or from a token to it."""
        both = 2 * half
        index = tl.arange(0, sizes.chunk)
        distance = half - index % both
        border = rows + distance * sizes.heads
        since = decay - load_sums(data.decay, border, start, sizes)
        logarithms = -tl.abs(since)
        return tl.exp(logarithms)

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
        start: tensor,
        sizes: bundle,
    ) -> tensor:
        """[C, C] fp32: products of x and keys [C, channels], decayed; right where x is not earlier.

        sum_k x[i, k] keys[j, k] exp(decay[i, k] - decay[j, k])
        """
        dtype = data.value.dtype.element_ty
        if sizes.by_channel:
            same = tl.sum(x * keys, 1)
            pairs = tl.where(diagonal(sizes), column(same), 0.0)
            for level in tl.range(0, sizes.levels, num_stages=1):
                half = 1 << level
                factors = border_decays(data, rows, decay, half, start, sizes)
                later = (x * factors).to(dtype)
                earlier = (keys * factors).to(dtype)
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
        start: tensor,
        sizes: bundle,
    ) -> bundle:
        """Add the gradients of `decayed_pairs` to gradients of x and keys; 0 where x is earlier.

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
                factors = border_decays(data, rows, decay, half, start, sizes)
                across = is_across(half, sizes.chunk)
                across = tl.where(across, grad, 0.0).to(dtype)
                earlier = (keys * factors).to(dtype)
                x_grad += tl.dot(across, earlier) * factors
                later = (x * factors).to(dtype)
                key_grad += tl.dot(tl.trans(across), later) * factors
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
