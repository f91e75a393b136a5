"""Attention to a window and to compressed keys: parameters and operators; the modules are in
model/compressed.py.

    sliding   the window alone
    csa       also the compressed keys that an indexer selects, each of a few tokens
    hca       also all heavily compressed keys

DeepSeek-V4, section 2.3.
"""

from dataclasses import replace
from math import ceil

from nanotrain.config.layer_kinds import CompressedAttentionConfig, DSAConfig
from nanotrain.spec.declaration import (
    COLUMN_SHARDS,
    Declaration,
    Specs,
    nest,
    norm,
    summed,
)
from nanotrain.spec.kinds.attention import down_projection, up_projection
from nanotrain.spec.kinds.dsa import BLOCK_SCORES
from nanotrain.spec.layer_sizes import FP32, LayerSizes
from nanotrain.spec.operators import (
    CompressedAttention,
    Indexer,
    Norm,
    Operators,
    Product,
    Rotary,
    Saved,
    Sent,
)
from nanotrain.spec.over_cp import all_gather_sent, halo
from nanotrain.spec.params import Normal
from nanotrain.spec.shape import Chunks, ModelShape

NUM_CHUNKS = 2  # chunks of a sequence on a cp rank
WINDOW_ROWS = 128  # queries whose scores of the window are computed at once
CORE = ("core_attn",)


def ratio_of(shape: ModelShape, layer: int) -> int:
    """Tokens of a compressed key of a layer, by its index in the model; 0 without such keys."""
    sizes = _sizes(shape)
    mixer, _ = shape.kinds(layer)
    return {"csa": sizes.sparse_ratio, "hca": sizes.heavy_ratio}.get(str(mixer), 0)


