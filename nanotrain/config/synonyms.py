"""Names of other frameworks for what has another name here: nanoGPT, Hugging Face's Trainer, torchtitan, DeepSpeed.
The same for the flags that forks of Megatron-LM add, such as MindSpeed and Megatron-DeepSpeed.

CURES maps names (lower case, underscores, without dashes) to what to write instead. A cure that is one flag is also
used where a key was meant: `optim.learning_rate` -> `optim.lr`. A cure may also be to leave the flag out.
"""

BATCH = "--micro-batch-size (samples per rank and microbatch) or --global-batch-size (samples per step)"
ACCUMULATION = "--global-batch-size: micro_batch_size x data-parallel ranks x microbatches per step"
RANKS = "nanotrain train --nproc-per-node N ..., which sets the number of ranks"
LAUNCH = "it before -m nanotrain.train, where it is an option of torchrun"
ASSETS = "--pretrained-checkpoint DIR for its weights, nanotrain prepare --tokenizer DIR for its tokenizer"
EXPORT = "nanotrain checkpoint export-hf RUN FOLDER after the run"
SWEEP = "nanotrain sweep --over lr=1e-3,3e-4 and the arguments of the training"
RECIPE = "+config=NAME for a recipe, model=NAME for a model, --pretrained-checkpoint DIR for Hugging Face weights"
DATA = "--data-path PREFIX, which `nanotrain prepare` writes"
RESUME = "--load DIR for another run's checkpoint; the same --run-dir resumes by itself"
STRATEGIES = "--data-parallel-sharding-strategy optim (ZeRO-1), optim_grads (ZeRO-2) or optim_grads_params (ZeRO-3)"
EPOCHS = "--train-iters: steps = epochs x samples / global_batch_size"
DTYPE = "--params-dtype bf16, fp16 or fp32"
CONTEXT = "--context-parallel-size N --cp-comm-type a2a (Ulysses)"
CP_COMM = "--cp-comm-type p2p (ring attention), a2a (Ulysses) or allgather"
STOPS = "leave it out: SIGTERM saves a checkpoint and ends the run, SIGUSR1 saves one"
FUSED = "leave it out: fused kernels are chosen by torch"
DEEPSPEED = "leave it out: what that file sets are flags here, such as --bf16, --clip-grad and --global-batch-size"
TUNING = "leave it out: it tunes another implementation and changes nothing that is computed"
DROPOUT = "--hidden-dropout, and --attention-dropout for the attention weights"
LOSS = "leave it out: the loss is the cross entropy, averaged over the target tokens of the global batch"
ALWAYS_LOGGED = "leave it out: it is always logged"
VALIDATION = "--eval-interval N, or --eval-iters 0 for no validation"
VALIDATION_SIZE = "leave it out: validation takes --eval-iters global batches of training's size"
JOINED = "leave it out: samples are --seq-length tokens of joined documents"
APART = "leave it out: query, key and value, and gate and up, are products of their own"
WHOLE = "leave it out: every step has a whole global batch"
EVALUATE = "leave it out: nanotrain evaluate RUN computes the loss of a checkpoint"
BACKEND = "leave it out: NCCL on GPUs, gloo on CPUs"
DETERMINISM = "leave it out: runs on CPUs are deterministic, on GPUs torch's own kernels decide"
TOKENS = "--train-samples: tokens / seq_length"
STAGES = "--pipeline-model-parallel-layout, such as 'E|tt|ttL'"
CAPACITY = "leave it out: no token is dropped unless --moe-expert-capacity-factor is set"
EMBEDDING_NORM = "leave it out: no norm follows the embedding"
ANY_LAYOUT = "leave it out: every rank writes its shards, and any layout loads them"
CHECKPOINT_STEP = "--load RUN/checkpoints/step-N"

