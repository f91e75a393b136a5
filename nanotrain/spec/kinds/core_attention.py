"""The operator of scaled dot-product attention, for every attention backend.

core_attention        attention of the local heads, with what it keeps
query_key_modules     recompute modules that normalize and rotate queries and keys again
key_values_over_cp    keys and values that it sends over cp
"""

from math import lcm
from typing import NamedTuple

from nanotrain.spec.layer_sizes import FP32, LayerSizes
from nanotrain.spec.operators import POINTWISE, Attention, Saved, Sent
from nanotrain.spec.over_cp import all_gather_sent, all_to_all_sent
from nanotrain.spec.shape import ModelShape
from nanotrain.spec.shared_state import shared_bytes


def core_attention(s: LayerSizes, *, heads: int, groups: int) -> Attention:
    """Scaled dot-product attention of the local heads.

    Args:
        s: sizes of the layer.
        heads: query heads of the tp rank.
        groups: key/value heads of the tp rank.
    """
    shape = s.shape
    chunks = shape.attention_chunks(s.layer, seq_length=s.seq_length * s.cp)
    window = shape.window_size if shape.has_window(s.layer) else None
    recomputed = _recomputed_core(s, heads=heads, groups=groups)
    kept = _kept_core(s, heads=heads, groups=groups)
    for_later_layers = shared_bytes(s, shape.kept(s.layer))
    if for_later_layers:
        is_saved = _saves_shared(s, heads=heads, groups=groups)
        kept += (Saved(for_later_layers, only_with="" if is_saved else "core_attn"),)
    return Attention(
        name="core_attn",
        module="core_attn",
        batch=s.batch_size,
        heads=heads,
        kv_heads=groups,
        head_dim=shape.head_dim,
        value_head_dim=shape.value_head_dim,
        chunks=chunks,
        window=window,
        saves=recomputed + kept,
        over_cp=key_values_over_cp(s, heads=heads, groups=groups),
    )


def _recomputed_core(s: LayerSizes, *, heads: int, groups: int) -> tuple[Saved, ...]:
    """Inputs of a core attention that is recomputed, and its output for the layer that follows."""
    shape = s.shape
    query_width = heads * shape.head_dim
    output_width = heads * shape.value_head_dim
    if is_shared(s):  # keys and values are in memory in any case
        groups = 0
    query_key = s.tokens * (query_width + groups * shape.head_dim) * s.itemsize
    value_width = shape.value_head_dim + _key_width_of_values(s)
    value = s.tokens * groups * value_width * s.itemsize
    output = s.tokens * output_width * s.itemsize
    dropped_by = ("mla_up_proj", *query_key_modules(shape))
    kept_query_key = Saved(query_key, dropped_by=dropped_by, only_with="core_attn")
    kept_value = Saved(value, dropped_by=("mla_up_proj",), only_with="core_attn")
    kept_output = Saved(output, only_with="core_attn")
    return kept_query_key, kept_value, kept_output


def is_shared(s: LayerSizes) -> bool:
    """Whether the layer shares its keys and values with a later layer, or with an earlier one.

    They count once: where they are computed, or received from another stage.
    """
    reads = s.shape.key_value_source(s.layer) is not None
    return reads or bool(s.shape.kept(s.layer))


def _saves_shared(s: LayerSizes, *, heads: int, groups: int) -> bool:
    """Whether attention saves shared keys and values themselves, and no copies."""
    is_copied = _key_value_widths(s, heads=heads, groups=groups).is_repeated
    is_written = s.attention_backend == "math" and not s.shape.has_score_options
    return is_shared(s) and _is_local(s) and not is_copied and not is_written


def query_key_modules(shape: ModelShape) -> tuple[str, ...]:
    """Recompute modules that normalize and rotate queries and keys again.

    Without norms the rotated tensors take as much memory as their inputs; a norm over all heads
    communicates.
    """
    has_norms = shape.has_qk_norm or shape.qk_l2_norm
    is_local = shape.mla is None and not shape.has_wide_qk_norm
    return (POINTWISE,) if has_norms and is_local else ()


def _key_width_of_values(s: LayerSizes) -> int:
    """Key channels that stay in memory with MLA: values are views of kv_up, which has both."""
    return 0 if s.shape.mla is None else s.shape.mla.qk_head_dim


def _kept_core(s: LayerSizes, *, heads: int, groups: int) -> tuple[Saved, ...]:
    """Query, key, value, output and its log-sum-exp; only the backend math keeps a mask."""
    core = ("core_attn",)
    if s.attention_backend == "math" and not s.shape.has_score_options:
        return (Saved(_written_scores(s, heads=heads), dropped_by=core),)
    query = s.tokens * heads * s.shape.head_dim * s.itemsize
    widths = _key_value_widths(s, heads=heads, groups=groups)
    key = s.tokens * widths.key * s.itemsize
    value = s.tokens * widths.value * s.itemsize
    output = s.tokens * heads * (_output_dim(s) * s.itemsize + FP32)
    # all-to-all keeps copies of all three, and an all-gather copies of keys and values
    projected = (*core, "mla_up_proj")
    rotated = query_key_modules(s.shape)
    query_dropped_by = core if s.all_to_all_ranks > 1 else (*projected, *rotated)
    value_dropped_by = projected if _is_local(s) else core
    key_dropped_by: tuple[str, ...] = value_dropped_by
    if _is_local(s) and not widths.is_repeated:
        key_dropped_by += rotated
    saves = [Saved(query, dropped_by=query_dropped_by), Saved(output, dropped_by=core)]
    is_shared_tensor = _saves_shared(s, heads=heads, groups=groups)
    if not is_shared_tensor:
        saves.append(Saved(key, dropped_by=key_dropped_by))
    if not is_shared_tensor or _is_padded(s):
        saves.append(Saved(value, dropped_by=value_dropped_by))
    if _is_padded(s) and s.cp_comm_type is None:  # a padded value is a copy
        saves.append(Saved(query, dropped_by=core, only_with="mla_up_proj"))
    return tuple(saves)


