"""DeepSeek Sparse Attention, the pure half of model/dsa.py."""

from collections.abc import Collection
from dataclasses import replace

from nanotrain.config.layer_kinds import DSAConfig
from nanotrain.spec.declaration import (
    FP32,
    ContextRank,
    Declaration,
    RankSizes,
    Specs,
    grouped,
    nest,
    summed,
)
from nanotrain.spec.kinds.attention import mla, pair_flops
from nanotrain.spec.shape import ModelShape

BLOCK_SCORES = 2**26  # scores of all heads that are computed at once: 256 MiB in fp32


def declare(declare: Declaration) -> Specs:
    """Multi-latent attention, and an indexer that every tp rank has."""
    shape, dsa = declare.shape, _sizes(declare.shape)
    assert shape.mla is not None and shape.mla.q_lora_rank is not None, (
        "a rule demands compressed queries"
    )
    norm = declare.vector("weight", dsa.head_dim, value=1.0), declare.vector("bias", dsa.head_dim)
    indexer = (
        *nest(
            "query", declare.replicated_linear(dsa.n_heads * dsa.head_dim, shape.mla.q_lora_rank)
        ),
        *nest("key", declare.replicated_linear(dsa.head_dim, shape.hidden_size)),
        *nest("key_norm", grouped("norms", summed(norm, declare.sequence_axes))),
        *nest(
            "head_weight",
            summed([declare.weight(dsa.n_heads, shape.hidden_size)], declare.sequence_axes),
        ),
    )
    return mla(declare) + nest("indexer", indexer)


def _sizes(shape: ModelShape) -> DSAConfig:
    assert shape.dsa is not None, "sparse_attention_type is dsa"
    return shape.dsa


def sequence_flops(shape: ModelShape, layer: int, *, seq_length: int) -> int:
    """Attention to the selected keys, and index scores of all pairs; scores that are masked are not
    counted.
    """
    dsa = _sizes(shape)
    chosen = replace(shape, window_size=dsa.topk, window_layers=(True,) * shape.num_layers)
    of_index = 3 * dsa.n_heads * dsa.head_dim * seq_length**2
    return pair_flops(chosen, layer, seq_length=seq_length) + of_index


def cp_bytes(shape: ModelShape, rank: ContextRank) -> dict[str, tuple[int, int]]:
    """Keys, values and index keys to every other rank, and their gradients."""
    width = (
        shape.num_heads // rank.tp * (shape.head_dim + shape.value_head_dim)
        + _sizes(shape).head_dim
    )
    num_bytes = (rank.size - 1) * rank.num_positions * width * rank.itemsize
    return {"all_gather": (num_bytes, 0), "reduce_scatter": (0, num_bytes)}


def saved_bytes(rank: RankSizes, layer: int, *, modules: Collection[str]) -> int:
    """What MLA keeps with attention in tiles, the gradients of the index, and a bit per query and
    key.
    """
    shape, sizes, dsa, heads = (
        rank.shape,
        rank.shape.mla,
        _sizes(rank.shape),
        rank.shape.num_heads // rank.tp,
    )
    assert sizes is not None, "a rule demands it"
    compressed = 2 * (sizes.q_lora_rank or 0) + 2 * sizes.kv_lora_rank + sizes.qk_pos_emb_head_dim
    kept = rank.outside * ((compressed + dsa.head_dim) * rank.itemsize + 2 * FP32)
    of_index = dsa.n_heads * dsa.head_dim + dsa.n_heads
    key_value = heads * (shape.head_dim + shape.value_head_dim)
    query, output = heads * shape.head_dim, heads * shape.value_head_dim
    if rank.cp == 1:
        key_value += heads * sizes.qk_head_dim  # values are views of what kv_up returns
    if "mla_up_proj" in modules:
        query = 0
        # the gathered ones are no outputs of up-projections
        key_value *= rank.cp > 1 and "core_attn" not in modules
    key_value *= 1 if "core_attn" in modules else rank.cp
    per_token = query + key_value + output + of_index + dsa.head_dim
    if "core_attn" in modules:
        return kept + rank.tokens * per_token * rank.itemsize
    num_keys = rank.cp * rank.tokens // rank.batch_size
    per_token += output * (rank.cp > 1) + dsa.head_dim * (rank.cp - 1)
    return kept + rank.tokens * (per_token * rank.itemsize + heads * FP32 + num_keys // 8)


def working_bytes(rank: RankSizes) -> int:
    """Temporaries in fp32: in the backward scores of a block, and keys, values and sums of their
    gradients; or in the forward products and gradients of the index.

    Within 8 % of what torch allocates for 6 sets of sizes.
    """
    shape, dsa, heads = rank.shape, _sizes(rank.shape), rank.shape.num_heads // rank.tp
    num_heads, num_keys = max(heads, dsa.n_heads), rank.cp * rank.tokens // rank.batch_size
    block = min(BLOCK_SCORES, num_heads * rank.tokens * num_keys)
    keys = rank.cp * rank.tokens * heads * max(shape.head_dim, shape.value_head_dim)
    backward = 4 * block * heads // num_heads + 10 * keys
    return FP32 * max(
        backward, 5 * block // 2 + keys + 2 * rank.tokens * dsa.n_heads * dsa.head_dim
    )
