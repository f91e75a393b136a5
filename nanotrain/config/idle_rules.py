"""Which fields do nothing, and what makes it so, as data; idle.py enforces it."""

from collections.abc import Callable
from dataclasses import dataclass

from nanotrain.config.config import (
    Config,
    DType,
    LoadBalancing,
    LRDecayStyle,
    PositionEmbedding,
    RouterScore,
    ShardingStrategy,
)
from nanotrain.config.derive import moe_layers


@dataclass(frozen=True)
class Idle:
    """Fields that do nothing while `holds`, and the fields that make it so."""

    names: tuple[str, ...]
    causes: tuple[str, ...]
    holds: Callable[[Config], bool]
    why: str
    cure: str = ""  # what to do so that the fields have an effect; empty: change the causes


MODEL_RULES = (
    Idle(
        ("rotary_base", "use_rope_scaling"),
        ("position_embedding_type",),
        lambda c: c.model.position_embedding_type is not PositionEmbedding.rope,
        "it belongs to position_embedding_type rope",
    ),
    Idle(
        ("rope_scaling_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_max_positions"),
        ("use_rope_scaling",),
        lambda c: not c.model.use_rope_scaling,
        "it belongs to use_rope_scaling",
    ),
    Idle(
        ("reset_position_ids",),
        ("position_embedding_type",),
        lambda c: c.model.position_embedding_type is PositionEmbedding.none,
        "position_embedding_type none has no positions",
    ),
    Idle(
        ("add_qkv_bias",),
        ("add_bias_linear",),
        lambda c: c.model.add_bias_linear,
        "add_bias_linear gives every projection a bias already",
    ),
    Idle(
        ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
        ("multi_latent_attention",),
        lambda c: not c.model.multi_latent_attention,
        "it belongs to multi_latent_attention",
    ),
    Idle(
        ("num_query_groups", "kv_channels", "qk_layernorm", "add_qkv_bias"),
        ("multi_latent_attention",),
        lambda c: c.model.multi_latent_attention,
        "multi_latent_attention makes every head from a normalized latent, as wide as qk_head_dim and v_head_dim say",
    ),
    Idle(
        (
            *("moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
            *("moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax"),
            *("moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk"),
            *("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff"),
            *("moe_router_enable_expert_bias", "moe_router_bias_update_rate", "moe_expert_capacity_factor"),
        ),
        ("num_experts",),
        # Beside pretrained weights the model section is still to be read from their config.json.
        lambda c: c.model.moe.num_experts is None and c.checkpoint.pretrained_checkpoint is None,
        "the model has no experts: num_experts is unset",
    ),
    Idle(
        ("ffn_hidden_size",),
        ("moe_ffn_hidden_size", "moe_layer_freq", "num_experts"),
        lambda c: c.model.moe.ffn_hidden_size is not None and all(moe_layers(c.model)),
        "every layer has experts, and they are moe_ffn_hidden_size wide",
    ),
    Idle(
        ("moe_aux_loss_coeff",),
        ("moe_router_load_balancing_type",),
        lambda c: c.model.moe.router_load_balancing_type is LoadBalancing.none,
        "moe_router_load_balancing_type none has no loss",
    ),
    Idle(
        ("moe_router_bias_update_rate",),
        ("moe_router_enable_expert_bias",),
        lambda c: not c.model.moe.router_enable_expert_bias,
        "it belongs to moe_router_enable_expert_bias",
    ),
    Idle(
        ("moe_router_pre_softmax",),
        ("moe_router_score_function",),
        lambda c: c.model.moe.router_score_function is RouterScore.sigmoid,
        "moe_router_score_function sigmoid takes no softmax",
    ),
)

PARALLEL_RULES = (
    Idle(
        ("overlap_param_gather",),
        ("data_parallel_sharding_strategy",),
        lambda c: c.parallel.data_parallel_sharding_strategy is ShardingStrategy.no_shard,
        "data_parallel_sharding_strategy no_shard gathers no parameters",
    ),
    Idle(
        ("sequence_parallel",),
        ("tensor_model_parallel_size",),
        lambda c: c.parallel.tensor_model_parallel_size == 1,
        "with tensor_model_parallel_size 1 no rank shares activations",
        "set --tensor-model-parallel-size above 1",
    ),
    Idle(
        ("cp_comm_type",),
        ("context_parallel_size",),
        lambda c: c.parallel.context_parallel_size == 1,
        "with context_parallel_size 1 every rank has whole sequences",
        "set --context-parallel-size above 1",
    ),
    Idle(
        (
            *("pipeline_schedule", "num_virtual_stages_per_pipeline_rank", "use_tp_pp_dp_mapping"),
            *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
        ),
        ("pipeline_model_parallel_size",),
        lambda c: c.parallel.pipeline_model_parallel_size == 1,
        "with pipeline_model_parallel_size 1 there is one stage",
        "set --pipeline-model-parallel-size above 1",
    ),
)

RUN_RULES = (
    Idle(
        ("lr_wsd_decay_iters", "lr_wsd_decay_style"),
        ("lr_decay_style",),
        lambda c: c.optim.lr_decay_style is not LRDecayStyle.WSD,
        "it belongs to lr_decay_style WSD",
    ),
    Idle(
        ("min_lr", "lr_decay_iters"),
        ("lr_decay_style",),
        lambda c: c.optim.lr_decay_style is LRDecayStyle.constant,
        "lr_decay_style constant never decays",
    ),
    Idle(("lr_warmup_init",), ("lr_warmup_iters",), lambda c: c.optim.lr_warmup_iters == 0, "there is no warmup"),
    Idle(
        ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        ("params_dtype",),
        lambda c: c.precision.params_dtype is not DType.fp16,
        "only params_dtype fp16 scales the loss",
    ),
    Idle(
        (
            *("data_path", "tokenizer_model", "quickstart_vocab_size", "generate_tokens", "generate_prompt"),
            *("reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
        ),
        ("mock_data",),
        lambda c: c.data.mock_data,
        "mock_data has no text and no documents",
    ),
    Idle(("save_interval", "keep_last"), ("save",), lambda c: not c.checkpoint.save, "nothing is saved"),
    Idle(("eval_iters",), ("eval_interval",), lambda c: c.train.eval_interval == 0, "eval_interval 0 never validates"),
    Idle(("generate_prompt",), ("generate_tokens",), lambda c: c.train.generate_tokens == 0, "no sample is asked for"),
    Idle(("profile_step_start", "profile_step_end"), ("profile",), lambda c: not c.train.profile, "profile is off"),
    Idle(("wandb_project",), ("wandb",), lambda c: not c.train.wandb, "wandb is off"),
)

RULES: tuple[Idle, ...] = (*MODEL_RULES, *PARALLEL_RULES, *RUN_RULES)
