"""Times of attention to selected keys, by the operators that attention/ runs.

indexer_part     index scores, the selection, and the loss of the index
sparse_part      attention with the other keys masked (attention/sparse.py)
compressed_part  attention to a window and to compressed keys (attention/compressed.py)
gathered_part    attention with the selected keys gathered (attention/latent.py)
gathered_blocks_part    attention with the selected blocks gathered (attention/block_gathered.py)

Bytes per score are those that torch's operators read and write, counted from the code; none was
measured on a GPU.
"""

from math import ceil

from nanotrain.planner.kernels import matmul_s, memory_s
from nanotrain.planner.parts import Part
from nanotrain.planner.rank_clock import RankClock
from nanotrain.spec.kinds.compressed import WINDOW_ROWS
from nanotrain.spec.kinds.dsa import BLOCK_SCORES, GATHERED_NUMEL
from nanotrain.spec.operators import (
    Attention,
    CompressedAttention,
    GatheredAttention,
    GatheredBlocks,
    Indexer,
    SparseAttention,
)

FP32 = 4
# of a pair of a query and any key before it
SELECTION_BYTES = 205
# of a pair and an index head
INDEX_BYTES = 16
INDEX_LOSS_BYTES = 30  # in addition, with the loss
# of a pair and a head of attention
TARGET_BYTES = 24  # the probabilities of all keys, for the loss over them
MASKED_FORWARD_BYTES = 65
MASKED_BACKWARD_BYTES = 81
GATHERED_FORWARD_BYTES = 56
GATHERED_BACKWARD_BYTES = 84
# of a pair and a channel of a gathered key: written, and read by the products
GATHERED_READS = 4
GATHERED_BACKWARD_READS = 6
# of a pair and a channel, the gradient of a gathered key in fp32: a product, and the sums
KEY_GRADIENT_BYTES = 20
# kernels per block of queries
SELECTION_LAUNCHES = 50
MASKED_LAUNCHES = (10, 20)
GATHERED_LAUNCHES = (20, 30)


def indexer_part(clock: RankClock, operator: Indexer) -> Part:
    """Index scores, selection and loss, once per forward."""
    flops = 2 * operator.heads * operator.head_dim
    pairs = operator.scored_pairs
    seconds = _pairs_s(
        clock,
        pairs,
        flops=flops,
        num_bytes=SELECTION_BYTES + operator.heads * INDEX_BYTES,
    )
    if operator.has_loss:
        seconds += _loss_s(clock, operator)
    summed_s = 0.0
    if operator.sums_over_tp:
        summed_s = clock.collective("tp", "all_reduce", num_bytes=FP32 * operator.loss_pairs)
    num_blocks = _num_blocks(clock, operator.length)
    return Part(
        operator.name,
        seconds,
        launches=(SELECTION_LAUNCHES * num_blocks, 0, 0),
        group="tp",
        after=summed_s,
        flops=flops * pairs,
    )


def _loss_s(clock: RankClock, operator: Indexer) -> float:
    """Seconds of the loss and its gradients, which are products in the dtype of the index."""
    pairs = operator.loss_pairs
    heads = operator.heads
    width = operator.head_dim
    gradient_flops = 4 * heads * width
    seconds = _pairs_s(clock, pairs, flops=gradient_flops, num_bytes=heads * INDEX_LOSS_BYTES)
    if operator.gathers_loss:
        # the index keys of each query, their scores again, and their gradients
        num_bytes = heads * INDEX_BYTES
        num_bytes += width * GATHERED_READS * clock.sizes.itemsize
        num_bytes += width * KEY_GRADIENT_BYTES
        return seconds + _pairs_s(clock, pairs, flops=2 * heads * width, num_bytes=num_bytes)
    # the probabilities of attention
    target_flops = 2 * operator.attention_heads * operator.attention_head_dim
    target_bytes = operator.attention_heads * TARGET_BYTES
    return seconds + _pairs_s(clock, pairs, flops=target_flops, num_bytes=target_bytes)


def sparse_part(clock: RankClock, operator: SparseAttention) -> Part:
    """Attention with scores of all causal pairs in fp32, and a mask."""
    length = clock.config.data.seq_length
    pairs = clock.sizes.tokens * length / 2
    return _masked_part(clock, operator, pairs=pairs, num_blocks=_num_blocks(clock, length))


def compressed_part(clock: RankClock, operator: CompressedAttention) -> Part:
    """Attention with scores of the window and of all compressed keys before a query."""
    length = operator.chunks[0].length
    window = min(operator.window or length, length)
    # a block of queries reads the window before its first one
    rows = min(WINDOW_ROWS, length)
    all_pairs = operator.batch * length * (window + rows) + operator.compressed_pairs
    num_blocks = length // rows
    pairs = all_pairs / clock.sizes.cp
    return _masked_part(clock, operator, pairs=pairs, num_blocks=num_blocks)


