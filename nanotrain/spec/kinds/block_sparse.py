"""Attention to selected blocks of keys: parameters and operators; the module is
model/block_sparse.py.
"""

from math import ceil

from nanotrain.config.layer_kinds import DSAConfig
from nanotrain.spec.declaration import Declaration, Specs, grouped, nest, summed
from nanotrain.spec.kinds.attention import attention, attention_operators, replicated
from nanotrain.spec.kinds.core_attention import query_key_modules
from nanotrain.spec.kinds.dsa import BLOCK_SCORES, GATHERED_NUMEL
from nanotrain.spec.layer_sizes import FP32, INT32, LayerSizes
from nanotrain.spec.operators import (
    Attention,
    GatheredBlocks,
    Indexer,
    Norm,
    Operator,
    Operators,
    Saved,
    SparseAttention,
)
from nanotrain.spec.over_cp import all_gather_sent
from nanotrain.spec.shape import ModelShape

# time of a pair of a query and a gathered key, in pairs of a query and any key: measured on one CPU
# core with four query heads per key/value head
GATHERED_PAIR = 4


def gathers_blocks(shape: ModelShape, length: int) -> bool:
    """Whether attention gathers the selected blocks of every query; else it masks the others.

    The form that takes less time; scores that are capped or dropped, or have a sink, are masked.

    Args:
        shape: shape of the model.
        length: tokens of a sequence on all cp ranks.
    """
    if shape.has_score_options:
        return False
    pairs = length**2 / 2
    gathered_pairs = length * _sizes(shape).topk
    return GATHERED_PAIR * gathered_pairs < pairs


def declare(declare: Declaration) -> Specs:
    """Attention, and an indexer: tp shards its queries as the key/value heads."""
    shape = declare.shape
    dsa = _sizes(shape)
    hidden = shape.hidden_size
    width = dsa.head_dim
    norm_weight = declare.vector("weight", width, value=shape.norm_init)
    norm = grouped("norms", summed([norm_weight], ("tp",)))
    query = declare.column_linear(dsa.n_heads * width, hidden)
    key = declare.column_linear(width, hidden)
    indexer = nest("query", query)
    indexer += nest("key", replicated(key))
    indexer += nest("query_norm", norm)
    indexer += nest("key_norm", norm)
    return attention(declare) + nest("indexer", indexer)


def _sizes(shape: ModelShape) -> DSAConfig:
    assert shape.dsa is not None, "sparse_attention_type is blocks"
    return shape.dsa


def operators(s: LayerSizes) -> Operators:
    """The operators of attention with an indexer, and attention to the blocks that it selects."""
    result: Operators = []
    for operator in attention_operators(s):
        if isinstance(operator, Attention):
            result += _indexer(s)
            result.append(_attention(s, operator))
        else:
            result.append(operator)
    return result


def _index_heads(s: LayerSizes) -> int:
    """Index heads of the tp rank."""
    return _sizes(s.shape).n_heads // s.tp


def _indexer(s: LayerSizes) -> list[Operator]:
    """Queries and keys of the index with their norms, and the block scores."""
    shape = s.shape
    dsa = _sizes(shape)
    heads = _index_heads(s)
    width = dsa.head_dim
    widths = {"indexer.query": heads * width, "indexer.key": width}
    projections = s.column(widths)
    rows = s.tokens * (heads + 1)
    numel = rows * width
    norm_inputs = Saved(numel * s.itemsize)
    statistics = Saved(rows * FP32)
    norms = Norm(
        name="indexer",
        numel=numel,
        saves=(norm_inputs, statistics),
        launches=2,
        backward_launches=4,
    )
    # the loss computes the gradients of the index in the forward
    grads = Saved(numel * s.itemsize)
    length = s.seq_length * s.cp
    attention_heads = shape.num_heads // s.tp
    products = 5 * _num_block_scores(s) // 2
    scores = Indexer(
        name="indexer",
        module="core_attn",
        heads=heads,
        head_dim=width,
        num_positions=s.tokens,
        length=length,
        topk=dsa.topk,
        gathers=False,
        attention_heads=attention_heads,
        attention_head_dim=shape.head_dim,
        has_loss=dsa.loss_coeff > 0,
        has_sparse_loss=dsa.use_sparse_loss,
        sums_over_tp=False,
        saves=(grads,),
        working=FP32 * (products + numel),
    )
    return [projections, norms, scores]


