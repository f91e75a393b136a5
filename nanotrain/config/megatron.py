"""Megatron-LM's flags that are no field here, as a table: what each one is, how many values it takes, one sentence.

The kinds of rows are those of `megatron_kinds.py`; flags that training scripts rarely have, and flags by pattern, are
in `megatron_rare.py`, those of earlier versions in `megatron_old.py`. `translate.py` applies the table to a command
line. A flag that becomes a field leaves the table.
"""

from fnmatch import fnmatchcase
from typing import Any

from nanotrain.config import conversions
from nanotrain.config.megatron_kinds import (
    FUSED,
    MANY,
    MegatronFlag,
    always,
    no_effect,
    not_yet,
    rename,
    sets,
)
from nanotrain.config.megatron_old import OLD
from nanotrain.config.megatron_rare import PATTERNS, RARE

# Source: Megatron-LM, `post_training/model_builder.py`.
GPT_OSS = {
    "position_embedding_type": "yarn",
    "rotary_scaling_factor": 32.0,
    "original_max_position_embeddings": 131072,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": False,
}

# fmt: off
MODEL = {
    "--use-mcore-models": always("there is one implementation of the models"),
    "--use-legacy-models": no_effect("there is one implementation of the models"),
    "--transformer-impl": no_effect("there is one implementation of the layers", arity=1),
    "--use-flash-attn": no_effect("--attention-backend auto takes flash kernels where they can be used"),
    "--disable-bias-linear": sets("--no-add-bias-linear", add_bias_linear=False),
    "--group-query-attention": MegatronFlag("rename", "--num-query-groups sets the number, 1 where it is left out", convert=conversions.group_query_attention),
    "--use-rotary-position-embeddings": sets("--position-embedding-type rope", position_embedding_type="rope"),
    "--no-position-embedding": MegatronFlag("rename", "it is accepted with --position-embedding-type rope only", convert=conversions.no_position_embedding, is_check=True),
    "--rope-type": rename("--position-embedding-type with the same value", conversions.rope_type),
    "--rotary-interleaved": no_effect("RoPE pairs the two halves of a head: the same model, with the channels of queries and keys in another order"),
    "--apply-query-key-layer-scaling": always("scores are never stored in 16 bits; Megatron-LM divides them by the number of the layer while they are, and multiplies by it again inside the fp32 softmax, so the softmax is the same"),
    "--attention-softmax-in-fp32": always("core attention computes its softmax in fp32"),
    "--no-persist-layer-norm": no_effect(FUSED),
    "--no-rope-fusion": no_effect(FUSED),
    "--no-masked-softmax-fusion": no_effect(FUSED),
    "--no-bias-gelu-fusion": MegatronFlag("rename", "with --megatron-defaults the GELU is exact, where it is the tanh approximation of the fused kernel without this flag", convert=lambda config, text: {}),
    "--no-bias-swiglu-fusion": no_effect(FUSED),
    "--no-bias-dropout-fusion": no_effect(FUSED),
    "--cross-entropy-loss-fusion": no_effect("the head and the loss are always computed together, in chunks"),
    "--cross-entropy-fusion-impl": no_effect("the head and the loss are always computed together, in chunks", arity=1),
    "--padded-vocab-size": MegatronFlag("rename", "--make-vocab-size-divisible-by with the same number, whatever the line has for that flag", 1, convert=conversions.padded_vocab_size, overrules=True),
    "--add-qkv-bias-linear": sets("--add-qkv-bias", add_qkv_bias=True),
    "--enable-gpt-oss": MegatronFlag("rename", "YaRN with factor 32 from 131072 positions, not rounded, whatever position flags the line has; OpenAI's files have 4096: set the YaRN flags instead to train from them", convert=lambda config, text: dict(GPT_OSS), fields=tuple(GPT_OSS), overrules=True),
    "--export-force-local-attention": no_effect("torch chooses the attention kernel"),
    "--init-model-with-meta-device": always("no rank allocates parameters that it does not keep"),
    "--use-cpu-initialization": always("initial weights are the same on every device"),
    "--perform-initialization": always("weights are always initialized"),
    "--onnx-safe": no_effect("models are not exported to ONNX", arity=1),
    "--openai-gelu": sets("--activation gelu_tanh", activation="gelu_tanh"),
    "--fp16-lm-cross-entropy": no_effect("the loss is computed in fp32"),
    "--mla-down-proj-fusion": no_effect(FUSED),
    "--encoder-num-layers": rename("--num-layers with the same number", lambda config, text: {"num_layers": text}),
    "--encoder-seq-length": rename("--seq-length with the same number", lambda config, text: {"seq_length": text}),
    "--decoder-num-layers": not_yet("models have decoder layers only: set --num-layers", arity=1),
    "--decoder-seq-length": not_yet("models have decoder layers only: set --seq-length", arity=1),
    "--spec": not_yet("no Python file of layers is imported; without it the other flags describe the layers", arity=MANY),
    "--init-method-xavier-uniform": not_yet("initial weights are normal: set --init-method-std"),
    "--apply-residual-connection-post-layernorm": not_yet("the residual connection is before the norm: leave it out"),
    "--fp32-residual-connection": not_yet("residuals have params_dtype: leave it out"),
}
MOE = {
    "--moe-grouped-gemm": always("the experts of a rank are one grouped product"),
    "--moe-token-dispatcher-type": no_effect("tokens are sent by all-to-all", arity=1),
    "--moe-flex-dispatcher-backend": no_effect("tokens are sent by all-to-all", arity=1),
    "--moe-hybridep-num-sms": no_effect("tokens are sent by all-to-all", arity=1),
    "--moe-deepep-num-sms": no_effect("tokens are sent by all-to-all", arity=1),
    "--moe-enable-deepep": no_effect("tokens are sent by all-to-all"),
    "--moe-router-dtype": always("router logits and scores are fp32", "fp32"),
    "--moe-permute-fusion": no_effect(FUSED),
    "--moe-router-fusion": no_effect(FUSED),
    "--moe-per-layer-logging": always("metrics.jsonl has the load of every router"),
    "--moe-use-legacy-grouped-gemm": no_effect("the experts of a rank are one grouped product"),
    "--moe-token-drop-policy": always("an expert at its capacity keeps the tokens with the highest router weights", "probs"),
    "--moe-pad-expert-input-to-capacity": no_effect("tokens are dropped at the capacity; padding to it would only cost time"),
    "--moe-shared-expert-overlap": no_effect("the shared expert is computed before the tokens are sent"),
    "--overlap-moe-expert-parallel-comm": no_effect("the all-to-all of tokens is not overlapped", saves=True),
    "--delay-wgrad-compute": no_effect("--pipeline-schedule zb-h1 defers weight gradients"),
}
PARALLEL = {
    "--use-megatron-fsdp": always("all sharding strategies have one implementation: --data-parallel-sharding-strategy"),
    "--use-custom-fsdp": always("all sharding strategies have one implementation: --data-parallel-sharding-strategy"),
    "--use-torch-fsdp2": sets("--data-parallel-sharding-strategy optim_grads_params", data_parallel_sharding_strategy="optim_grads_params"),
    "--fsdp-manual-registration": no_effect("buffers are not registered with NCCL"),
    "--use-nccl-ub": no_effect("buffers are not registered with NCCL"),
    "--nccl-ub": no_effect("buffers are not registered with NCCL"),
    "--DDP-impl": no_effect("data parallelism has one implementation: --data-parallel-sharding-strategy", arity=1),
    "--distributed-backend": always("NCCL on GPUs, gloo on CPUs", "nccl", "gloo"),
    "--disable-gloo-process-groups": no_effect("small objects are sent by gloo"),
    "--num-layers-per-virtual-pipeline-stage": rename("--num-virtual-stages-per-pipeline-rank: num_layers / pipeline ranks / the number", conversions.layers_per_virtual_stage),
    "--no-overlap-p2p-communication": no_effect("the schedule sends as soon as a microbatch is ready"),
    "--overlap-p2p-communication-warmup-flush": no_effect("the schedule sends as soon as a microbatch is ready"),
    "--microbatch-group-size-per-virtual-pipeline-stage": no_effect("interleaved runs groups of as many microbatches as pipeline ranks", arity=1),
    "--hierarchical-context-parallel-sizes": not_yet("set --cp-comm-type a2a or p2p", arity=MANY),
    "--tp-comm-overlap": no_effect("communication of tensor parallelism is not overlapped with its products", saves=True),
    "--tp-comm-overlap-cfg": no_effect("communication of tensor parallelism is not overlapped with its products", arity=1),
    "--tp-comm-bootstrap-backend": no_effect("communication of tensor parallelism is not overlapped with its products", arity=1),
    "--defer-embedding-wgrad-compute": no_effect("--pipeline-schedule zb-h1 defers weight gradients"),
    "--wgrad-deferral-limit": no_effect("--pipeline-schedule zb-h1 defers weight gradients", arity=1),
    "--overlap-param-gather-with-optimizer-step": no_effect("parameters are gathered after the step, with --overlap-param-gather beside the next forward"),
    "--no-align-grad-reduce": no_effect("buckets are reduced as they become ready"),
    "--ddp-num-buckets": not_yet("set --ddp-bucket-size, in elements", arity=1),
    "--no-async-tensor-model-parallel-allreduce": no_effect("the input gradient is reduced while the weight gradient is computed"),
    "--use-contiguous-parameters-in-local-ddp": always("parameters and gradients lie in flat buffers"),
    "--local-rank": no_effect("torchrun sets LOCAL_RANK", arity=1),
    "--lazy-mpu-init": no_effect("the layout is planned before process groups exist"),
    "--torch-fsdp2-no-reshard-after-forward": sets("--no-reshard-after-forward", reshard_after_forward=False),
    "--ddp-reduce-scatter-with-fp32-accumulation": sets("--reduce-scatter-with-fp32-accumulation", reduce_scatter_with_fp32_accumulation=True),
    "--no-align-param-gather": no_effect("parameters are gathered when the next forward needs them"),
    "--no-gradient-reduce-div-fusion": no_effect("gradients are scaled once"),
    "--suggested-communication-unit-size": no_effect("--ddp-bucket-size and units set what is communicated at once", arity=1),
    "--create-all-gather-group": no_effect("process groups are made as they are used"),
    "--high-priority-stream-groups": no_effect("streams are chosen by the kind of communication", arity=MANY),
    "--disable-symmetric-registration": no_effect("buffers are not registered with NCCL"),
    "--data-parallel-random-init": not_yet("initial weights are a function of the seed and the name: leave it out"),
}
PRECISION = {
    "--disable-bf16-reduced-precision-matmul": always("products of bf16 accumulate in fp32"),
    "--fp8-dot-product-attention": not_yet("the core attention is in params_dtype: leave it out"),
    "--fp8-multi-head-attention": not_yet("the core attention is in params_dtype: leave it out"),
    "--fp8-interval": no_effect("the scales of fp8 change after every step", arity=1),
    "--tp-only-amax-red": no_effect("amaxes are reduced over all ranks that share a tensor"),
    "--keep-fp8-weight-transpose-cache": no_effect("weights are quantized for every product"),
    "--keep-fp8-transpose-cache": no_effect("weights are quantized for every product"),
    "--moe-router-padding-for-fp8": always("the tokens of each expert are padded as its products need it"),
    "--reuse-grad-buf-for-mxfp8-param-ag": always("with mxfp8 parameters are gathered in bf16"),
    "--moe-router-padding-for-quantization": always("the tokens of each expert are padded as its products need it"),
    "--cuda-graph-impl": no_effect("there are no CUDA graphs; --torch-compile fuses kernels", arity=1),
    "--cuda-graph-scope": no_effect("there are no CUDA graphs; --torch-compile fuses kernels", arity=MANY),
    "--cuda-graph-modules": no_effect("there are no CUDA graphs; --torch-compile fuses kernels", arity=MANY),
    "--cuda-graph-warmup-steps": no_effect("there are no CUDA graphs; --torch-compile fuses kernels", arity=1),
    "--enable-cuda-graph": no_effect("there are no CUDA graphs; --torch-compile fuses kernels", saves=True),
    "--te-rng-tracker": always("there is no random state: all random numbers are functions of the seed and their place"),
    "--use-te-rng-tracker": always("there is no random state: all random numbers are functions of the seed and their place"),
    "--empty-unused-memory-level": no_effect("cached memory stays with the process", arity=1),
    "--optimizer-cuda-graph": no_effect("there are no CUDA graphs; --torch-compile fuses kernels"),
}
KEPT = "activations stay on the device: set --recompute-granularity"
MEMORY = {
    "--moe-layer-recompute": MegatronFlag("rename", "--recompute-granularity selective with moe in --recompute-modules", convert=conversions.moe_layer_recompute),
    "--distribute-saved-activations": not_yet(KEPT),
    "--overlap-cpu-optimizer-d2h-h2d": always("copies of --optimizer-cpu-offload run beside the updates"),
    "--use-torch-optimizer-for-cpu-offload": always("the host updates with the kernels of torch"),
    "--no-pin-cpu-grads": no_effect("host memory is pinned where a GPU copies from it"),
    "--no-pin-cpu-params": no_effect("host memory is pinned where a GPU copies from it"),
}
REDUCED_PRECISION = {
    "--fp4-format": not_yet("set --fp8-format e4m3 or leave it out", arity=1),
    "--preserve-fp32-weights": always("main parameters are fp32"),
    "--megatron-fsdp-main-params-dtype": always("main parameters are fp32", "fp32", "auto"),
    "--megatron-fsdp-main-grads-dtype": rename("--main-grads-dtype", conversions.main_grads_dtype),
    "--megatron-fsdp-grad-comm-dtype": rename("--grad-reduce-in-bf16 for bf16, nothing for fp32 and auto", conversions.grad_comm_dtype),
}
OPTIM = {
    "--train-samples": rename("--train-iters: the number / global_batch_size, rounded down, or the steps of the batch size's schedule; also the length of the schedule", conversions.train_samples),
    "--apply-wd-to-qk-layernorm": not_yet("parameters of one dimension are not decayed: leave it out"),
    "--override-opt-param-scheduler": always("the schedule follows from the command line, also on resume"),
    "--use-checkpoint-opt-param-scheduler": no_effect("the schedule follows from the command line; what differs from the checkpoint is printed on resume"),
    "--calculate-per-token-loss": always("the loss is the sum over target tokens of the global batch / their number"),
    "--check-for-nan-in-loss-and-grad": always("a step whose gradient norm is not finite is skipped"),
    "--no-check-for-nan-in-loss-and-grad": no_effect("a step whose gradient norm is not finite is skipped"),
}
DATA = {
    "--tokenizer-type": no_effect("the files of --tokenizer-model determine the tokenizer", arity=1),
    "--vocab-extra-ids": not_yet("add the tokens to tokenizer.json before nanotrain prepare", "0"),
    "--tiktoken-pattern": no_effect("the files of --tokenizer-model determine the tokenizer", arity=1),
    "--data-cache-path": no_effect("the order of samples is computed, not stored", arity=1),
    "--no-mmap-bin-files": always("token files are read, not mapped into memory"),
    "--no-create-attention-mask-in-dataloader": always("the data loader makes no masks"),
    "--create-attention-mask-in-dataloader": no_effect("the attention makes its masks"),
    "--dataloader-type": always("samples are shuffled once per epoch, unless --no-shuffle", "single", "cyclic"),
    "--data-args-path": rename("--data-path with the words of the file", conversions.data_args_path),
    "--num-dataset-builder-threads": no_effect("the order of samples is computed, not stored", arity=1),
    "--dataloader-fast-cache-load": no_effect("the order of samples is computed, not stored"),
    "--dataloader-defer-npy-index-mmap": no_effect("the order of samples is computed, not stored"),
    "--mid-level-dataset-surplus": no_effect("the order of samples is computed, not stored", arity=1),
    "--per-split-data-args-path": rename("--train-data-path, --valid-data-path and --test-data-path, from a JSON file with the keys train, valid and test", conversions.per_split_data_args_path),
    "--trust-remote-code": no_effect("code of a tokenizer is never run; one that needs it is refused"),
}
CHECKPOINT = {
    "--use-dist-ckpt": always("every rank writes its shards"),
    "--ckpt-format": no_effect("there is one format: a manifest and one shard file per rank", arity=1),
    "--dist-ckpt-format": no_effect("there is one format: a manifest and one shard file per rank", arity=1),
    "--auto-detect-ckpt-format": no_effect("there is one format: a manifest and one shard file per rank"),
    "--dist-ckpt-strictness": no_effect("a checkpoint with missing or unknown tensors is always refused", arity=1),
    "--dist-ckpt-optim-fully-reshardable": always("any layout loads any checkpoint"),
    "--ckpt-fully-parallel-save": always("every rank writes its shards"),
    "--no-ckpt-fully-parallel-save": no_effect("every rank writes its shards"),
    "--ckpt-fully-parallel-load": always("every rank reads what it needs"),
    "--ckpt-assume-constant-structure": no_effect("the shards are planned once per run"),
    "--disable-msc": always("files are read and written by the file system"),
    "--use-persistent-ckpt-worker": no_effect("no worker process is used"),
    "--async-strategy": no_effect("no worker process is used", arity=1),
    "--async-ckpt-use-cpu-shm": no_effect("no worker process is used"),
    "--verify-integrity": always("every shard has checksums"),
    "--no-load-rng": always("there is no random state: all random numbers are functions of the seed and their place"),
    "--no-save-rng": always("there is no random state: all random numbers are functions of the seed and their place"),
    "--no-save-optim": no_effect("the optimizer state is always saved; --no-load-optim does not load it"),
    "--non-persistent-save-interval": not_yet("set --save-interval", arity=1),
    "--exit-on-missing-checkpoint": always("a --load without a checkpoint is an error"),
    "--dist-ckpt-workers": no_effect("no worker process is used", arity=1),
    "--dist-ckpt-save-pre-mcore-014": no_effect("there is one format: a manifest and one shard file per rank"),
    "--ckpt-fully-parallel-load-exchange-algo": no_effect("every rank reads what it needs", arity=1),
    "--no-use-tokenizer-model-from-checkpoint-args": always("the tokenizer follows from the command line and the data"),
}
RUN = {
    "--log-throughput": always("tokens per second and MFU are always logged"),
    "--log-timers-to-tensorboard": always("TensorBoard has the time of a step and of waiting for data"),
    "--log-memory-to-tensorboard": always("TensorBoard has the peak memory"),
    "--log-validation-ppl-to-tensorboard": always("TensorBoard has the validation loss, whose exponential is the perplexity"),
    "--log-loss-scale-to-tensorboard": always("TensorBoard has the loss scale"),
    "--log-learning-rate-to-tensorboard": always("TensorBoard has the learning rate"),
    "--no-log-loss-scale-to-tensorboard": no_effect("TensorBoard has the loss scale"),
    "--no-log-learning-rate-to-tensorboard": no_effect("TensorBoard has the learning rate"),
    "--no-log-learnig-rate-to-tensorboard": no_effect("TensorBoard has the learning rate"),
    "--log-world-size-to-tensorboard": no_effect("the world size is logged at the start"),
    "--log-batch-size-to-tensorboard": always("TensorBoard has the global batch size"),
    "--log-progress": always("metrics.jsonl has one line per step"),
    "--log-straggler": no_effect("stragglers are not searched for"),
    "--straggler-minmax-count": no_effect("stragglers are not searched for", arity=1),
    "--straggler-ctrlr-port": no_effect("stragglers are not searched for", arity=1),
    "--log-energy": no_effect("energy is not measured"),
    "--timing-log-level": no_effect("the time of a step and of waiting for data are logged", arity=1),
    "--timing-log-option": no_effect("the time of a step and of waiting for data are logged", arity=1),
    "--tensorboard-log-interval": no_effect("every step is written", arity=1),
    "--tensorboard-queue-size": no_effect("TensorBoard's own default", arity=1),
    "--logging-level": no_effect("progress and warnings are logged", arity=1),
    "--wandb-save-dir": no_effect("wandb writes into the run folder", arity=1),
    "--profile-ranks": no_effect("every rank is profiled", arity=MANY),
    "--use-pytorch-profiler": always("--profile uses torch's profiler"),
    "--record-memory-history": no_effect("the peak memory is logged; the history is not recorded"),
    "--manual-gc": always("garbage is collected every --manual-gc-interval steps"),
    "--exit-signal-handler": always("SIGTERM saves a checkpoint and ends the run"),
    "--enable-experimental": no_effect("no feature is behind such a switch"),
    "--rerun-mode": no_effect("steps are not repeated to find faulty hardware", arity=1),
    "--disable-straggler-on-startup": no_effect("stragglers are not searched for"),
    "--use-ring-exchange-p2p": not_yet("stages send by torch's point-to-point operations: leave it out"),
    "--deterministic-mode": no_effect("runs on CPUs are deterministic; on GPUs torch's own kernels decide"),
    "--skip-train": not_yet("nanotrain evaluate RUN computes the loss of a checkpoint"),
    "--test-mode": no_effect("training is the same with it"),
    "--one-logger-project": no_effect("there is no OneLogger", arity=1),
    "--one-logger-run-name": no_effect("there is no OneLogger", arity=1),
    "--enable-one-logger": no_effect("there is no OneLogger"),
    "--no-one-logger": no_effect("there is no OneLogger"),
    "--one-logger-async": no_effect("there is no OneLogger"),
    "--app-tag-run-name": no_effect("there is no OneLogger", arity=1),
    "--app-tag-run-version": no_effect("there is no OneLogger", arity=1),
    "--adlr-autoresume": no_effect("the same command resumes"),
    "--adlr-autoresume-interval": no_effect("the same command resumes", arity=1),
    "--enable-ft-package": no_effect("--hang-timeout-s ends a run that hangs"),
    "--calc-ft-timeouts": no_effect("--hang-timeout-s ends a run that hangs"),
    "--max-tokens-to-oom": no_effect("it belongs to a server of text generation", arity=1),
    "--inference-max-seq-length": no_effect("it belongs to a server of text generation", arity=1),
}
# fmt: on
MEGATRON: dict[str, MegatronFlag] = (
    MODEL | MOE | PARALLEL | PRECISION | MEMORY | REDUCED_PRECISION | OPTIM | DATA | CHECKPOINT | RUN | RARE | OLD
)
# Megatron-LM spells two flags with an underscore.
MEGATRON |= {
    flag.replace("opt-param", "opt_param"): MEGATRON[flag]
    for flag in ("--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler")
}


