"""Fields of the model section without effect, and of the layout of experts.

A rule is an `if` and the fields that it switches off. A field that one function resets, as
`attn_scale`, decides in a later function only.
"""

from nanotrain.config.layer_kinds import STREAMS, MambaConfig, linear_attention_kind
from nanotrain.config.model import GATED
from nanotrain.config.rules.settings import Settings, UnusedFields, unused

MLA_ROTATES = "every layer of multi_latent_attention rotates its qk_pos_emb_head_dim channels"
MLA_HEADS = "with multi_latent_attention qk_head_dim and v_head_dim give the width of the heads"
NO_WINDOW = "no layer has a window"
WINDOW_CAUSES = ("window_size", "attention_chunk_size")
IN_ROPE = "it belongs to position_embedding_type rope, yarn or longrope"


def unused_positions(c: Settings) -> UnusedFields:
    """Layers with and without rotary positions."""
    if not c.model.has_rope:
        yield unused(
            "rotary_base",
            "rotary_percent",
            "rotary_proportional",
            by="position_embedding_type",
            why=IN_ROPE,
        )
        yield unused(
            "no_rope_freq",
            "qk_l2_norm",
            by="position_embedding_type",
            why="no layer has rotary positions",
            fix="set --position-embedding-type rope, yarn or longrope",
        )
    if c.model.position_embedding_type == "longrope":
        yield unused(
            "rotary_proportional",
            by="position_embedding_type",
            why="longrope rotates every pair by a factor of its own",
        )
    if c.model.position_embedding_type != "learned_absolute":
        yield unused(
            "learned_position_offset",
            by="position_embedding_type",
            why="it belongs to position_embedding_type learned_absolute",
        )
    if c.model.multi_latent_attention:
        yield unused("no_rope_freq", by="multi_latent_attention", why=MLA_ROTATES)


def unused_query_scale(c: Settings) -> UnusedFields:
    """Queries that are scaled in layers without rotary positions."""
    if not c.model.has_rope:
        yield unused(
            "attn_scale",
            by="position_embedding_type",
            why="it belongs to layers without rotary positions of a model that has them",
        )
    if c.model.multi_latent_attention:
        yield unused("attn_scale", by="multi_latent_attention", why=MLA_ROTATES)
    if c.model.no_rope_freq == "0":
        yield unused("attn_scale", by="no_rope_freq", why="no layer is without rotary positions")


def unused_floor_scale(c: Settings) -> UnusedFields:
    """Positions between factors of `attn_scale`, and scaled frequencies."""
    if c.model.attn_scale == 0:
        yield unused("floor_scale", by="attn_scale", why="attn_scale is 0")
    if c.model.position_embedding_type != "rope":
        yield unused(
            "use_rope_scaling",
            by="position_embedding_type",
            why="it belongs to position_embedding_type rope",
        )
    if c.model.multi_latent_attention:
        yield unused(
            "use_rope_scaling",
            by="multi_latent_attention",
            why="multi_latent_attention scales its rotary channels by YaRN only",
            is_harmless=True,
        )
        yield unused(
            "rotary_percent",
            by="multi_latent_attention",
            why="qk_pos_emb_head_dim gives the rotary channels",
        )


def unused_gates(c: Settings) -> UnusedFields:
    """Gated activations and multi-token prediction."""
    if c.model.activation not in GATED:
        yield unused(
            "glu_linear_offset",
            "activation_func_clamp_value",
            "mlp_gate_multiplier",
            by="activation",
            why="the activation has no gate",
            fix="set --activation swiglu, quick_geglu or geglu_tanh",
        )
    if not c.mtp.num_layers:
        yield unused(
            "mtp_loss_scaling_factor",
            "mtp_use_repeated_layer",
            by="mtp_num_layers",
            why="there is no multi-token prediction: mtp_num_layers is unset",
            is_harmless=True,
        )


