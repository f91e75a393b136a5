"""DeepSeek Sparse Attention: parameters and operators; the module is model/dsa.py."""

from dataclasses import replace

from nanotrain.config.layer_kinds import DSAConfig
from nanotrain.spec.declaration import Declaration, Specs, grouped, nest, summed
from nanotrain.spec.kinds.attention import compressed_projections, down_projection, mla
from nanotrain.spec.layer_sizes import FP32, INT32, LayerSizes
from nanotrain.spec.operators import (
    GatheredAttention,
    Indexer,
    Norm,
    Operator,
    Operators,
    Product,
    Saved,
    Sent,
    SparseAttention,
)
from nanotrain.spec.over_cp import all_gather_sent
from nanotrain.spec.params import ParamSpec
from nanotrain.spec.shape import Chunks, ModelShape
from nanotrain.spec.shared_state import shared_bytes

KEY_VALUE_UP = "kv_up.weight"
BLOCK_SCORES = 2**26  # scores of all heads that are computed at once: 256 MiB in fp32
COMPRESSED_NUMEL = 2**24  # elements of queries in compressed channels at once: 64 MiB in fp32
# elements of gathered keys at once: measured on one core, more of them take twice the time
GATHERED_NUMEL = {"cpu": 2**22, "cuda": 2**26}


def gathers_keys(shape: ModelShape, length: int) -> bool:
    """Whether attention gathers the selected keys of every query; else it masks the other keys.

    The form with fewer FLOPs: gathered keys are compressed, and wider than the keys of a head.

    Args:
        shape: shape of the model.
        length: tokens of a sequence on all cp ranks.
    """
    topk = min(_sizes(shape).topk, length)
    assert shape.mla is not None, "a rule demands it"
    head_width = shape.head_dim + shape.value_head_dim
    compressed_width = shape.mla.kv_lora_rank + _compressed_width(shape)
    doubled_pairs = topk * (2 * length - topk)
    return doubled_pairs * compressed_width < length**2 * head_width


def declare(declare: Declaration) -> Specs:
    """Multi-latent attention without fp8 of kv_up, and an indexer that every tp rank has."""
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
    return declare_shared(declare) + nest("indexer", indexer)


def declare_shared(declare: Declaration) -> Specs:
    """A layer that attends to the selection of an earlier one, without an indexer."""
    latent: list[ParamSpec] = []
    for spec in mla(declare):
        # attention multiplies with it in the dtype of the activations
        is_up = spec.name == KEY_VALUE_UP
        latent.append(replace(spec, in_fp8=False) if is_up else spec)
    return tuple(latent)


def _sizes(shape: ModelShape) -> DSAConfig:
    assert shape.dsa is not None, "sparse_attention_type is dsa"
    return shape.dsa


def _index_width(s: LayerSizes) -> int:
    """Channels of an index key; none where an earlier layer selects."""
    if s.shape.selection_source(s.layer) is not None:
        return 0
    return _sizes(s.shape).head_dim


def _kept_positions(s: LayerSizes) -> tuple[Saved, ...]:
    """A selection that layers share: an input of core attention and of MLPs that are recomputed."""
    reads = s.shape.selection_source(s.layer) is not None
    kept = shared_bytes(s, s.shape.kept(s.layer))
    if not reads and not kept:
        return ()
    positions = Saved(s.tokens * _sizes(s.shape).topk * INT32, only_with="core_attn")
    # what the context of the microbatch has for later layers lives as long as the context
    module = "moe" if s.shape.has_experts(s.layer) else "mlp"
    return positions, Saved(kept, only_with=module)


def _compressed_width(shape: ModelShape) -> int:
    """Channels of a compressed key and value."""
    assert shape.mla is not None, "a rule demands it"
    return shape.mla.kv_lora_rank + shape.mla.qk_pos_emb_head_dim


def _query_rank(shape: ModelShape) -> int:
    assert shape.mla is not None and shape.mla.q_lora_rank is not None, (
        "a rule demands compressed queries"
    )
    return shape.mla.q_lora_rank


def operators(s: LayerSizes) -> Operators:
    """The operators of MLA with an indexer, and attention to the keys that it selects."""
    heads = s.shape.num_heads // s.tp
    projections = compressed_projections(s)
    attention: Operator = _attention(s, heads=heads)
    if gathers_keys(s.shape, s.seq_length * s.cp):
        projections = _without_key_value_up(projections)
        projections.append(_absorbed_products(s, heads=heads))
        attention = _gathered_attention(s, heads=heads)
    indexer: Operators = []
    if s.shape.selection_source(s.layer) is None:
        indexer = _indexer(s, heads=heads)
    output = s.row(heads * s.shape.value_head_dim)
    return [*projections, *indexer, attention, output]


