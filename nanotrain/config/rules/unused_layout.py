"""Fields of parallelism, activation memory, update rules and precision without effect."""

from nanotrain.config.optim import MUON_OPTIMIZERS
from nanotrain.config.rules.settings import Settings, UnusedFields, unused

STRATEGY = "data_parallel_sharding_strategy"
OPTIMIZERS = ("optimizer", "muon_scalar_optimizer")
ONE_STAGE = "with pipeline_model_parallel_size 1 there is one stage"


def unused_sharding(c: Settings) -> UnusedFields:
    """Gathers of parameters and of FSDP units."""
    strategy = c.parallel.data_parallel_sharding_strategy
    if strategy == "no_shard":
        yield unused(
            "overlap_param_gather",
            by=STRATEGY,
            why="data_parallel_sharding_strategy no_shard gathers no parameters",
        )
    if strategy != "optim_grads_params":
        yield unused(
            "reshard_after_forward",
            "fsdp_double_buffer",
            by=STRATEGY,
            why="only data_parallel_sharding_strategy optim_grads_params gathers units",
        )
    if strategy != "optim_grads_params" or not c.parallel.overlap_param_gather:
        yield unused(
            "fsdp_prefetch_depth",
            by=(STRATEGY, "overlap_param_gather"),
            why="only data_parallel_sharding_strategy optim_grads_params with overlap_param_gather "
            "gathers units ahead",
        )


def unused_axes(c: Settings) -> UnusedFields:
    """Settings of tensor and context parallelism on one rank."""
    if c.tp == 1:
        yield unused(
            "sequence_parallel",
            by="tensor_model_parallel_size",
            why="with tensor_model_parallel_size 1 no rank shares activations",
            fix="set --tensor-model-parallel-size above 1",
            is_harmless=True,
        )
    if c.tp == 1 or not c.parallel.sequence_parallel:
        yield unused(
            "tp_comm_overlap",
            by="sequence_parallel",
            why="without sequence_parallel on several tensor-parallel ranks no part of a sequence "
            "is sent",
            fix="set --sequence-parallel",
            is_harmless=True,
        )
    if c.cp > 1 and c.parallel.cp_comm_type != "a2a+p2p":
        yield unused(
            "hierarchical_context_parallel_sizes",
            by="cp_comm_type",
            why="it belongs to cp_comm_type a2a+p2p",
        )
    if c.cp == 1:
        yield unused(
            "cp_comm_type",
            "hierarchical_context_parallel_sizes",
            by="context_parallel_size",
            why="with context_parallel_size 1 no sequence is split",
            fix="set --context-parallel-size above 1",
        )


def unused_stages(c: Settings) -> UnusedFields:
    """Settings of pipeline stages."""
    by = "pipeline_model_parallel_size"
    if c.parallel.pipeline_model_parallel_layout is not None:
        yield unused(
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            by="pipeline_model_parallel_layout",
            why="pipeline_model_parallel_layout gives the layers of every stage",
        )
    if c.pp == 1:
        yield unused("use_tp_pp_dp_mapping", by=by, why=ONE_STAGE, is_harmless=True)
        yield unused(
            "pipeline_schedule",
            "num_virtual_stages_per_pipeline_rank",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
            by=by,
            why=ONE_STAGE,
            fix="set --pipeline-model-parallel-size above 1",
        )


def unused_recomputation(c: Settings) -> UnusedFields:
    """Recomputed and offloaded layers."""
    granularity = c.memory.recompute_granularity
    by = "recompute_granularity"
    in_full = "it belongs to recompute_granularity full"
    if granularity == "selective":
        yield unused("recompute_method", "recompute_num_layers", by=by, why=in_full)
    if granularity is None:
        yield unused("recompute_method", by=by, why=in_full)
        yield unused("recompute_num_layers", by=by, why=in_full, is_harmless=True)
    if not c.memory.cpu_offloading:
        yield unused("cpu_offloading_num_layers", by="cpu_offloading", why="cpu_offloading is off")
    if granularity != "selective":
        yield unused(
            "recompute_modules", by=by, why="it belongs to recompute_granularity selective"
        )


def unused_optimizer(c: Settings) -> UnusedFields:
    """Settings of other update rules."""
    rule = scalar_optimizer(c)
    if not c.optim.optimizer_cpu_offload:
        yield unused(
            "optimizer_offload_fraction",
            by="optimizer_cpu_offload",
            why="it belongs to optimizer_cpu_offload",
            fix="set --optimizer-cpu-offload",
        )
    if c.optim.optimizer != "sgd":
        yield unused("sgd_momentum", by="optimizer", why="it belongs to optimizer sgd")
    if rule != "lion":
        yield unused("lion_beta1", "lion_beta2", by=OPTIMIZERS, why="it belongs to optimizer lion")
    if rule in ("sgd", "lion"):
        yield unused(
            "adam_beta1",
            "adam_beta2",
            "adam_eps",
            by=OPTIMIZERS,
            why="it belongs to optimizer adam",
        )


def scalar_optimizer(c: Settings) -> str:
    """The update rule of the parameters that Muon leaves, or of all."""
    if c.optim.optimizer in MUON_OPTIMIZERS:
        return c.optim.muon_scalar_optimizer
    if c.optim.optimizer == "adam_h":
        return "adam"
    return c.optim.optimizer