def row_of(flag: str) -> MegatronFlag | None:
    """The row of a flag, by its name or by a pattern; None for no flag of Megatron-LM.

    >>> row_of("--mamba-head-dim").kind, row_of("--lr")
    ('not yet', None)
    """
    patterns = (row for pattern, row in PATTERNS.items() if fnmatchcase(flag, pattern))
    return MEGATRON.get(flag) or next(patterns, None)


# Megatron-LM's defaults of the fields where ours differ, by unique name; `--megatron-defaults` takes them.
MEGATRON_DEFAULTS: dict[str, Any] = {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "activation": "gelu",
    "add_bias_linear": True,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "adam_beta2": 0.999,
    "muon_momentum": 0.9,
    "weight_decay": 0.01,
    "lr_decay_style": "linear",
    "log_interval": 100,
    "eval_interval": 1000,
    "eval_iters": 100,
    "keep_last": 0,
    "moe_router_load_balancing_type": ["aux_loss"],
    "kv_lora_rank": 32,
}
# fields without a default in Megatron-LM
MEGATRON_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "seq_length")
# the fields that decide which model is trained
SHAPING = (
    *("position_embedding_type", "normalization", "activation", "add_bias_linear"),
    *("attention_dropout", "hidden_dropout", "adam_beta2", "weight_decay"),
)
