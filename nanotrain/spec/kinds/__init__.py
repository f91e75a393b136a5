"""The kinds of layers, pure: one row per kind. Their modules are the tables of model/transformer.py.

    MIXERS   attention and what may be in its place, by the names in `ModelShape.mixers`
    MLPS     by the names in `ModelShape.mlps`

docs/layer_kinds.md describes how to add one.
"""

from nanotrain.spec.declaration import LayerKind
from nanotrain.spec.kinds import attention, attention_mamba, delta_net, dsa, mamba, mlp, short_conv

MIXERS: dict[str, LayerKind] = {
    "attention": LayerKind(
        attention.attention,
        attention.attention_bytes,
        attention.pair_flops,
        has_keys=True,
        clipped_rows=attention.attention_rows,
        cp_bytes=attention.cp_bytes,
    ),
    "mla": LayerKind(
        attention.mla,
        attention.mla_bytes,
        attention.pair_flops,
        has_keys=True,
        clipped_rows=attention.mla_rows,
        cp_bytes=attention.cp_bytes,
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
    **{
        name: LayerKind(
            declare,
            delta_net.saved_bytes,
            delta_net.sequence_flops,
            delta_net.working_bytes,
            cp_bytes=delta_net.cp_bytes,
        )
        for name, declare in (("gated_delta_net", delta_net.gated_delta_net), ("kda", delta_net.kda))
    },
    "mamba2": LayerKind(
        mamba.declare, mamba.saved_bytes, mamba.sequence_flops, mamba.working_bytes, cp_bytes=mamba.cp_bytes
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
    "short_conv": LayerKind(short_conv.declare, short_conv.saved_bytes, cp_bytes=short_conv.cp_bytes),
}
MLPS: dict[str, LayerKind] = {
    "dense": LayerKind(
        lambda declare: mlp.mlp(declare, declare.shape.ffn_size), lambda rank, _, *, modules: rank.dense(modules)
    ),
    "moe": LayerKind(mlp.moe, lambda rank, _, *, modules: rank.experts(modules)),
}