def unused_rope_scaling(c: Settings) -> UnusedFields:
    """Scaled rotary frequencies."""
    if not c.model.use_rope_scaling:
        yield unused(
            "rope_scaling_factor",
            "rope_low_freq_factor",
            "rope_high_freq_factor",
            "rope_original_max_positions",
            by="use_rope_scaling",
            why="it belongs to use_rope_scaling",
        )
    if c.model.position_embedding_type != "rope":
        yield unused(
            "rotary_seq_len_interpolation_factor",
            by="position_embedding_type",
            why="it belongs to position_embedding_type rope",
        )
    window_fields = ("rotary_base_local", "window_rotary_percent")
    if not c.model.has_rope:
        yield unused(*window_fields, by="position_embedding_type", why=IN_ROPE)
    if not has_windows(c):
        yield unused("window_attn_skip_freq", *window_fields, by=WINDOW_CAUSES, why=NO_WINDOW)
    if c.model.rotary_proportional:
        yield unused(
            "window_rotary_percent",
            by="rotary_proportional",
            why="rotary_proportional rotates all channels in layers with a window",
        )


def has_windows(c: Settings) -> bool:
    """Whether layers may attend within a window or a chunk."""
    return c.model.window_size is not None or c.model.attention_chunk_size is not None


def unused_linear_attention(c: Settings) -> UnusedFields:
    """Sizes of linear attention."""
    kind = linear_attention_kind(c.model.linear_attention_type)
    by = "linear_attention_type"
    if kind is None:
        yield unused("linear_attention_freq", by=by, why="it belongs to linear_attention_type")
    if c.model.hybrid_layer_pattern is not None:
        yield unused(
            "linear_attention_freq",
            "moe_layer_freq",
            by="hybrid_layer_pattern",
            why="hybrid_layer_pattern says what every layer is",
        )
    if kind is not None and not kind.has_delta_rule:
        yield unused(
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
            by=by,
            why="they are sizes of other kinds of linear attention",
        )
        yield unused(
            "linear_allow_neg_eigval",
            "linear_norm_epsilon",
            "linear_norm_placement",
            by=by,
            why="they belong to gated_delta_net and kda",
        )
    if c.model.linear_attention_type != "kda":
        yield unused(
            "linear_decay_bound", "linear_full_rank_gates", by=by, why="they belong to kda"
        )
    if kind is not None and kind.has_mamba:
        yield unused(
            "linear_conv_kernel_dim",
            by=by,
            why="mamba_conv_kernel_dim is the kernel size of Mamba-2",
        )


def unused_mamba(c: Settings) -> UnusedFields:
    """Sizes of Mamba-2; its layers are counted only where a size is set."""
    if c.mamba != MambaConfig() and not c.has_mamba:
        fix = "set --linear-attention-type mamba2, or --hybrid-layer-pattern with M"
        if c.model.hybrid_layer_pattern:
            fix = "write an M into --hybrid-layer-pattern"
        yield unused(
            "mamba_state_dim",
            "mamba_head_dim",
            "mamba_num_groups",
            "mamba_num_heads",
            "mamba_conv_kernel_dim",
            "mamba_time_step_min",
            "mamba_rms_norm",
            "mamba_multipliers",
            by=("hybrid_layer_pattern", "linear_attention_type"),
            why="no layer is Mamba-2",
            fix=fix,
        )


def unused_query_norms(c: Settings) -> UnusedFields:
    """Weights of norms, norms of queries and keys, and other settings of the scores."""
    by_mla = "multi_latent_attention"
    if not c.model.has_norm_weight and not c.model.qk_layernorm_across_heads:
        is_layer_norm = c.model.normalization == "LayerNorm"
        by = "layernorm_parameters" if is_layer_norm else "normalization"
        yield unused("apply_layernorm_1p", by=by, why="norms have no weights")
    if c.model.normalization != "LayerNorm":
        yield unused(
            "layernorm_parameters",
            by="normalization",
            why="it belongs to normalization LayerNorm",
        )
    if not c.model.qk_layernorm:
        yield unused(
            "qk_layernorm_across_heads",
            "qk_layernorm_after_rope",
            by="qk_layernorm",
            why="it belongs to qk_layernorm",
        )
    if c.model.multi_latent_attention:
        yield unused(
            "attn_logit_softcapping",
            "softmax_type",
            by=by_mla,
            why="multi_latent_attention has a plain softmax",
        )
        yield unused(
            "apply_wd_to_qk_layernorm",
            by=by_mla,
            why="the norms of multi_latent_attention are of compressed vectors",
        )
    if not c.model.qk_layernorm and not c.model.multi_latent_attention:
        yield unused(
            "apply_wd_to_qk_layernorm",
            by=("qk_layernorm", by_mla),
            why="there are no norms of queries and keys without qk_layernorm",
            is_harmless=True,
        )
    if c.model.multi_latent_attention:
        yield unused(
            "qk_layernorm_across_heads",
            "qk_layernorm_after_rope",
            "softmax_scale",
            by=by_mla,
            why="with multi_latent_attention the width of the heads and mscale_all_dim give the "
            "scale of the scores",
        )