def _is_padded(s: LayerSizes) -> bool:
    """Whether values are padded to the width of the keys."""
    is_narrow = s.shape.value_head_dim < s.shape.head_dim
    return s.attention_backend == "sdpa flash" and is_narrow


def _is_local(s: LayerSizes) -> bool:
    """Whether a rank keeps the keys and values of its own tokens, as they were projected."""
    return s.cp_comm_type in (None, "p2p", "a2a+p2p") and s.all_to_all_ranks == 1


def _output_dim(s: LayerSizes) -> int:
    """Channels that are kept of the output of a head."""
    shape = s.shape
    output_dim = shape.head_dim if _is_padded(s) else shape.value_head_dim
    is_sliced = _is_padded(s) and not shape.has_output_gate  # a gate reads the slice itself
    if is_sliced or s.cp_comm_type in ("allgather", "a2a", "a2a+p2p"):
        output_dim += shape.value_head_dim  # sliced, joined or sent for the next layer
    return output_dim


class _KeyValueWidths(NamedTuple):
    """Channels that are kept of the keys and values of a token."""

    key: int
    value: int
    is_repeated: bool  # keys and values are copies, one per query head


def _key_value_widths(s: LayerSizes, *, heads: int, groups: int) -> _KeyValueWidths:
    """Channels of keys and values, of all cp ranks where they are gathered."""
    shape = s.shape
    is_cpu_flash = s.device == "cpu" and s.attention_backend == "sdpa flash"
    is_repeated = is_cpu_flash or s.attention_backend == "sdpa efficient"
    keeps_groups = is_cpu_flash and s.itemsize == FP32
    copies_groups = is_repeated and not keeps_groups and groups < heads
    if copies_groups:
        groups = heads  # key/value heads are repeated in 16 bits
    if _is_padded(s):
        value_dim = shape.head_dim
    elif _is_local(s) and not is_repeated:
        value_dim = shape.value_head_dim + _key_width_of_values(s)
    else:
        value_dim = shape.value_head_dim
    if s.cp_comm_type == "allgather":
        groups *= s.cp
    return _KeyValueWidths(groups * shape.head_dim, groups * value_dim, copies_groups)


def _written_scores(s: LayerSizes, *, heads: int) -> int:
    """The backend math: inputs and the weights of all pairs in fp32, and the output."""
    shape = s.shape
    num_keys = s.seq_length * s.cp
    copies = 1.0
    if s.cp_comm_type == "allgather":  # two chunks of queries attend to 2 cp + 1 chunks of keys
        num_keys = num_keys * (2 * s.cp + 1) // (4 * s.cp)
        copies = s.cp + 0.5
    inputs = shape.head_dim + copies * (shape.head_dim + shape.value_head_dim)
    per_head = (inputs + num_keys) * FP32 + shape.value_head_dim * s.itemsize
    return s.tokens * heads * int(per_head)


def key_values_over_cp(s: LayerSizes, *, heads: int, groups: int) -> tuple[Sent, ...]:
    """Keys and values, or with Ulysses heads, and their gradients."""
    head = s.tokens * (s.shape.head_dim + s.shape.value_head_dim)  # elements of keys and values
    local = head * groups
    key_values = (s.cp - 1) * local * s.itemsize
    if s.cp_comm_type == "allgather":
        return all_gather_sent(key_values)
    if s.cp_comm_type == "p2p":
        return _ring_sent(s, local, size=s.cp)
    inside = s.all_to_all_ranks
    if inside == 1 and s.cp_comm_type != "a2a+p2p":
        return ()
    # key/value heads are repeated until the ranks divide them
    repeated = lcm(groups, inside)
    elements = head * (heads + repeated)
    heads_sent = all_to_all_sent(elements * s.itemsize * (inside - 1) // inside)
    return heads_sent + _ring_sent(s, head * repeated, size=s.cp // inside)


def _ring_sent(s: LayerSizes, elements: int, *, size: int) -> tuple[Sent, ...]:
    """Keys and values around a ring, and their gradients.

    Args:
        s: sizes of the layer.
        elements: elements of the keys and values of a rank.
        size: ranks of the ring.
    """
    if size == 1:
        return ()
    key_values = (size - 1) * elements * s.itemsize
    # gradients take one step more, in fp32
    grads = key_values + size * elements * max(FP32, s.itemsize)
    return (Sent("p2p", key_values, grads),)