def _masked_part(clock: RankClock, operator: Attention, *, pairs: float, num_blocks: int) -> Part:
    """Scores of pairs in fp32, and a mask.

    Args:
        clock: the rank.
        operator: heads of the attention.
        pairs: pairs of a query and a key.
        num_blocks: blocks that are computed at once.
    """
    heads = operator.heads
    key = operator.head_dim
    value = operator.value_head_dim
    forward_flops = 2 * heads * (key + value)
    backward_flops = 2 * heads * (3 * key + 2 * value)
    forward = _pairs_s(
        clock,
        pairs,
        flops=forward_flops,
        num_bytes=heads * MASKED_FORWARD_BYTES,
        dtype="fp32",
    )
    backward = _pairs_s(
        clock,
        pairs,
        flops=backward_flops,
        num_bytes=heads * MASKED_BACKWARD_BYTES,
        dtype="fp32",
    )
    forward_launches, backward_launches = MASKED_LAUNCHES
    launches = (forward_launches * num_blocks, backward_launches * num_blocks, 0)
    return Part(operator.name, forward, backward, launches=launches, flops=forward_flops * pairs)


def gathered_part(clock: RankClock, operator: GatheredAttention) -> Part:
    """Attention to the selected keys, which are gathered in the forward and in the backward."""
    itemsize = clock.sizes.itemsize
    heads = operator.heads
    width = operator.width
    values = operator.compressed
    pairs = operator.selected_pairs / clock.sizes.cp
    num_keys = min(operator.window or 0, clock.config.data.seq_length)
    num_queries = ceil(pairs / num_keys)
    scores_s = _matmul_s(clock, (heads, num_keys, width), num=num_queries)
    output_s = _matmul_s(clock, (heads, values, num_keys), num=num_queries)
    gathered_bytes = width * itemsize
    forward_bytes = GATHERED_READS * gathered_bytes + heads * GATHERED_FORWARD_BYTES
    backward_bytes = GATHERED_BACKWARD_READS * gathered_bytes + heads * GATHERED_BACKWARD_BYTES
    backward_bytes += width * KEY_GRADIENT_BYTES
    forward = scores_s + output_s + memory_s(clock.gpu, pairs * forward_bytes)
    # scores, the gradients of queries and keys; the weights' gradient, values, and the output
    backward = 3 * scores_s + 3 * output_s + memory_s(clock.gpu, pairs * backward_bytes)
    device = "cpu" if clock.gpu.is_cpu else "cuda"
    num_blocks = ceil(pairs * width / GATHERED_NUMEL[device])
    forward_launches, backward_launches = GATHERED_LAUNCHES
    launches = (forward_launches * num_blocks, backward_launches * num_blocks, 0)
    flops = 2 * heads * (width + values) * pairs
    return Part(operator.name, forward, backward, launches=launches, flops=flops)


def gathered_blocks_part(clock: RankClock, operator: GatheredBlocks) -> Part:
    """Attention to the keys of selected blocks, gathered in the forward and in the backward.

    Without a fused operator the products are in fp32.
    """
    itemsize = clock.sizes.itemsize
    heads = operator.heads / operator.kv_heads  # which share the keys
    key = operator.head_dim
    value = operator.value_head_dim
    keys = operator.gathered_keys / clock.sizes.cp
    gathered_bytes = (key + value) * itemsize
    forward_bytes = GATHERED_READS * gathered_bytes + heads * GATHERED_FORWARD_BYTES
    backward_bytes = GATHERED_BACKWARD_READS * gathered_bytes + heads * GATHERED_BACKWARD_BYTES
    backward_bytes += (key + value) * KEY_GRADIENT_BYTES
    forward_flops = 2 * heads * (key + value)
    backward_flops = 2 * heads * (3 * key + 2 * value)
    forward = _pairs_s(clock, keys, flops=forward_flops, num_bytes=forward_bytes, dtype="fp32")
    backward = _pairs_s(clock, keys, flops=backward_flops, num_bytes=backward_bytes, dtype="fp32")
    device = "cpu" if clock.gpu.is_cpu else "cuda"
    num_parts = ceil(keys * max(key, value) / GATHERED_NUMEL[device])
    forward_launches, backward_launches = GATHERED_LAUNCHES
    launches = (forward_launches * num_parts, backward_launches * num_parts, 0)
    return Part(operator.name, forward, backward, launches=launches, flops=forward_flops * keys)


def _num_blocks(clock: RankClock, length: int) -> int:
    """Blocks of queries whose scores are computed at once."""
    shape = clock.sizes.shape
    assert shape.dsa is not None, "sparse attention has its sizes"
    heads = max(shape.num_heads // clock.sizes.tp, shape.dsa.n_heads)
    return max(1, clock.sizes.tokens * length * heads // BLOCK_SCORES)


def _matmul_s(clock: RankClock, shape: tuple[int, int, int], *, num: int) -> float:
    """Seconds of products of each query with its keys."""
    return matmul_s(clock.gpu, shape, dtype=clock.dtype, num=num)


def _pairs_s(
    clock: RankClock, pairs: float, *, flops: float, num_bytes: float, dtype: str = ""
) -> float:
    """Seconds of torch's operators, by FLOPs and bytes per pair of tokens."""
    if not pairs:
        return 0.0
    dtype = dtype or clock.dtype
    flops_per_s = clock.gpu.peak(dtype) * clock.gpu.reachable[dtype]
    return pairs * flops / flops_per_s + memory_s(clock.gpu, pairs * num_bytes)