def declare_sliding(declare: Declaration) -> Specs:
    """Queries of low rank, one key for all heads, and an output projection of low rank."""
    shape = declare.shape
    sizes = _sizes(shape)
    hidden = shape.hidden_size
    width = shape.head_dim
    heads = shape.num_heads
    specs: Specs = ()
    if shape.has_sink:
        init = Normal(shape.init_std)
        specs += (declare.head_vector("softmax_offset", heads, init=init),)
    rank = sizes.q_lora_rank
    specs += nest("query_down", declare.replicated_linear(rank, hidden))
    specs += nest("query_latent_norm", norm(declare, rank))
    specs += nest("query_up", declare.column_linear(heads * width, rank, head_rows=(width,)))
    specs += nest("key", declare.replicated_linear(width, hidden))
    specs += nest("key_norm", norm(declare, width))
    inner = sizes.output_groups * sizes.output_lora_rank
    # a matrix per group of heads, one below the other
    first = declare.weight(inner, heads * width // sizes.output_groups)
    specs += nest("output_down", [replace(first, shards=COLUMN_SHARDS)])
    return specs + nest("output", declare.row_linear(hidden, inner))


def declare_hca(declare: Declaration) -> Specs:
    """Attention to a window, and the projections of heavily compressed keys."""
    sizes = _sizes(declare.shape)
    width = declare.shape.head_dim
    # every tp rank has the gradients of its own heads
    compressor = _compressor(declare, width, ratio=sizes.heavy_ratio, axes=("tp",))
    return declare_sliding(declare) + nest("compressor", compressor)


def declare_csa(declare: Declaration) -> Specs:
    """Attention to a window, projections of two series of tokens per key, and an indexer."""
    shape = declare.shape
    sizes = _sizes(shape)
    ratio = sizes.sparse_ratio
    dsa = _indexer_sizes(shape)
    width = shape.head_dim
    compressor = _compressor(declare, width, ratio=ratio, axes=("tp",), num_series=2)
    query = declare.replicated_linear(dsa.n_heads * dsa.head_dim, sizes.q_lora_rank)
    head_weight = declare.weight(dsa.n_heads, shape.hidden_size)
    # every tp rank has all gradients of the index
    indexer = _compressor(declare, dsa.head_dim, ratio=ratio, axes=(), num_series=2)
    indexer += nest("query", query)
    indexer += nest("head_weight", summed([head_weight], declare.sequence_axes))
    specs = declare_sliding(declare) + nest("compressor", compressor)
    return specs + nest("indexer", indexer)


def _compressor(
    declare: Declaration, width: int, *, ratio: int, axes: tuple[str, ...], num_series: int = 1
) -> Specs:
    """The projections of a compressor: values and gates of tokens, a bias per token of a window.

    Args:
        declare: sizes.
        width: channels of a compressed key.
        ratio: tokens of a window.
        axes: axes that sum the gradients of what is applied to all tokens.
        num_series: values of a token: for its own window, and for the next one.
    """
    hidden = declare.shape.hidden_size
    projection = declare.replicated_linear(num_series * width, hidden)
    bias = declare.vector("position_bias", ratio, num_series * width)
    specs = summed([bias], axes)
    specs += nest("value", projection)
    specs += nest("gate", projection)
    return specs + nest("norm", summed(norm(declare, width), axes))


def _sizes(shape: ModelShape) -> CompressedAttentionConfig:
    assert shape.compressed is not None, "sparse_attention_type is compressed"
    return shape.compressed


def _indexer_sizes(shape: ModelShape) -> DSAConfig:
    assert shape.dsa is not None, "sparse_attention_type is compressed"
    return shape.dsa


def operators(s: LayerSizes) -> Operators:
    """Projections, compressed keys, index, attention and output."""
    ratio = ratio_of(s.shape, s.layer)
    num_series = 2 if _has_indexer(s) else 1
    result = _projections(s)
    if ratio:
        width = s.shape.head_dim
        result += _compressed_keys(s, "compressor", width=width, ratio=ratio, num_series=num_series)
    if _has_indexer(s):
        result += _indexer(s, ratio=ratio)
    result.append(_attention(s, ratio=ratio))
    return result + _output(s)


def _has_indexer(s: LayerSizes) -> bool:
    mixer, _ = s.shape.kinds(s.layer)
    return mixer == "csa"


def _heads(s: LayerSizes) -> int:
    """Heads of the tp rank."""
    return s.shape.num_heads // s.tp


def _projections(s: LayerSizes) -> Operators:
    """Queries and keys with their norms and rotary positions."""
    shape = s.shape
    rank = _sizes(shape).q_lora_rank
    width = shape.head_dim
    query_rows = s.tokens * _heads(s)
    query_down = down_projection(s, "query_down", outputs=rank)
    key = down_projection(s, "key", outputs=width, saves=(s.layer_input,))
    compressed = s.outside * (rank + width)
    statistics = s.outside * (s.norm_extra(rank) + s.norm_extra(width))
    norms = Norm(
        name="layernorm",
        numel=compressed,
        saves=(Saved(compressed * s.itemsize), Saved(statistics)),
        launches=2,
        backward_launches=4,
    )
    query_up = up_projection(s, "query_up", outputs=_heads(s) * width, inputs=rank)
    projected = query_rows * width
    # with weights of 1, and the inverse root mean square of each head
    norm_bytes = (projected + width) * s.itemsize + query_rows * FP32
    query_norm = Norm(name="query_norm", numel=projected, saves=(Saved(norm_bytes),))
    # queries and keys, and outputs, which are rotated back
    rotated = 2 * projected + s.tokens * width
    assert shape.window_size is not None, "a rule demands it"
    keys_before = halo(s, channels=width, kernel_size=shape.window_size + 1)
    rotary = Rotary(name="rope", numel=rotated, over_cp=keys_before)
    return [query_down, key, norms, query_up, query_norm, rotary]


def _num_keys(s: LayerSizes, ratio: int) -> int:
    """Compressed keys of all sequences."""
    return s.batch_size * (s.seq_length * s.cp // ratio)


def _tokens_with_halo(s: LayerSizes, before: int) -> int:
    """Tokens of the rank, and `before` tokens in front of each of its chunks over cp."""
    if s.cp == 1:
        return s.tokens
    return s.tokens + NUM_CHUNKS * s.batch_size * before


def _compressed_keys(
    s: LayerSizes, name: str, *, width: int, ratio: int, num_series: int
) -> Operators:
    """Values and gates of tokens, their weighted sums, and the norm of these.

    Args:
        s: sizes of the layer.
        name: name of the compressor in the layer.
        width: channels of a compressed key.
        ratio: tokens of a window.
        num_series: values of a token.
    """
    projected = num_series * width
    value = down_projection(s, f"{name}.value", outputs=projected)
    gate = down_projection(s, f"{name}.gate", outputs=projected)
    before = num_series * ratio - 1
    channels = 2 * projected
    num_keys = _num_keys(s, ratio)
    num_positions = num_keys // s.batch_size
    over_cp: tuple[Sent, ...] = ()
    if s.cp > 1:  # with cosines and sines
        channels += s.shape.rotary_dim
        num_per_chunk = ceil(s.seq_length / (NUM_CHUNKS * ratio))
        num_keys = NUM_CHUNKS * s.batch_size * num_per_chunk
        num_positions = num_keys
        sent = (s.cp - 1) * num_keys * width * s.itemsize
        over_cp = halo(s, channels=channels, kernel_size=before + 1) + all_gather_sent(sent)
    kept = Saved(_tokens_with_halo(s, before) * channels * s.itemsize)
    numel = num_keys * width
    inputs = Saved(numel * s.itemsize + num_keys * s.norm_extra(width))
    # cosines and sines of the first tokens of windows
    positions = Saved(num_positions * s.shape.rotary_dim * s.itemsize)
    window = 2 * num_series * s.tokens * projected
    pooled = Norm(
        name=name,
        numel=2 * s.tokens * projected,
        saves=(kept, inputs, positions),
        working=2 * FP32 * window,
        launches=8,
        backward_launches=16,
        over_cp=over_cp,
    )
    return [value, gate, pooled]


def _indexer(s: LayerSizes, *, ratio: int) -> Operators:
    """The index: queries, weights of its heads, compressed index keys, and scores."""
    shape = s.shape
    dsa = _indexer_sizes(shape)
    query = Product(
        name="indexer.query",
        weights=("indexer.query.weight",),
        rows=s.outside,
        outputs=dsa.n_heads * dsa.head_dim,
        inputs=_sizes(shape).q_lora_rank,
    )
    head_weight = down_projection(s, "indexer.head_weight", outputs=dsa.n_heads)
    keys = _compressed_keys(s, "indexer", width=dsa.head_dim, ratio=ratio, num_series=2)
    num_keys = s.seq_length * s.cp // ratio
    # the loss computes the gradients of the index in the forward
    grads = s.tokens * dsa.n_heads * (dsa.head_dim + 1) + _num_keys(s, ratio) * dsa.head_dim
    scores = min(BLOCK_SCORES, max(_heads(s), dsa.n_heads) * s.tokens * num_keys)
    index = Indexer(
        name="indexer",
        module="core_attn",
        heads=dsa.n_heads,
        head_dim=dsa.head_dim,
        num_positions=s.tokens,
        length=num_keys,
        topk=dsa.topk,
        gathers=False,
        attention_heads=_heads(s),
        attention_head_dim=shape.head_dim,
        has_loss=dsa.loss_coeff > 0,
        has_sparse_loss=dsa.use_sparse_loss,
        saves=(Saved(grads * s.itemsize),),
        working=FP32 * (3 * scores + grads),
    )
    return [query, head_weight, *keys, index]


def _attention(s: LayerSizes, *, ratio: int) -> CompressedAttention:
    """Attention to the keys of the window and to compressed keys."""
    shape = s.shape
    assert shape.window_size is not None, "a rule demands it"
    heads = _heads(s)
    sequence = Chunks(1, s.seq_length * s.cp)
    topk = _indexer_sizes(shape).topk if _has_indexer(s) else None
    return CompressedAttention(
        name="core_attn",
        module="core_attn",
        batch=s.batch_size,
        heads=heads,
        kv_heads=1,
        head_dim=shape.head_dim,
        value_head_dim=shape.head_dim,
        chunks=(sequence,),
        window=shape.window_size + 1,
        ratio=ratio,
        topk=topk,
        saves=_saved_by_attention(s, ratio=ratio),
        working=_working(s, ratio=ratio),
    )


def _saved_by_attention(s: LayerSizes, *, ratio: int) -> tuple[Saved, ...]:
    """Query, keys, output and its log-sum-exp, and a bit per query and compressed key."""
    width = s.shape.head_dim
    rows = s.tokens * _heads(s)
    query = Saved(rows * width * s.itemsize)
    output = Saved(rows * width * s.itemsize, dropped_by=CORE)
    statistics = Saved(rows * FP32, dropped_by=CORE)
    assert s.shape.window_size is not None, "a rule demands it"
    num_tokens = _tokens_with_halo(s, s.shape.window_size)
    num_calls = 1 if s.cp == 1 else NUM_CHUNKS
    compressed = _num_keys(s, ratio) if ratio else 0
    token_bytes = width * s.itemsize
    keys = (num_tokens + num_calls * compressed) * token_bytes
    saves = [query, output, statistics, Saved(keys, dropped_by=CORE if ratio else ())]
    if ratio:  # keys and compressed keys before they are joined
        parts = (num_tokens + compressed) * token_bytes
        saves.append(Saved(parts, only_with="core_attn"))
    if s.cp > 1:  # joined outputs of the chunks
        saves.append(Saved(rows * width * s.itemsize, dropped_by=CORE))
    if _has_indexer(s) and compressed // s.batch_size > _indexer_sizes(s.shape).topk:
        num_bytes = -(-compressed // (s.batch_size * 8))
        # a chunk of queries has the keys before its end
        selected = s.tokens * num_bytes * (num_calls * s.cp + 1) // (2 * num_calls * s.cp)
        if s.cp == 1:
            selected = s.tokens * num_bytes
        saves.append(Saved(selected, dropped_by=CORE))
    return tuple(saves)


def _working(s: LayerSizes, *, ratio: int) -> int:
    """Temporaries of the backward: scores of some queries, and gradients of keys, in fp32."""
    shape = s.shape
    assert shape.window_size is not None, "a rule demands it"
    heads = _heads(s)
    window = WINDOW_ROWS + shape.window_size
    length = s.seq_length * s.cp
    scores = s.batch_size * heads * min(WINDOW_ROWS, length) * min(window, length)
    num_keys = s.tokens
    if ratio:
        compressed = _num_keys(s, ratio)
        num_keys += compressed
        scores = max(scores, min(BLOCK_SCORES, s.tokens * heads * compressed // s.batch_size))
    grads = s.tokens * heads * shape.head_dim + 3 * num_keys * shape.head_dim
    return FP32 * (4 * scores + grads)


def _output(s: LayerSizes) -> Operators:
    """The outputs of heads, rotated back, by group, and their sum."""
    shape = s.shape
    sizes = _sizes(shape)
    width = _heads(s) * shape.head_dim
    rotated = Saved(s.tokens * width * s.itemsize)
    inner = sizes.output_groups * sizes.output_lora_rank // s.tp
    output_down = Product(
        name="output_down",
        weights=("output_down.weight",),
        rows=s.tokens,
        outputs=inner,
        inputs=shape.num_heads * shape.head_dim // sizes.output_groups,
        shard="column",
        saves=(rotated,),
    )
    grouped_outputs = Saved(s.tokens * inner * s.itemsize)
    return [output_down, s.row(inner, saves=(grouped_outputs,))]
