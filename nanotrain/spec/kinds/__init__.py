"""The kinds of layers, pure: one row per kind. Their modules are the tables of
model/transformer.py.

    MIXERS   attention and what may be in its place, by the names in `ModelShape.mixers`
    MLPS     by the names in `ModelShape.mlps`

docs/layer_kinds.md describes how to add one.
"""

from functools import partial

from nanotrain.spec.declaration import LayerKind
from nanotrain.spec.kinds import attention, attention_mamba, delta_net, dsa, mamba, mlp, short_conv

_softmax = partial(
    LayerKind, has_keys=True, sequence_flops=attention.pair_flops, cp_bytes=attention.cp_bytes
)
_delta_rule = partial(
    LayerKind,
    saved_bytes=delta_net.saved_bytes,
    sequence_flops=delta_net.sequence_flops,
    working_bytes=delta_net.working_bytes,
    cp_bytes=delta_net.cp_bytes,
)
MIXERS: dict[str, LayerKind] = {
    "attention": _softmax(
        attention.attention,
        saved_bytes=attention.attention_bytes,
        clipped_rows=attention.attention_rows,
    ),
    "mla": _softmax(
        attention.mla, saved_bytes=attention.mla_bytes, clipped_rows=attention.mla_rows
    ),
    "dsa": LayerKind(
        dsa.declare,
        dsa.saved_bytes,
        dsa.sequence_flops,
        dsa.working_bytes,
        has_keys=True,
        clipped_rows=attention.mla_rows,
        cp_bytes=dsa.cp_bytes,
    ),
    "gated_delta_net": _delta_rule(delta_net.gated_delta_net),
    "kda": _delta_rule(delta_net.kda),
    "mamba2": LayerKind(
        mamba.declare,
        mamba.saved_bytes,
        mamba.sequence_flops,
        mamba.working_bytes,
        cp_bytes=mamba.cp_bytes,
    ),
    "attention_mamba2": LayerKind(
        attention_mamba.declare,
        attention_mamba.saved_bytes,
        attention_mamba.sequence_flops,
        mamba.working_bytes,
        parts=("attention", "mamba2"),
        has_keys=True,
        clipped_rows=attention.attention_rows,
    ),
    "short_conv": LayerKind(
        short_conv.declare, short_conv.saved_bytes, cp_bytes=short_conv.cp_bytes
    ),
}
MLPS: dict[str, LayerKind] = {
    "dense": LayerKind(
        lambda declare: mlp.mlp(declare, declare.shape.ffn_size),
        lambda rank, _, *, modules: rank.dense(modules),
    ),
    "moe": LayerKind(mlp.moe, lambda rank, _, *, modules: rank.experts(modules)),
}