def _without_key_value_up(operators: Operators) -> Operators:
    """The projections of a layer that keeps keys and values compressed."""
    kept = []
    for operator in operators:
        is_up = isinstance(operator, Product) and operator.weights == (KEY_VALUE_UP,)
        if not is_up:
            kept.append(operator)
    return kept


def _absorbed_products(s: LayerSizes, *, heads: int) -> Product:
    """The up-projections of keys and values, of queries and outputs inside of the attention."""
    shape = s.shape
    assert shape.mla is not None, "a rule demands it"
    head_width = shape.mla.qk_head_dim + shape.value_head_dim
    return Product(
        name="kv_up",
        module="core_attn",
        weights=(KEY_VALUE_UP,),
        rows=s.tokens,
        outputs=heads * head_width,
        inputs=shape.mla.kv_lora_rank,
        shard="column",
    )


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
    row_bytes = dsa.head_dim * s.itemsize + s.layer_norm_statistics
    norm_inputs = Saved(s.outside * row_bytes)
    numel = s.outside * dsa.head_dim
    norm = Norm(name="indexer", numel=numel, saves=(norm_inputs,))
    scores = _index_scores(s, heads=heads)
    return [query, key, head_weight, norm, scores]


def _index_scores(s: LayerSizes, *, heads: int) -> Indexer:
    """Scores of queries and keys; the loss computes the gradients of the index in the forward."""
    dsa = _sizes(s.shape)
    width = dsa.n_heads * dsa.head_dim + dsa.n_heads + dsa.head_dim
    token_bytes = width * s.itemsize
    grads = Saved(s.tokens * token_bytes)
    key_bytes = dsa.head_dim * s.itemsize
    other_tokens = s.tokens * (s.cp - 1)
    gathered_keys = Saved(other_tokens * key_bytes, dropped_by=("core_attn",))
    gathers = gathers_keys(s.shape, s.seq_length * s.cp)
    saves: tuple[Saved, ...] = (grads,)
    attention_head_dim = s.shape.head_dim
    if gathers:
        attention_head_dim = _compressed_width(s.shape)
    else:
        saves = (grads, gathered_keys)
    return Indexer(
        name="indexer",
        module="core_attn",
        heads=dsa.n_heads,
        head_dim=dsa.head_dim,
        num_positions=s.tokens,
        length=s.seq_length * s.cp,
        topk=dsa.topk,
        gathers=gathers,
        attention_heads=heads,
        attention_head_dim=attention_head_dim,
        has_loss=dsa.loss_coeff > 0,
        has_sparse_loss=dsa.use_sparse_loss,
        saves=saves,
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
        saves=_saved_by_masked(s, heads=heads) + _kept_positions(s),
        working=_backward_temporaries(s, heads=heads),
        over_cp=_over_cp(s, heads=heads),
    )


def _gathered_attention(s: LayerSizes, *, heads: int) -> GatheredAttention:
    """Attention that gathers the compressed keys and values of the selected keys."""
    shape = s.shape
    dsa = _sizes(shape)
    assert shape.mla is not None, "a rule demands it"
    length = s.seq_length * s.cp
    width = _compressed_width(shape)
    token_bytes = (width + _index_width(s)) * s.itemsize
    other_ranks = s.cp - 1
    sent = other_ranks * s.tokens * token_bytes
    whole = Chunks(1, length)
    return GatheredAttention(
        name="core_attn",
        module="core_attn",
        batch=s.batch_size,
        heads=heads,
        kv_heads=1,
        head_dim=shape.head_dim,
        value_head_dim=shape.value_head_dim,
        chunks=(whole,),
        window=dsa.topk,
        compressed=shape.mla.kv_lora_rank,
        width=width,
        saves=_saved_by_gathered(s, heads=heads, width=width) + _kept_positions(s),
        working=_gathered_working(s, heads=heads, width=width),
        over_cp=all_gather_sent(sent),
    )


def _saved_by_gathered(s: LayerSizes, *, heads: int, width: int) -> tuple[Saved, ...]:
    """Query, output and its log-sum-exp, compressed keys, and the positions of selected keys.

    Args:
        s: sizes of the layer.
        heads: heads of the tp rank.
        width: channels of a compressed key and value.
    """
    shape = s.shape
    dsa = _sizes(shape)
    assert shape.mla is not None, "a rule demands it"
    core = ("core_attn",)
    rows = s.tokens * heads
    query_bytes = rows * shape.head_dim * s.itemsize
    query = Saved(query_bytes, dropped_by=("mla_up_proj",))
    output_bytes = rows * shape.value_head_dim * s.itemsize
    output = Saved(output_bytes)
    length = s.seq_length * s.cp
    topk = min(dsa.topk, length)
    positions = s.tokens * topk * INT32
    statistics = rows * FP32
    results = Saved(statistics + positions, dropped_by=core)
    local_key = s.tokens * width * s.itemsize
    # what the key is computed from again
    normalized = s.outside * shape.mla.kv_lora_rank * s.itemsize
    key_input = Saved(normalized, only_with="mla_up_proj")
    if s.cp == 1:
        key = Saved(local_key, dropped_by=("mla_up_proj",))
        return query, output, results, key_input, key
    # gathered together with the index keys
    token_bytes = (width + _index_width(s)) * s.itemsize
    all_tokens = s.cp * s.tokens
    gathered = Saved(all_tokens * token_bytes, dropped_by=core)
    kept_input = Saved(local_key, dropped_by=("mla_up_proj",), only_with="core_attn")
    return query, output, results, key_input, kept_input, gathered