def unused_muon(c: Settings) -> UnusedFields:
    """Settings of Muon and of its clipped attention logits."""
    optimizer = c.optim.optimizer
    if optimizer not in MUON_OPTIMIZERS:
        yield unused(
            "muon_momentum",
            "muon_use_nesterov",
            "muon_num_ns_steps",
            "muon_coefficient_type",
            "muon_ns_algorithm",
            "muon_scale_mode",
            "muon_extra_scale_factor",
            "muon_tp_mode",
            "muon_split_qkv_per_head",
            "muon_fp32_matmul_prec",
            "muon_scalar_optimizer",
            by="optimizer",
            why="it belongs to optimizer muon",
            fix="set --optimizer muon",
        )
    if optimizer in ("normuon", "muon_h"):
        yield unused(
            "muon_scale_mode",
            by="optimizer",
            why=f"updates of {optimizer} have a fixed size",
            fix="set --optimizer muon",
        )
    if optimizer == "muon_h":
        yield unused(
            "muon_extra_scale_factor",
            by="optimizer",
            why="updates of muon_h have a fixed size",
            fix="set --optimizer muon",
        )
    if optimizer != "normuon":
        yield unused(
            "normuon_beta2",
            "normuon_eps",
            by="optimizer",
            why="it belongs to optimizer normuon",
            fix="set --optimizer normuon",
        )
    if c.tp == 1 and c.etp == 1:
        yield unused(
            "muon_tp_mode",
            by=("tensor_model_parallel_size", "expert_tensor_parallel_size"),
            why="without tensor parallelism there are no blocks",
            fix="set --tensor-model-parallel-size above 1",
        )
    if not c.optim.qk_clip:
        yield unused(
            "qk_clip_alpha",
            "qk_clip_threshold",
            by="qk_clip",
            why="it belongs to qk_clip",
            fix="set --qk-clip",
        )


def unused_moments(c: Settings) -> UnusedFields:
    """Dtypes of optimizer state."""
    optim = c.optim
    if scalar_optimizer(c) in ("sgd", "lion"):
        yield unused("exp_avg_sq_dtype", by=OPTIMIZERS, why="this optimizer has no second moments")
    if optim.optimizer == "sgd" and optim.sgd_momentum == 0:
        yield unused(
            "exp_avg_dtype",
            by=("optimizer", "sgd_momentum"),
            why="without momentum there is no state",
        )
    if not c.precision.use_precision_aware_optimizer:
        yield unused(
            "main_params_dtype",
            "exp_avg_dtype",
            "exp_avg_sq_dtype",
            by="use_precision_aware_optimizer",
            why="it belongs to use_precision_aware_optimizer",
            fix="add --use-precision-aware-optimizer",
        )
    if c.precision.use_precision_aware_optimizer and c.precision.params_dtype == "fp32":
        yield unused(
            "main_params_dtype",
            by="params_dtype",
            why="fp32 parameters are their own main parameters",
            fix="set --bf16 or --fp16",
        )


def unused_weight_decay(c: Settings) -> UnusedFields:
    """Rates of the embedding and the output layer, and growing weight decay."""
    by = "weight_decay_incr_style"
    if c.optim.decoupled_lr is None:
        yield unused(
            "decoupled_min_lr",
            by="decoupled_lr",
            why="it belongs to decoupled_lr",
            fix="set --decoupled-lr",
        )
    if c.optim.weight_decay_incr_style == "constant":
        yield unused(
            "start_weight_decay",
            "end_weight_decay",
            by=by,
            why="weight_decay_incr_style constant keeps weight_decay",
            fix="set --weight-decay-incr-style linear or cosine",
        )
    else:
        yield unused(
            "weight_decay",
            by=by,
            why="weight_decay_incr_style linear and cosine take start_weight_decay and "
            "end_weight_decay",
        )


def unused_loss_scale(c: Settings) -> UnusedFields:
    """Loss scales without fp16, and products without bf16."""
    dtype = c.precision.params_dtype
    only_fp16 = "only params_dtype fp16 scales the loss"
    if dtype != "fp16":
        yield unused("loss_scale", by="params_dtype", why=only_fp16, is_harmless=True)
    if dtype == "fp16" and c.precision.loss_scale != 0:
        yield unused(
            "initial_loss_scale",
            "min_loss_scale",
            "loss_scale_window",
            "hysteresis",
            by="loss_scale",
            why="loss_scale is constant where it is set",
        )
    if dtype != "fp16":
        yield unused("initial_loss_scale", by="params_dtype", why=only_fp16, is_harmless=True)
        yield unused(
            "min_loss_scale",
            "loss_scale_window",
            "hysteresis",
            by="params_dtype",
            why=only_fp16,
        )
    if dtype != "bf16":
        yield unused(
            "disable_bf16_reduced_precision_matmul",
            by="params_dtype",
            why="no product is in bf16",
            is_harmless=True,
        )


def unused_fp8(c: Settings) -> UnusedFields:
    """Weights and scaling recipes of fp8."""
    if c.parallel.data_parallel_sharding_strategy == "no_shard":
        yield unused(
            "fp8_param_gather",
            by=STRATEGY,
            why="no_shard gathers no parameters",
            fix="set --data-parallel-sharding-strategy optim, optim_grads or optim_grads_params",
        )
    if c.fp8.recipe != "delayed":
        yield unused(
            "fp8_margin",
            "fp8_amax_history_len",
            "fp8_amax_compute_algo",
            by="fp8_recipe",
            why="only fp8_recipe delayed keeps an amax history",
        )


def unused_fp8_layers(c: Settings) -> UnusedFields:
    """Histories of one step, and layers without fp8."""
    if c.fp8.amax_history_len == 1:
        yield unused(
            "fp8_amax_compute_algo",
            by="fp8_amax_history_len",
            why="the history has one step",
        )
    if not c.fp8.first_last_layers_bf16:
        yield unused(
            "num_layers_at_start_in_bf16",
            "num_layers_at_end_in_bf16",
            by="first_last_layers_bf16",
            why="it belongs to first_last_layers_bf16",
        )