def unused_mup(c: Settings) -> UnusedFields:
    """Settings of muP without muP, and its factor of the scores where others scale them."""
    scores = ("mup_base_head_dim", "mup_attn_scale_power")
    if not c.model.use_mup:
        yield unused(
            "mup_base_hidden_size",
            "mup_embedding_mult",
            "mup_output_mult",
            *scores,
            by="use_mup",
            why="it belongs to use_mup",
        )
    if c.model.multi_latent_attention:
        yield unused(
            *scores, by="multi_latent_attention", why="MLA has a scale of the scores of its own"
        )
    if c.model.softmax_scale is not None:
        yield unused(*scores, by="softmax_scale", why="softmax_scale scales the scores")


def unused_position_ids(c: Settings) -> UnusedFields:
    """Positions of documents, and biases of queries, keys and values."""
    if c.model.position_embedding_type == "none":
        yield unused(
            "reset_position_ids",
            by="position_embedding_type",
            why="position_embedding_type none has no positions",
        )
    if c.model.add_bias_linear:
        yield unused(
            "add_qkv_bias",
            by="add_bias_linear",
            why="add_bias_linear already adds these biases",
            is_harmless=True,
        )
        yield unused(
            "add_attention_output_bias",
            "add_mlp_bias",
            by="add_bias_linear",
            why="add_bias_linear already adds these biases",
        )


def unused_residual(c: Settings) -> UnusedFields:
    """Settings of a kind of residual connections that the model does not have."""
    if c.model.residual_type != "parallel":
        yield unused(
            "parallel_shared_norm", by="residual_type", why="it belongs to residual_type parallel"
        )
    if c.model.residual_type != "gated":
        yield unused(
            "residual_gate_temperature", by="residual_type", why="it belongs to residual_type gated"
        )
    if c.model.residual_type not in STREAMS:
        yield unused(
            "residual_streams",
            by="residual_type",
            why=f"it belongs to residual_type {', '.join(STREAMS)}",
        )
    if c.model.residual_type != "mhc":
        yield unused(
            "mhc_sinkhorn_iterations",
            "mhc_epsilon",
            by="residual_type",
            why="only residual_type mhc reads it",
        )


def unused_blocks(c: Settings) -> UnusedFields:
    """Sizes of blocks of keys where keys are selected one by one, and shared selections of keys."""
    if c.model.sparse_attention_type == "blocks":
        why = "layers share selections of keys, and none of blocks"
        yield unused("dsa_indexer_share_freq", by="sparse_attention_type", why=why)
    if c.model.sparse_attention_type != "dsa":
        return
    yield unused(
        "dsa_indexer_block_size",
        "dsa_indexer_num_local_blocks",
        "dsa_indexer_layer_freq",
        by="sparse_attention_type",
        why="sparse_attention_type dsa selects keys one by one, in every layer",
        fix="set --sparse-attention-type blocks",
    )


def unused_with_compressed_keys(c: Settings) -> UnusedFields:
    """Settings of other indexers and windows beside compressed keys."""
    if c.model.sparse_attention_type != "compressed":
        return
    yield unused(
        "dsa_indexer_share_freq",
        "dsa_indexer_k_norm_epsilon",
        "dsa_indexer_block_size",
        "dsa_indexer_num_local_blocks",
        "dsa_indexer_layer_freq",
        by="sparse_attention_type",
        why="index keys are compressed, and selected one by one in every layer C",
    )
    yield unused(
        "window_attn_skip_freq",
        by="sparse_attention_type",
        why="compressed_layer_pattern says which layers have the window alone",
    )


def unused_with_mla(c: Settings) -> UnusedFields:
    """Settings of attention that multi-latent attention does not read."""
    by = "multi_latent_attention"
    always_normalizes = (
        "multi_latent_attention always normalizes the compressed queries, keys and values"
    )
    if not c.model.multi_latent_attention:
        return
    yield unused("num_query_groups", by=by, why=MLA_HEADS)
    yield unused(
        "add_qkv_bias",
        by=by,
        why="queries, keys and values of multi_latent_attention have no biases",
        is_harmless=True,
    )
    yield unused("kv_channels", by=by, why=MLA_HEADS, is_harmless=True)
    yield unused("qk_layernorm", by=by, why=always_normalizes, is_harmless=True)
    yield unused("qk_l2_norm", by=by, why=always_normalizes)