# what to write -> its names elsewhere
NAMES = {
    "--lr": "learning_rate max_lr peak_lr base_lr init_lr",
    "--min-lr": "min_learning_rate lr_min end_lr",
    "--lr-warmup-iters": "warmup warmup_steps warmup_iters num_warmup_steps lr_warmup_steps warmup_num_steps",
    "--lr-warmup-fraction": "warmup_ratio warmup_fraction",
    "--lr-decay-iters": "decay_steps lr_decay_steps",
    "--lr-decay-style": "scheduler lr_scheduler lr_scheduler_type lr_schedule decay_lr lr_decay lr_decay_type schedule_type decay_type lr_scheduler_kwargs",
    "--weight-decay": "wd",
    "--adam-beta1": "beta1 adam_b1",
    "--adam-beta2": "beta2 adam_b2",
    "--adam-beta1 0.9 --adam-beta2 0.95": "betas adam_betas",
    "--adam-eps": "adam_epsilon eps epsilon",
    "--clip-grad": "grad_clip max_grad_norm max_norm gradient_clipping gradient_clip_val grad_norm_clip",
    "--optimizer": "optim optimizer_name optimizer_type",
    "--optimizer adam": "adamw use_adamw",
    "--train-iters": "max_steps max_iters num_steps steps iters iterations num_iterations training_steps total_steps n_steps",
    EPOCHS: "epochs num_epochs num_train_epochs n_epochs max_epochs",
    BATCH: "batch_size bs per_device_train_batch_size per_device_batch_size device_batch_size train_batch_size",
    "--micro-batch-size": "local_batch_size micro_batch mbs train_micro_batch_size_per_gpu micro_batch_per_gpu pipeline_parallel_microbatch_size",
    "--global-batch-size": "total_batch_size gbs",
    ACCUMULATION: "gradient_accumulation_steps grad_accum_steps accumulation_steps gradient_accumulation num_microbatches microbatches gas accumulate_grad_batches",
    "--seq-length": "block_size seq_len sequence_length context_length context_len max_seq_len max_seq_length n_ctx ctx_len max_length seqlen",
    "--step-seq-length-schedule": "sequence_length_warmup seq_length_warmup seqlen_warmup curriculum_learning curriculum_seqlen seq_length_schedule sequence_length_schedule",
    "--max-position-embeddings": "n_positions max_positions",
    "--num-layers": "n_layer n_layers layers num_hidden_layers depth num_blocks",
    "--hidden-size": "n_embd dim d_model embed_dim model_dim hidden_dim hidden n_embed embedding_size",
    "--ffn-hidden-size": "intermediate_size ffn_dim d_ff ffn_size mlp_dim ffn_hidden_dim mlp_hidden_size",
    "--num-attention-heads": "num_heads n_head n_heads heads num_attn_heads attention_heads",
    "--num-query-groups": "n_kv_heads num_key_value_heads num_kv_heads kv_heads n_kv_head n_kv_groups n_head_kv",
    "--kv-channels": "head_dim head_size attention_head_size",
    "--rotary-base": "rope_theta rope_base theta rotary_position_embeddings_theta rotary_emb_base",
    "--norm-epsilon": "rms_norm_eps norm_eps layer_norm_eps layer_norm_epsilon",
    "--cpu-offloading": "cpu_offloading_activations",
    "leave it out: the weight decay is decoupled, as in AdamW": "decoupled_weight_decay",
    "--num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size",
    "--decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
    "--decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "--init-method-std": "init_method initializer_range init_std",
    "--activation": "activation_func hidden_act act act_fn activation_function",
    "--add-bias-linear": "bias use_bias",
    "--no-untie-embeddings-and-output-weights": "tie_word_embeddings tie_embeddings weight_tying tie_weights",
    DROPOUT: "dropout embd_pdrop resid_pdrop attn_pdrop dropout_rate",
    "--num-experts": "experts num_local_experts n_experts n_routed_experts num_moe_experts",
    "--moe-router-topk": "top_k topk num_experts_per_tok experts_per_token router_topk",
    "--moe-shared-expert-intermediate-size: the width of all shared experts together": "num_shared_experts n_shared_experts enable_shared_expert shared_moe_ffn_hidden_size",
    "--moe-aux-loss-coeff": "aux_loss_coef router_aux_loss_coef aux_loss_coeff aux_loss_weight aux_loss_alpha moe_loss_coeff",
    "--tensor-model-parallel-size": "tp tp_size model_parallel_size tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_parallelism",
    "--pipeline-model-parallel-size": "pp pp_size pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pipe_parallel_size",
    "--context-parallel-size": "cp cp_size context_parallel context_parallel_degree",
    "--expert-model-parallel-size": "ep ep_size expert_parallel expert_parallel_size expert_parallel_degree moe_expert_parallel_size",
    "--expert-tensor-parallel-size": "etp etp_size",
    "--data-parallel-size": "dp dp_size data_parallel_degree data_parallel_replicate_degree data_parallel_shard_degree",
    "--sequence-parallel": "sp use_sequence_parallel",
    "--pipeline-schedule": "schedule pp_schedule pipeline_parallel_schedule",
    STRATEGIES: "ddp_impl zero zero_stage zero_optimization fsdp sharding_strategy sharding zero1 zero2 zero3 fsdp2 use_fsdp deepspeed zero_optimization_stage fsdp_config",
    "--ddp-bucket-size, in elements": "bucket_size bucket_cap_mb ddp_bucket_cap_mb",
    DTYPE: "enable_autocast autocast_dtype pipeline_dtype dtype precision mixed_precision torch_dtype param_dtype model_dtype autocast fp32 float32 amp mixed_precision_param",
    "--bf16": "bfloat16 bf16_enabled",
    "--params-dtype fp32": "no_bf16 no_fp16",
    "--data-parallel-sharding-strategy no_shard": "no_use_distributed_optimizer",
    "--config-dir": "config_path",
    SWEEP: "multirun m sweep",
    "--fp16": "float16 half fp16_enabled fp16_opt_level",
    "--run-dir": "output_dir out_dir output ckpt_dir checkpoint_dir save_dir dump_folder logdir log_dir logging_dir outdir work_dir checkpoint_folder exp_dir",
    RESUME: "resume resume_from_checkpoint resume_from resume_from_path checkpoint_path initial_load_path",
    "--save-interval": "save_steps save_every checkpoint_interval ckpt_interval save_freq checkpointing_steps save_strategy checkpoint_enable enable_checkpoint checkpoint_factor extra_save_iters always_save_checkpoint",
    "--keep-last": "save_total_limit keep_latest_k",
    "--pretrained-checkpoint": "pretrained from_pretrained hf_model hf_checkpoint init_from initial_load_in_hf enable_hf2mg_convert model_type_hf bridge_hf_model use_bridge",
    "--log-interval": "logging_steps log_every log_freq log_steps print_every log_every_n_steps logging_strategy logging_first_step",
    "--eval-interval": "eval_steps eval_every val_interval eval_freq evaluation_steps val_check_interval validation_freq",
    "--eval-iters": "eval_batches limit_val_batches validation_steps max_eval_samples",
    DATA: "data train_data data_dir dataset_name dataset_path dataset_dir train_file corpus input input_file train_files data_prefix data_path_prefix remove_unused_columns streaming training_dataset validation_dataset handler_name",
    ASSETS: "hf_assets_path",
    "--tokenizer-model": "tokenizer tokenizer_name tokenizer_path tokenizer_dir tokenizer_file use_fast_tokenizer",
    "--num-workers": "dataloader_num_workers data_workers workers valid_num_workers preprocessing_num_workers",
    "--mock-data": "synthetic_data fake_data dummy_data",
    "--torch-compile": "compile use_compile compile_enable torch_compile_backend torch_compile_mode compile_components",
    "--wandb": "use_wandb wandb_log enable_wandb report_to",
    "--wandb-exp-name": "run_name job_description exp_name experiment_name wandb_run_name",
    "--tensorboard": "enable_tensorboard use_tensorboard",
    "--device cuda": "gpu cuda",
    "--device cpu": "cpu no_cuda use_cpu",
    "--generate-tokens": "max_new_tokens",
    "--distributed-timeout-minutes": "timeout ddp_timeout init_timeout_seconds train_timeout_seconds",
    "--profile": "profiler enable_profiling save_traces_folder profile_freq profiling_freq use_hip_profiler",
    LAUNCH: "master_addr master_port node_rank rdzv_backend rdzv_endpoint rdzv_id max_restarts standalone",
    RANKS: "gpus num_gpus nproc nproc_per_node world_size ngpu ngpus n_gpus devices num_devices nnodes num_nodes ranks num_processes rank use_mpi",
    EXPORT: "last_save_in_hf save_safetensors push_to_hub hub_model_id last_save_model_only export_dtype",
    RECIPE: "model model_name model_name_or_path recipe config config_file job_config flavor model_type",
    "--fp8-format hybrid": "use_fp8 float8 enable_fsdp_float8_all_gather",
    "--recompute-granularity full": "num_microbatches_with_partial_activation_checkpoints activation_checkpointing gradient_checkpointing deepspeed_activation_checkpointing activations_checkpoint_method activations_checkpoint_num_layers recompute ac_mode activation_checkpoint_mode gradient_checkpointing_kwargs partition_activations swap_attention",
    "--pipeline-model-parallel-size 1": "no_pipeline_parallel",
    CONTEXT: "ds_sequence_parallel_size sequence_parallel_size ulysses_degree ulysses_degree_in_cp",
    CP_COMM: "context_parallel_algo cp_algo context_parallel_rotate_method rotate_method",
    "--expert-tensor-parallel-size 1": "moe_tp_extend_ep",
    "--pipeline-schedule zb-h1": "schedules_method enable_zero_bubble zero_bubble_v_schedule",
    "--moe-layer-freq '[0]*3+[1]*58', here for 3 dense layers before 58 with experts": "first_k_dense_replace",
    "--moe-router-topk-scaling-factor": "routed_scaling_factor",
    "--moe-router-score-function": "scoring_func",
    "--moe-router-num-groups": "n_group",
    "--moe-router-group-topk": "moe_router_topk_limited_devices topk_group",
    "--moe-router-load-balancing-type seq_aux_loss": "seq_aux",
    "leave it out: the weights of the selected experts add up to 1, with softmax unless --moe-router-pre-softmax is set": "norm_topk_prob",
    "--position-embedding-type yarn": "rope_scaling_type rope_scaling",
    "--mscale": "rope_scaling_mscale",
    "--mscale-all-dim": "rope_scaling_mscale_all_dim",
    "--original-max-position-embeddings": "rope_scaling_original_max_position_embeddings",
    "--window-size": "sliding_window swa_windows sliding_window_size",
    "--activation-func-clamp-value": "swiglu_limit",
    "--activation swiglu": "gated_linear_unit glu_activation",
    "--normalization RMSNorm": "use_rmsnorm rmsnorm apply_layernorm_rms",
    "--no-add-bias-linear": "no_bias",
    "--make-vocab-size-divisible-by": "pad_vocab_size_to",
    "--gradient-accumulation-fusion": "gemm_gradient_accumulation_fusion",
    "--optimizer-cpu-offload": "swap_optimizer enable_cpu_offload",
    TOKENS: "train_tokens total_tokens num_tokens max_tokens n_tokens",
    "--lr-warmup-samples: tokens / seq_length": "lr_warmup_tokens",
    "--lr-decay-samples: tokens / seq_length": "lr_decay_tokens",
    "--train-data-path, --valid-data-path and --test-data-path": "train_weighted_split_paths valid_weighted_split_paths test_weighted_split_paths train_weighted_split_paths_path valid_weighted_split_paths_path test_weighted_split_paths_path",
    STOPS: "kill_switch_file trigger_path",
    FUSED: "bias_activation_fusion masked_softmax_fusion persist_layer_norm memory_efficient_layer_norm bias_dropout_fusion apply_rope_fusion fused_single_qkv_rope gradient_reduce_div_fusion use_fused_rmsnorm use_fused_swiglu use_fused_rotary_pos_emb use_fused_moe_token_permute_and_unpermute abort_on_unmet_fused_kernel_constraints use_liger_kernel",
    APART: "projection_fusion no_projection_fusion",
    DEEPSPEED: "deepspeed_config deepspeed_mpi",
    TUNING: "tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs overlap_p2p_comm overlap_p2p_comm_warmup_flush batch_p2p_comm batch_p2p_sync deallocate_pipeline_outputs cpu_offloading_double_buffering pin_cpu_grads pin_cpu_params align_param_gather barrier_with_l1_time cuda_graph_use_single_mempool cuda_graph_retain_backward_graph clone_scatter_output_in_embedding disable_parameter_transpose_cache store_param_remainders fsdp_all_gather_in_start_param_sync moe_permutation_async_comm moe_fb_overlap moe_alltoall_overlap_comm moe_unperm2_mem_optim_swap no_shared_storage use_cp_send_recv_overlap use_ascend_coc reuse_fp32_param mtp_mem_efficient_logits mla_fa_divide_qk mla_fa_without_pad use_fused_ring_attention_update coc_fused_kernel disable_gloo_group create_moe_param_group ddp_find_unused_parameters dataloader_pin_memory dataloader_prefetch_factor dataloader_persistent_workers low_cpu_mem_usage use_cache disable_tqdm disable_color_printing enable_async_tensor_parallel disable_loss_parallel implementation",
    "nanotrain --version": "version",
    "leave it out: this command trains": "do_train",
    "leave it out: the same --run-dir resumes, another one starts at step 0": "overwrite_output_dir ignore_data_skip",
    "leave it out: the first validation is at step --eval-interval": "eval_delay eval_on_start",
    "leave it out: a checkpoint always has the optimizer state": "save_only_model",
    "leave it out: the schedule follows from the command line": "no_load_lr_state",
    "leave it out: --master-addr and --master-port of torchrun, before -m nanotrain.train, set it": "dist_url",
    "leave it out: models are computed by torch": "ai_framework",
    "leave it out: progress and warnings are logged": "log_level log_level_replica",
    "--bf16: products of fp32 matrices are computed in fp32": "tf32",
    "--moe-router-force-load-balancing": "fix_router",
    "--optimizer adam, sgd, lion or muon": "adafactor",
    "leave it out: attention is causal": "attention_mask_type",
    "leave it out: router logits and scores are fp32": "router_gating_in_fp32",
    "leave it out: NCCL's flight recorder is set by its variables": "trace_buf_size comm_trace_buf_size",
    "leave it out: the peak memory is logged, the history is not recorded": "enable_memory_snapshot",
    "leave it out: it belongs to the pages of Weights & Biases": "wandb_group",
    "leave it out: inputs have no noise": "neftune_noise_alpha",
    "--micro-batch-size: the log of a run begins with its planned memory": "auto_find_batch_size",
    VALIDATION: "do_eval eval_strategy evaluation_strategy validation_enable enable_validation",
    VALIDATION_SIZE: "per_device_eval_batch_size eval_accumulation_steps validation_local_batch_size validation_seq_len",
    EVALUATE: "eval_only load_best_model_at_end metric_for_best_model greater_is_better",
    JOINED: "variable_seq_lengths packing group_by_length",
    WHOLE: "dataloader_drop_last drop_last",
    LOSS: "label_smoothing_factor average_tokens_across_devices",
    ALWAYS_LOGGED: "include_tokens_per_second log_grad_norm log_optimizer_states_to_tensorboard",
    BACKEND: "ddp_backend backend",
    DETERMINISM: "deterministic full_determinism",
    STAGES: "pipeline_parallel_split_points module_fqns_per_model_part pp_partition_method num_layer_list noop_layers",
    "--num-layers-per-virtual-pipeline-stage": "pipeline_parallel_layers_per_stage",
    CAPACITY: "moe_token_dropping disable_moe_token_dropping moe_min_capacity moe_eval_capacity_factor",
    "--moe-expert-capacity-factor": "moe_train_capacity_factor",
    "--moe-z-loss-coeff, where it is the one of the router: the loss has none on the logits": "use_z_loss",
    EMBEDDING_NORM: "embed_layernorm",
    ANY_LAYOUT: "universal_checkpoint save_on_each_node",
    CHECKPOINT_STEP: "load_step",
    "--no-load-optim": "exclude_from_loading",
    "--finetune, which starts at step 0": "reset_iteration",
    "--seed": "data_seed",
    "--async-save": "async_mode",
    "--tensorboard-dir": "save_tb_folder",
    "--explain": "print_config",
    "--manual-gc-interval": "gc_freq",
    "--no-reshard-after-forward for never, else leave it out": "fsdp_reshard_after_forward",
    "--grad-reduce-in-bf16 for bf16, else leave it out": "mixed_precision_reduce",
    "--min-lr: the factor x lr": "min_lr_factor",
    "--lr-decay-style WSD --lr-wsd-decay-iters N: the ratio x train_iters": "decay_ratio",
    "--fp8-recipe": "float8_recipe_name",
    "--recompute-modules": "selective_ac_option",
    "--recompute-granularity selective --recompute-modules mlp": "recompute_activation_function",
    "--attention-backend": "attention_config attn_implementation use_flash_attention_2",
    "--valid-data-path": "validation_file valid_data",
    "--split, such as 969,30,1": "validation_split_percentage splits_string",
    "--train-samples": "max_train_samples",
    "--rotary-percent": "rotary_pct",
    "--position-embedding-type": "pos_emb",
    "--position-embedding-type rope": "use_llama2_rotary_position_embeddings",
    "--position-embedding-type, of which none has biases on the scores": "use_alibi_mask",
    "--norm-placement sandwich": "post_norm",
    "--apply-layernorm-1p": "layernorm_zero_centered_gamma add_rmsnorm_offset",
    "--num-query-groups 1 for multiquery, else leave it out": "attention_head_type",
    "--wandb-entity": "wandb_entity_name",
    "--wandb-project": "wandb_project_name",
}
CURES: dict[str, str] = {name: cure for cure, names in NAMES.items() for name in names.split()}