def _gathered_working(s: LayerSizes, *, heads: int, width: int) -> int:
    """Temporaries of the backward: queries and outputs in compressed channels, gathered keys.

    Args:
        s: sizes of the layer.
        heads: heads of the tp rank.
        width: channels of a compressed key and value.
    """
    shape = s.shape
    assert shape.mla is not None, "a rule demands it"
    length = s.seq_length * s.cp
    num_keys = min(_sizes(shape).topk, length)
    head_width = shape.mla.qk_head_dim + shape.value_head_dim
    up = heads * head_width * shape.mla.kv_lora_rank
    key_grads = s.batch_size * length * width
    query_grads = s.tokens * heads * shape.head_dim
    # of queries in compressed channels
    all_queries = s.tokens * heads * width
    block = min(COMPRESSED_NUMEL, all_queries)
    outputs = block * shape.value_head_dim // width
    all_keys = s.tokens * num_keys * width
    gathered = min(GATHERED_NUMEL[s.device], all_keys)
    scores = gathered * heads // width
    wide = 2 * gathered + 3 * scores + 3 * outputs + key_grads + up
    narrow = gathered + scores + 4 * block + query_grads
    return FP32 * wide + s.itemsize * narrow


def _saved_by_masked(s: LayerSizes, *, heads: int) -> tuple[Saved, ...]:
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
    selected = 0
    if num_keys > _sizes(shape).topk:
        selected = s.tokens * (num_keys // 8)
    up_projection = ("mla_up_proj",)
    saves = [Saved(query, dropped_by=up_projection), Saved(output)]
    saves.append(Saved(local_keys, dropped_by=up_projection, only_with="core_attn"))
    saves.append(Saved(local_keys * s.cp, dropped_by=dropped_with_keys))
    saves.append(Saved(statistics + selected, dropped_by=core))
    if s.cp > 1:
        saves.append(Saved(output, dropped_by=core))  # sliced
    return tuple(saves)


def _over_cp(s: LayerSizes, *, heads: int) -> tuple[Sent, ...]:
    """Keys, values and index keys to every other rank, and their gradients."""
    shape = s.shape
    key_value_width = heads * (shape.head_dim + shape.value_head_dim)
    width = key_value_width + _index_width(s)
    other_ranks = s.cp - 1
    sent = other_ranks * s.tokens * width * s.itemsize
    return all_gather_sent(sent)


def _num_block_scores(s: LayerSizes, *, heads: int) -> int:
    """Scores of one block of queries, of the index or of attention."""
    num_keys = s.cp * s.tokens // s.batch_size
    num_heads = max(heads, _sizes(s.shape).n_heads)
    return min(BLOCK_SCORES, num_heads * s.tokens * num_keys)


def _gathered_keys(s: LayerSizes, *, heads: int) -> int:
    """Elements of the keys, or of the values, of all cp ranks."""
    widest = max(s.shape.head_dim, s.shape.value_head_dim)
    all_tokens = s.cp * s.tokens
    return all_tokens * heads * widest


def _forward_temporaries(s: LayerSizes, *, heads: int) -> int:
    """Products of a block of queries and gradients of the index in fp32, in the forward.

    With temporaries of the backward within 10 % of what torch allocates for 5 sets of sizes.
    """
    dsa = _sizes(s.shape)
    scores = _num_block_scores(s, heads=heads)
    gathers = gathers_keys(s.shape, s.seq_length * s.cp)
    has_gathered_loss = gathers and dsa.use_sparse_loss
    if not has_gathered_loss:
        # the gradient of the products, and where it is zero
        scores = 5 * scores // 2
    sums = s.tokens * dsa.n_heads * dsa.head_dim
    last = (2 * FP32 + s.itemsize) * sums  # times the scale, and in the dtype of the index
    return max(FP32 * (scores + sums), last)


def _backward_temporaries(s: LayerSizes, *, heads: int) -> int:
    """Scores of a block in fp32, and keys, values and sums of their gradients."""
    num_heads = max(heads, _sizes(s.shape).n_heads)
    block = _num_block_scores(s, heads=heads)
    scores = 4 * block * heads // num_heads
    keys_and_values = 9 * _gathered_keys(s, heads=heads)
    return FP32 * (scores + keys_and_values)