def unused_checkpoint_args(c: Settings) -> UnusedFields:
    """The model of a checkpoint if pretrained weights are loaded as well."""
    if c.checkpoint.pretrained_checkpoint is not None:
        yield unused(
            "use_checkpoint_args",
            by="pretrained_checkpoint",
            why="config.json of pretrained_checkpoint sets the model section",
            is_harmless=True,
        )


def unused_expert_axes(c: Settings) -> UnusedFields:
    """Settings of expert axes without experts or with all experts on one rank."""
    if not c.has_experts and c.ep == 1:
        yield unused(
            "expert_tensor_parallel_size",
            by="num_experts",
            why="the model has no experts: num_experts is unset",
            is_harmless=True,
        )
    if c.ep == 1:
        yield unused(
            "moe_hierarchical_dispatch",
            "moe_dispatch_fwd_dtype",
            "moe_flex_dispatcher_backend",
            "moe_expert_rank_capacity_factor",
            "overlap_moe_expert_parallel_comm",
            by="expert_model_parallel_size",
            why="with expert_model_parallel_size 1 no token is sent",
            fix="set --expert-model-parallel-size above 1",
            is_harmless=True,
        )


def unused_mlp_width(c: Settings) -> UnusedFields:
    """The width of dense MLPs; its layers are counted only where it is set."""
    if c.model.ffn_hidden_size is None:
        return
    if c.moe.ffn_hidden_size is not None and not c.has_dense_layers:
        yield unused(
            "ffn_hidden_size",
            by=("moe_ffn_hidden_size", "moe_layer_freq", "num_experts"),
            why="every layer has experts, of width moe_ffn_hidden_size",
            is_harmless=True,
        )
    if c.moe.shortcut:
        yield unused(
            "ffn_hidden_size",
            by="moe_shortcut",
            why="with moe_shortcut moe_shared_expert_intermediate_size is the width of every MLP",
        )


def unused_router(c: Settings) -> UnusedFields:
    """Losses, biases and scores of the router."""
    losses = c.moe.router_load_balancing_type
    by_losses = "moe_router_load_balancing_type"
    if losses == ["none"]:
        yield unused(
            "moe_aux_loss_coeff",
            by=by_losses,
            why="moe_router_load_balancing_type none has no loss",
        )
    if "global_aux_loss" not in losses:
        yield unused(
            "moe_divide_global_aux_loss_by_dp",
            by=by_losses,
            why="there is no global_aux_loss",
            fix="set --moe-router-load-balancing-type global_aux_loss",
        )
    if c.moe.shared_expert_intermediate_size is None:
        yield unused(
            "moe_shared_expert_gate",
            "moe_shared_expert_average",
            by="moe_shared_expert_intermediate_size",
            why="there is no shared expert",
            fix="set --moe-shared-expert-intermediate-size",
        )
    if not c.moe.balances_quantiles:
        yield unused(
            "moe_router_quantile_balancing_ema",
            "moe_router_qb_num_bins",
            by=by_losses,
            why="it belongs to quantile_balancing",
            fix="set --moe-router-load-balancing-type quantile_balancing",
        )
    elif c.moe.router_enable_expert_bias:
        yield unused(
            "moe_router_bias_update_rate",
            by=by_losses,
            why="quantile_balancing sets biases, whatever they were",
        )
    if not c.moe.router_enable_expert_bias:
        yield unused(
            "moe_router_bias_update_rate",
            by="moe_router_enable_expert_bias",
            why="it belongs to moe_router_enable_expert_bias",
        )


def unused_router_scores(c: Settings) -> UnusedFields:
    """Settings of the other function of router scores."""
    by = "moe_router_score_function"
    kind = c.moe.router_score_function
    if kind != "softmax":
        yield unused(
            "moe_router_pre_softmax",
            by=by,
            why=f"moe_router_score_function {kind} computes no softmax",
            is_harmless=True,
        )
    if kind == "softmax":
        yield unused(
            "moe_router_norm_epsilon",
            by=by,
            why="moe_router_score_function softmax divides by no sum of scores",
            is_harmless=True,
        )