# values under other names, by the unique name of their field
VALUES: dict[str, dict[str, str]] = {
    "device": {"gpu": "cuda", "nvidia": "cuda", "cuda:0": "cuda"},
    "params_dtype": {
        "bfloat16": "bf16",
        "float16": "fp16",
        "half": "fp16",
        "float32": "fp32",
        "float": "fp32",
        "torch.bfloat16": "bf16",
    },
    "optimizer": {"adamw": "adam", "AdamW": "adam", "Adam": "adam"},
    "data_parallel_sharding_strategy": {
        "zero1": "optim",
        "zero2": "optim_grads",
        "zero3": "optim_grads_params",
        "fsdp": "optim_grads_params",
        "full_shard": "optim_grads_params",
        "ddp": "no_shard",
        "none": "no_shard",
    },
    "activation": {"silu": "swiglu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"},
    "normalization": {"rms": "RMSNorm", "rms_norm": "RMSNorm", "rmsnorm": "RMSNorm", "layer_norm": "LayerNorm"},
    "position_embedding_type": {"rotary": "rope", "learned": "learned_absolute", "absolute": "learned_absolute"},
    "lr_decay_style": {"wsd": "WSD", "inverse_sqrt": "inverse-square-root"},
    "cp_comm_type": {"ring": "p2p", "ulysses": "a2a", "all_gather": "allgather"},
}