def _num_block_scores(s: LayerSizes) -> int:
    """Scores of all heads and some queries that are computed at once."""
    num_keys = s.cp * s.seq_length
    heads = s.shape.num_heads // s.tp
    return min(BLOCK_SCORES, heads * s.tokens * num_keys)


def _attention(s: LayerSizes, core: Attention) -> Attention:
    """Attention to the selected blocks, in place of a core attention."""
    dsa = _sizes(s.shape)
    head_width = core.head_dim + core.value_head_dim
    width = core.kv_heads * head_width
    token_bytes = (width + dsa.head_dim) * s.itemsize
    other_ranks = s.cp - 1
    sent = other_ranks * s.tokens * token_bytes
    all_tokens = s.cp * s.tokens
    keys_and_values = 3 * all_tokens * width
    gathers = gathers_blocks(s.shape, s.seq_length * s.cp)
    elements = _gathered_elements(s, core) if gathers else 4 * _num_block_scores(s)
    sizes = vars(core)  # sizes of the heads are the same
    own = {
        "window": dsa.topk,
        "saves": _saved_by_attention(s, core),
        "working": FP32 * (elements + keys_and_values),
        "over_cp": all_gather_sent(sent),
    }
    if gathers:
        return GatheredBlocks(**sizes | own)
    return SparseAttention(**sizes | own)


def _gathered_elements(s: LayerSizes, core: Attention) -> int:
    """Elements of gathered keys and values, their gradients, and their scores, at once."""
    widest = max(core.head_dim, core.value_head_dim)
    keys = s.tokens * core.kv_heads * _sizes(s.shape).topk
    keys = min(GATHERED_NUMEL[s.device] // widest, keys)
    heads = core.heads // core.kv_heads
    return 4 * keys * (widest + heads)


def _saved_by_attention(s: LayerSizes, core: Attention) -> tuple[Saved, ...]:
    """Query, key, value, output and its log-sum-exp, and the selected blocks."""
    recompute = ("core_attn",)
    rotated = query_key_modules(s.shape)
    rows = s.tokens * core.heads
    key_rows = s.tokens * core.kv_heads
    key_bytes = core.head_dim * s.itemsize
    value_bytes = core.value_head_dim * s.itemsize
    query = Saved(rows * key_bytes, dropped_by=rotated)
    output = rows * value_bytes
    results = rows * FP32 + _selected_bytes(s)
    saves = [query, Saved(output), Saved(results, dropped_by=recompute)]
    only_with = "" if s.cp == 1 else "core_attn"
    key = key_rows * key_bytes
    value = key_rows * value_bytes
    saves.append(Saved(key, dropped_by=rotated, only_with=only_with))
    saves.append(Saved(value, only_with=only_with))
    if s.cp > 1:
        dsa = _sizes(s.shape)
        index_key = s.tokens * dsa.head_dim * s.itemsize
        # gathered together with the index keys; and the output, which is sliced
        gathered = (key + value + index_key) * s.cp
        saves.append(Saved(gathered + output, dropped_by=recompute))
    return tuple(saves)


def _selected_bytes(s: LayerSizes) -> int:
    """A byte per query, index head and block, where not all are selected.

    Where blocks are gathered, the number of each selected block.
    """
    dsa = _sizes(s.shape)
    length = s.seq_length * s.cp
    num_blocks = ceil(length / dsa.block_size)
    if dsa.topk_blocks >= num_blocks:
        return 0
    rows = s.tokens * _index_heads(s)
    if gathers_blocks(s.shape, length):
        return rows * dsa.topk_blocks * INT32
    return rows * num_blocks
