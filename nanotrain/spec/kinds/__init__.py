"""Kinds of layers, pure: one row per kind, with its parameters and its operators.

    MIXERS   attention and other token mixers, by the names in `ModelShape.mixers`
    MLPS     dense MLPs and mixtures of experts, by the names in `ModelShape.mlps`

Their modules are in the tables of model/transformer.py. docs/layer_kinds.md shows how to add one.
"""

from nanotrain.spec.declaration import LayerKind
from nanotrain.spec.kinds import (
    attention,
    attention_mamba,
    block_sparse,
    compressed,
    delta_net,
    dsa,
    mamba,
    mlp,
    shared_kv,
    short_conv,
)

MIXERS: dict[str, LayerKind] = {
    "attention": LayerKind(
        attention.attention,
        attention.attention_operators,
        has_keys=True,
        clipped_rows=attention.attention_rows,
    ),
    "shared_kv": LayerKind(shared_kv.declare, shared_kv.operators, has_keys=True),
    "mla": LayerKind(
        attention.mla, attention.mla_operators, has_keys=True, clipped_rows=attention.mla_rows
    ),
    "dsa": LayerKind(dsa.declare, dsa.operators, has_keys=True, clipped_rows=attention.mla_rows),
    "shared_dsa": LayerKind(
        dsa.declare_shared, dsa.operators, has_keys=True, clipped_rows=attention.mla_rows
    ),
    "block_sparse": LayerKind(
        block_sparse.declare,
        block_sparse.operators,
        has_keys=True,
        clipped_rows=attention.attention_rows,
    ),
    "sliding": LayerKind(compressed.declare_sliding, compressed.operators, has_keys=True),
    "csa": LayerKind(compressed.declare_csa, compressed.operators, has_keys=True),
    "hca": LayerKind(compressed.declare_hca, compressed.operators, has_keys=True),
    "gated_delta_net": LayerKind(delta_net.gated_delta_net, delta_net.gated_delta_net_operators),
    "kda": LayerKind(delta_net.kda, delta_net.kda_operators),
    "mamba2": LayerKind(mamba.declare, mamba.operators),
    "attention_mamba2": LayerKind(
        attention_mamba.declare,
        attention_mamba.operators,
        has_keys=True,
        clipped_rows=attention.attention_rows,
    ),
    "short_conv": LayerKind(short_conv.declare, short_conv.operators),
}
MLPS: dict[str, LayerKind] = {
    "dense": LayerKind(mlp.dense, mlp.dense_operators),
    "moe": LayerKind(mlp.moe, mlp.moe_operators),
}
