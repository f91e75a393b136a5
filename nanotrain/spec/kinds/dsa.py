"""DeepSeek Sparse Attention: parameters and operators; the module is model/dsa.py."""

from nanotrain.config.layer_kinds import DSAConfig
from nanotrain.spec.declaration import Declaration, Specs, grouped, nest, summed
from nanotrain.spec.kinds.attention import compressed_projections, down_projection, mla
from nanotrain.spec.layer_sizes import FP32, LayerSizes
from nanotrain.spec.operators import (
    Indexer,
    Norm,
    Operators,
    Product,
    Saved,
    Sent,
    SparseAttention,
)
from nanotrain.spec.over_cp import all_gather_sent
from nanotrain.spec.shape import Chunks, ModelShape

BLOCK_SCORES = 2**26  # scores of all heads that are computed at once: 256 MiB in fp32


def declare(declare: Declaration) -> Specs:
    """Multi-latent attention, and an indexer that every tp rank has."""
    shape = declare.shape
    dsa = _sizes(shape)
    rank = _query_rank(shape)
    hidden = shape.hidden_size
    norm_weight = declare.vector("weight", dsa.head_dim, value=1.0)
    norm_bias = declare.vector("bias", dsa.head_dim)
    norm = summed((norm_weight, norm_bias), declare.sequence_axes)
    head_weight = declare.weight(dsa.n_heads, hidden)
    indexer = nest("query", declare.replicated_linear(dsa.n_heads * dsa.head_dim, rank))
    indexer += nest("key", declare.replicated_linear(dsa.head_dim, hidden))
    indexer += nest("key_norm", grouped("norms", norm))
    indexer += nest("head_weight", summed([head_weight], declare.sequence_axes))
    return mla(declare) + nest("indexer", indexer)


def _sizes(shape: ModelShape) -> DSAConfig:
    assert shape.dsa is not None, "sparse_attention_type is dsa"
    return shape.dsa


def _query_rank(shape: ModelShape) -> int:
    assert shape.mla is not None and shape.mla.q_lora_rank is not None, (
        "a rule demands compressed queries"
    )
    return shape.mla.q_lora_rank


def operators(s: LayerSizes) -> Operators:
    """The operators of MLA with an indexer, and attention to the keys that it selects."""
    heads = s.shape.num_heads // s.tp
    projections = compressed_projections(s)
    indexer = _indexer(s, heads=heads)
    attention = _attention(s, heads=heads)
    output = s.row(heads * s.shape.value_head_dim)
    return [*projections, *indexer, attention, output]


def _indexer(s: LayerSizes, *, heads: int) -> Operators:
    """Queries, keys and weights of the index, and the index scores."""
    dsa = _sizes(s.shape)
    query = Product(
        name="indexer.query",
        weights=("indexer.query.weight",),
        rows=s.outside,
        outputs=dsa.n_heads * dsa.head_dim,
        inputs=_query_rank(s.shape),
    )
    key = down_projection(s, "indexer.key", outputs=dsa.head_dim)
    head_weight = down_projection(s, "indexer.head_weight", outputs=dsa.n_heads)
    norm_inputs = Saved(s.outside * (dsa.head_dim * s.itemsize + s.layer_norm_statistics))
    norm = Norm(name="indexer", numel=s.outside * dsa.head_dim, saves=(norm_inputs,))
    return [query, key, head_weight, norm, _index_scores(s, heads=heads)]


def _index_scores(s: LayerSizes, *, heads: int) -> Indexer:
    """Scores of queries and keys; the loss computes the gradients of the index in the forward."""
    dsa = _sizes(s.shape)
    width = dsa.n_heads * dsa.head_dim + dsa.n_heads + dsa.head_dim
    grads = Saved(s.tokens * width * s.itemsize)
    other_keys = s.tokens * (s.cp - 1) * dsa.head_dim
    gathered_keys = Saved(other_keys * s.itemsize, dropped_by=("core_attn",))
    return Indexer(
        name="indexer",
        heads=dsa.n_heads,
        head_dim=dsa.head_dim,
        num_positions=s.tokens,
        length=s.seq_length * s.cp,
        attention_heads=heads,
        attention_head_dim=s.shape.head_dim,
        has_loss=dsa.loss_coeff > 0,
        saves=(grads, gathered_keys),
        working=_forward_temporaries(s, heads=heads),
    )


