"""The operator of scaled dot-product attention, for every attention backend.

core_attention        attention of the local heads, with what it keeps
key_values_over_cp    keys and values that it sends over cp
"""

from math import lcm

from nanotrain.spec.layer_sizes import FP32, LayerSizes
from nanotrain.spec.operators import Attention, Saved, Sent
from nanotrain.spec.over_cp import all_gather_sent, all_to_all_sent


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
    key_value = shape.head_dim + shape.value_head_dim + _key_width_of_values(s)
    inputs = s.tokens * (query_width + groups * key_value) * s.itemsize
    output = s.tokens * output_width * s.itemsize
    kept_inputs = Saved(inputs, dropped_by=("mla_up_proj",), only_with="core_attn")
    kept_output = Saved(output, only_with="core_attn")
    return kept_inputs, kept_output


def _key_width_of_values(s: LayerSizes) -> int:
    """Key channels that stay in memory with MLA: values are views of kv_up, which has both."""
    return 0 if s.shape.mla is None else s.shape.mla.qk_head_dim


def _kept_core(s: LayerSizes, *, heads: int, groups: int) -> tuple[Saved, ...]:
    """Query, key, value, output and its log-sum-exp; only the backend math keeps a mask."""
    core = ("core_attn",)
    if s.attention_backend == "math" and not s.shape.has_score_options:
        return (Saved(_written_scores(s, heads=heads), dropped_by=core),)
    query = s.tokens * heads * s.shape.head_dim * s.itemsize
    key_value = s.tokens * _key_value_width(s, heads=heads, groups=groups) * s.itemsize
    output = s.tokens * heads * (_output_dim(s) * s.itemsize + FP32)
    # all-to-all keeps copies of all three, and an all-gather those of keys and values
    projected = (*core, "mla_up_proj")
    query_dropped_by = core if s.cp_comm_type == "a2a" else projected
    key_value_dropped_by = projected if _is_local(s) else core
    saves = [
        Saved(query, dropped_by=query_dropped_by),
        Saved(key_value, dropped_by=key_value_dropped_by),
        Saved(output, dropped_by=core),
    ]
    if _is_padded(s) and s.cp_comm_type is None:  # a padded value is a copy
        saves.append(Saved(query, dropped_by=core, only_with="mla_up_proj"))
    return tuple(saves)


def _is_padded(s: LayerSizes) -> bool:
    """Whether values are padded to the width of the keys."""
    is_narrow = s.shape.value_head_dim < s.shape.head_dim
    return s.attention_backend == "sdpa flash" and is_narrow


def _is_local(s: LayerSizes) -> bool:
    """Whether a rank keeps the keys and values of its own tokens, as they were projected."""
    return s.cp_comm_type in (None, "p2p")


def _output_dim(s: LayerSizes) -> int:
    """Channels that are kept of the output of a head."""
    shape = s.shape
    output_dim = shape.head_dim if _is_padded(s) else shape.value_head_dim
    if _is_padded(s) or s.cp_comm_type in ("allgather", "a2a"):
        output_dim += shape.value_head_dim  # sliced, joined or sent for the next layer
    return output_dim


def _key_value_width(s: LayerSizes, *, heads: int, groups: int) -> int:
    """Channels that are kept of the keys and values of a token."""
    shape = s.shape
    is_cpu_flash = s.device == "cpu" and s.attention_backend == "sdpa flash"
    is_repeated = is_cpu_flash or s.attention_backend == "sdpa efficient"
    keeps_groups = is_cpu_flash and s.itemsize == FP32
    if is_repeated and not keeps_groups:
        groups = heads  # key/value heads are repeated in 16 bits
    if _is_padded(s):
        value_dim = shape.head_dim
    elif _is_local(s) and not is_repeated:
        value_dim = shape.value_head_dim + _key_width_of_values(s)
    else:
        value_dim = shape.value_head_dim
    width = groups * (shape.head_dim + value_dim)
    return width * s.cp if s.cp_comm_type == "allgather" else width


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
        # in a ring gradients take one step more, in fp32
        grads = key_values + s.cp * local * max(FP32, s.itemsize)
        return (Sent("p2p", key_values, grads),)
    if s.cp_comm_type == "a2a":
        # key/value heads are repeated until cp divides them
        elements = head * (heads + lcm(groups, s.cp))
        return all_to_all_sent(elements * s.itemsize * (s.cp - 1) // s.cp)
    return ()