def _attention(s: LayerSizes, *, heads: int) -> SparseAttention:
    """Attention to the selected keys."""
    sequence = Chunks(1, s.seq_length * s.cp)
    return SparseAttention(
        name="core_attn",
        module="core_attn",
        batch=s.batch_size,
        heads=heads,
        kv_heads=heads,
        head_dim=s.shape.head_dim,
        value_head_dim=s.shape.value_head_dim,
        chunks=(sequence,),
        window=_sizes(s.shape).topk,
        saves=_saves(s, heads=heads),
        working=_backward_temporaries(s, heads=heads),
        over_cp=_over_cp(s, heads=heads),
    )


def _saves(s: LayerSizes, *, heads: int) -> tuple[Saved, ...]:
    """Query, key, value, output and its log-sum-exp, and a bit per query and key."""
    shape = s.shape
    assert shape.mla is not None, "a rule demands it"
    key_value_dim = shape.head_dim + shape.value_head_dim
    core = ("core_attn",)
    if s.cp == 1:
        key_value_dim += shape.mla.qk_head_dim  # values are views of what kv_up returns
        dropped_with_keys: tuple[str, ...] = (*core, "mla_up_proj")
    else:
        dropped_with_keys = core  # gathered keys and values are no outputs of up-projections
    local_rows = s.tokens * heads
    query = local_rows * shape.head_dim * s.itemsize
    output = local_rows * shape.value_head_dim * s.itemsize
    local_keys = local_rows * key_value_dim * s.itemsize
    statistics = local_rows * FP32
    num_keys = s.cp * s.tokens // s.batch_size
    selected = s.tokens * (num_keys // 8)
    saves = [
        Saved(query, dropped_by=("mla_up_proj",)),
        Saved(output),
        Saved(local_keys, dropped_by=("mla_up_proj",), only_with="core_attn"),
        Saved(local_keys * s.cp, dropped_by=dropped_with_keys),
        Saved(statistics + selected, dropped_by=core),
    ]
    if s.cp > 1:
        saves.append(Saved(output, dropped_by=core))  # sliced
    return tuple(saves)


def _over_cp(s: LayerSizes, *, heads: int) -> tuple[Sent, ...]:
    """Keys, values and index keys to every other rank, and their gradients."""
    shape = s.shape
    key_value_width = heads * (shape.head_dim + shape.value_head_dim)
    width = key_value_width + _sizes(shape).head_dim
    return all_gather_sent((s.cp - 1) * s.tokens * width * s.itemsize)


def _num_block_scores(s: LayerSizes, *, heads: int) -> int:
    """Scores of one block of queries, of the index or of attention."""
    num_keys = s.cp * s.tokens // s.batch_size
    num_heads = max(heads, _sizes(s.shape).n_heads)
    return min(BLOCK_SCORES, num_heads * s.tokens * num_keys)


def _gathered_keys(s: LayerSizes, *, heads: int) -> int:
    """Elements of the keys, or of the values, of all cp ranks."""
    return s.cp * s.tokens * heads * max(s.shape.head_dim, s.shape.value_head_dim)


def _forward_temporaries(s: LayerSizes, *, heads: int) -> int:
    """Products and gradients of the index in fp32, in the forward.

    Within 8 % of what torch allocates for 6 sets of sizes, with `_backward_temporaries`.
    """
    dsa = _sizes(s.shape)
    block = _num_block_scores(s, heads=heads)
    scores = 5 * block // 2
    keys = _gathered_keys(s, heads=heads)
    queries = 2 * s.tokens * dsa.n_heads * dsa.head_dim
    return FP32 * (scores + keys + queries)


def _backward_temporaries(s: LayerSizes, *, heads: int) -> int:
    """Scores of a block in fp32, and keys, values and sums of their gradients."""
    num_heads = max(heads, _sizes(s.shape).n_heads)
    block = _num_block_scores(s, heads=heads)
    scores = 4 * block * heads // num_heads
    keys_and_values = 10 * _gathered_keys(s, heads=heads)
    return FP32 * (scores + keys_and_values)
