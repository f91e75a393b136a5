"""The configuration: one frozen dataclass per section, with strings and numbers only.

A field's flag is `--` and its name in kebab case; fields of `model.moe` have the prefix `--moe-`.
Flags are unique over all sections. `rules/` holds the rules that span several fields, `load.py`
fills the sections.
"""

from dataclasses import dataclass
from typing import Literal

from nanotrain.config.model import (
    ModelConfig,
)
from nanotrain.config.option import above, at_least, between, option, section, url
from nanotrain.config.parallel import (
    MemoryConfig,
    ParallelConfig,
)

DType = Literal["fp32", "bf16", "fp16"]
MainGradsDType = Literal["fp32", "bf16"]
Fp8Format = Literal["e4m3", "hybrid"]
AmaxAlgo = Literal["most_recent", "max"]
WSDDecayStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]
WeightDecayStyle = Literal["constant", "linear", "cosine"]
MuonScaleMode = Literal["spectral", "unit_rms_norm", "shape_scaling"]
Packing = Literal["stream", "best_fit"]
MuonTPMode = Literal["distributed", "blockwise"]
MatmulPrecision = Literal["medium", "highest"]
DeviceKind = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class Fp8Config:
    """Matrix products in fp8; used when fp8_format is set."""

    format: Fp8Format = option(
        None,
        "matrix products of linear layers in fp8: e4m3, or hybrid (gradients in e5m2); unset: in params_dtype",
    )
    recipe: str = option("delayed", "name of the fp8 scaling recipe, such as delayed or tensorwise")
    margin: int = option(
        0, "delayed: scales are lower than the amax allows by 2^margin", check=at_least(0)
    )
    amax_history_len: int = option(1, "delayed: steps of the amax history", check=at_least(1))
    amax_compute_algo: AmaxAlgo = option(
        "most_recent", "delayed: amax of the history: most_recent or max"
    )
    wgrad: bool = option(True, "weight gradients in fp8; off: in params_dtype")
    param_gather: bool = option(
        False, "keep the weights of fp8 products in fp8 and all-gather them so; the same values"
    )
    first_last_layers_bf16: bool = option(
        False, "no fp8 in the first and last layers", name="first_last_layers_bf16"
    )
    num_layers_at_start_in_bf16: int = option(
        1, "layers at the start without fp8", name="num_layers_at_start_in_bf16", check=at_least(0)
    )
    num_layers_at_end_in_bf16: int = option(
        1, "layers at the end without fp8", name="num_layers_at_end_in_bf16", check=at_least(0)
    )


@dataclass(frozen=True)
class PrecisionConfig:
    """Data types of parameters, gradients and optimizer state."""

    params_dtype: DType = option(
        "fp32", "data type of parameters and activations: fp32, bf16 or fp16"
    )
    disable_bf16_reduced_precision_matmul: bool = option(
        False,
        "add the parts of a split bf16 product in fp32 on GPUs, where torch's default adds them in bf16",
    )
    accumulate_allreduce_grads_in_fp32: bool | None = option(
        None,
        "accumulate and reduce gradients in fp32, or in params_dtype; unset: fp32, but with grad_reduce_in_bf16 or main_grads_dtype bf16",
    )
    grad_reduce_in_bf16: bool = option(
        False, "accumulate and reduce gradients of bf16 parameters in bf16"
    )
    main_grads_dtype: MainGradsDType = option(
        "fp32",
        "data type of the reduced gradients that the optimizer reads: fp32, or bf16 with bf16 reduction",
    )
    use_precision_aware_optimizer: bool = option(
        False, "allow main parameters and optimizer state in other data types than fp32"
    )
    main_params_dtype: DType = option(
        "fp32",
        "precision-aware optimizer: data type of the main parameters, which the optimizer updates",
    )
    exp_avg_dtype: DType = option(
        "fp32", "precision-aware optimizer: data type of first moments and momentum buffers"
    )
    exp_avg_sq_dtype: DType = option(
        "fp32", "precision-aware optimizer: data type of second moments"
    )
    loss_scale: float = option(
        0.0, "fp16: constant loss scale; 0: it adapts, from initial_loss_scale", check=at_least(0)
    )
    initial_loss_scale: float = option(4294967296.0, "fp16: initial loss scale", check=above(0))
    min_loss_scale: float = option(1.0, "fp16: minimum loss scale", check=above(0))
    loss_scale_window: int = option(
        1000, "fp16: steps without overflow before the loss scale doubles", check=at_least(1)
    )
    hysteresis: int = option(2, "fp16: overflows before the loss scale halves", check=at_least(1))
    fp8: Fp8Config | None = section(Fp8Config, prefix="fp8_", switch="format")

    @property
    def accumulates_grads_in_fp32(self) -> bool:
        """Whether gradient buffers are fp32: unless a setting asks for gradients in params_dtype.

        >>> PrecisionConfig(grad_reduce_in_bf16=True).accumulates_grads_in_fp32
        False
        """
        if self.accumulate_allreduce_grads_in_fp32 is not None:
            return self.accumulate_allreduce_grads_in_fp32
        return not self.grad_reduce_in_bf16 and self.main_grads_dtype == "fp32"


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule."""

    optimizer: str = option("adam", "name of the update rule: adam (AdamW), sgd, lion or muon")
    lr: float = option(3e-4, "peak learning rate", check=above(0))
    min_lr: float = option(0.0, "minimum learning rate, at the end of the decay", check=at_least(0))
    lr_decay_style: str = option(
        "cosine",
        "name of the learning-rate decay: constant, linear, cosine, inverse-square-root or WSD",
    )
    lr_decay_iters: int | None = option(
        None,
        "steps of the schedule, at the end of which lr is min_lr; unset: train_iters",
        check=at_least(1),
    )
    lr_warmup_iters: int = option(0, "steps of linear warmup", check=at_least(0))
    lr_decay_samples: int | None = option(
        None, "the length of the schedule in samples, instead of lr_decay_iters", check=at_least(1)
    )
    lr_warmup_samples: int | None = option(
        None, "samples of linear warmup, instead of lr_warmup_iters", check=at_least(0)
    )
    lr_warmup_fraction: float | None = option(
        None,
        "linear warmup as a fraction of the schedule, instead of lr_warmup_iters",
        check=between(0, 1),
    )
    lr_warmup_init: float = option(
        0.0, "learning rate at the start of the warmup", check=at_least(0)
    )
    lr_wsd_decay_iters: int | None = option(
        None, "WSD: length of the final decay [steps]", check=at_least(1)
    )
    lr_wsd_decay_samples: int | None = option(
        None,
        "WSD: length of the final decay in samples, instead of lr_wsd_decay_iters",
        check=at_least(1),
    )
    lr_wsd_decay_style: WSDDecayStyle = option(
        "exponential", "WSD: shape of the final decay: linear, cosine, exponential or minus_sqrt"
    )
    weight_decay: float = option(
        0.1, "decoupled weight decay; not applied to biases and 1-D parameters", check=at_least(0)
    )
    apply_wd_to_qk_layernorm: bool = option(
        False, "weight decay applies to the norms of qk_layernorm too (Qwen3-Next)"
    )
    weight_decay_incr_style: WeightDecayStyle = option(
        "constant",
        "how weight decay grows over the run: constant (weight_decay), linear or cosine (from start_weight_decay to end_weight_decay)",
    )
    start_weight_decay: float | None = option(
        None, "weight decay of the first step, with weight_decay_incr_style", check=at_least(0)
    )
    end_weight_decay: float | None = option(
        None, "weight decay at the end of the run, with weight_decay_incr_style", check=at_least(0)
    )
    adam_beta1: float = option(0.9, "decay rate of the first moment", check=between(0, 1))
    adam_beta2: float = option(0.95, "decay rate of the second moment", check=between(0, 1))
    adam_eps: float = option(1e-8, "added to the square root of the second moment", check=above(0))
    sgd_momentum: float = option(
        0.9, "sgd: factor of the momentum buffer; 0: no momentum", check=between(0, 1)
    )
    lion_beta1: float = option(
        0.95, "lion: decay rate of the momentum inside the sign", check=between(0, 1)
    )
    lion_beta2: float = option(0.98, "lion: decay rate of the stored momentum", check=between(0, 1))
    muon_momentum: float = option(0.95, "muon: decay rate of the momentum", check=between(0, 1))
    muon_use_nesterov: bool = option(False, "muon: Nesterov momentum")
    muon_num_ns_steps: int = option(
        5, "muon: steps of the Newton-Schulz iteration", check=at_least(1)
    )
    muon_scale_mode: MuonScaleMode = option(
        "spectral",
        "muon: factor of the update by the shape of a matrix: spectral, unit_rms_norm or shape_scaling",
    )
    muon_extra_scale_factor: float = option(
        1.0,
        "muon: further factor of the update; 0.2 with spectral matches the size of Adam's updates",
        check=above(0),
    )
    muon_tp_mode: MuonTPMode = option(
        "distributed",
        "muon: distributed (full matrices, each at one rank) or blockwise (the block of each tensor-parallel rank alone)",
    )
    muon_fp32_matmul_prec: MatmulPrecision = option(
        "medium", "muon: precision of the Newton-Schulz iteration: medium (bf16) or highest (fp32)"
    )
    muon_scalar_optimizer: str = option(
        "adam", "muon: name of the update rule of all other parameters: adam or lion"
    )
    qk_clip: bool = option(
        False,
        "after every step scale down the query and key weights of heads with too large attention logits (MuonClip)",
    )
    qk_clip_alpha: float = option(
        0.5,
        "qk_clip: power of the factor that query weights are scaled by; key weights get the rest",
        check=between(0, 1),
    )
    qk_clip_threshold: float = option(
        100.0, "qk_clip: attention logit that a head may reach", check=above(0)
    )
    decoupled_lr: float | None = option(
        None, "peak learning rate of the embedding and the output layer; unset: lr", check=above(0)
    )
    decoupled_min_lr: float | None = option(
        None,
        "minimum learning rate of the embedding and the output layer; unset: min_lr",
        check=at_least(0),
    )
    optimizer_cpu_offload: bool = option(
        False, "keep main parameters and optimizer state in host memory and update them there"
    )
    optimizer_offload_fraction: float = option(
        1.0, "optimizer_cpu_offload: fraction of the optimizer state in host memory", check=above(0)
    )
    ema_decay: float | None = option(
        None,
        "decay rate of an exponential moving average of the weights, kept in fp32 and saved in checkpoints; unset: none",
        check=between(0, 1),
    )
    clip_grad: float = option(
        1.0, "maximum global gradient norm; 0: no clipping", check=at_least(0)
    )


@dataclass(frozen=True)
class DataConfig:
    """The datasets, the tokenizer and how samples are read."""

    data_path: list[str] = option(
        [],
        "prefixes of token files, each with an optional weight before it: 0.7 a 0.3 b; with quickstart it may be empty",
        is_path=True,
    )
    train_data_path: list[str] = option(
        [],
        "instead of data_path: prefixes for training, with or without weights, not divided by split",
        is_path=True,
    )
    valid_data_path: list[str] = option(
        [],
        "with train_data_path: prefixes for validation; or NAME=PREFIX entries: validation sets with a loss each, instead of split's",
        is_path=True,
    )
    test_data_path: list[str] = option(
        [], "with train_data_path: prefixes for testing", is_path=True
    )
    stages: list[str] = option(
        [],
        "instead of data_path: NAME@START: BLEND entries such as 'anneal@9000: 0.5 web 0.5 math', each the blend from a step on, or from a sample on (START with 'samples' after it)",
        name="data_stages",
        is_path=True,
    )
    split: str = option("969,30,1", "proportions of training, validation and test documents")
    exclude_documents: str | None = option(
        None,
        "file of training documents that are not read from the start of this process on: lines PREFIX:INDEX, or those that nanotrain data find --json prints",
        is_path=True,
    )
    seq_length: int = option(256, "sequence length: tokens per sample", check=at_least(1))
    tokenizer_model: str | None = option(
        None,
        "Hugging Face name or folder, tokenizer.json, or 'bytes'; unset: the one next to the data",
        is_path="or address",
    )
    vocab_file: str | None = option(
        None, "GPT-2's vocab.json, with merge_file instead of tokenizer_model", is_path=True
    )
    merge_file: str | None = option(
        None, "GPT-2's merges.txt, with vocab_file instead of tokenizer_model", is_path=True
    )
    mock_data: bool = option(False, "train on synthetic tokens, for benchmarks")
    shuffle: bool = option(True, "shuffle the samples; off: sample i is tokens [i*S, i*S+S+1)")
    packing: Packing = option(
        "stream",
        "what a sample is: stream (a window over all tokens) or best_fit (whole documents and padding; longer ones are divided)",
    )
    fim_data: bool = option(
        False,
        "fill-in-the-middle: rewrite parts of training documents as prefix, suffix and middle, each after its sentinel",
    )
    fim_rate: float = option(
        0.5, "fim_data: share of the parts that are rewritten", check=at_least(0, at_most=1)
    )
    fim_spm_rate: float = option(
        0.5, "fim_data: share of those that begin with the suffix", check=at_least(0, at_most=1)
    )
    fim_prefix_token: str = option(
        "<fim_prefix>", "fim_data: sentinel before the prefix, a token of the tokenizer or an id"
    )
    fim_suffix_token: str = option("<fim_suffix>", "fim_data: sentinel before the suffix")
    fim_middle_token: str = option("<fim_middle>", "fim_data: sentinel before the middle")
    object_storage_cache_path: str | None = option(
        None,
        "folder for parts of token files in object storage, on a disk of the host, shared by its processes; unset: in the folder for temporary files",
        is_path=True,
    )
    object_storage_cache_gib: float = option(
        16.0,
        "GiB of object_storage_cache_path that token files may take; their indices come on top",
        check=above(0),
    )
    num_workers: int = option(
        1, "data loader processes; 0: load in the training process", check=at_least(0, at_most=256)
    )
    reset_position_ids: bool = option(False, "restart position ids at each document")
    reset_attention_mask: bool = option(False, "mask attention between documents")
    eod_mask_loss: bool = option(
        False, "mask the loss of tokens that follow an end-of-document token"
    )
    quickstart: bool = option(
        False,
        "without data_path, train on the quick-start corpus: the source files of Python's standard library",
    )
    quickstart_vocab_size: int = option(
        8192, "quick-start corpus: size of its BPE vocabulary", check=at_least(300)
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and loading of checkpoints."""

    save: bool = option(True, "write checkpoints into the run folder")
    save_interval: int = option(
        500, "steps between checkpoints; 0: only at the end", check=at_least(0)
    )
    keep_last: int = option(3, "number of checkpoints to keep; 0: all", check=at_least(0))
    save_retain_interval: int | None = option(
        None, "also keep the checkpoints at steps that are a multiple of this", check=at_least(1)
    )
    async_save: bool = option(
        False, "write checkpoints in the background, from a copy in host memory"
    )
    save_optim: bool = option(
        True,
        "write optimizer state into checkpoints; off: a run goes on from one with --no-load-optim only",
    )
    exit_on_save_failure: bool = option(
        False,
        "end the run where a checkpoint cannot be written; otherwise retry at the next interval",
    )
    save_fallback_dir: str | None = option(
        None,
        "folder for the last checkpoint, in a subfolder named like the run, where the run folder cannot be written",
        is_path=True,
    )
    staging_dir: str | None = option(
        None,
        "folder on a fast local disk for a run in object storage: its files, and each checkpoint before it is uploaded; unset: runs",
        is_path=True,
    )
    load: str | None = option(
        None,
        "step folder, or run folder for its newest checkpoint, to load instead of the run's own checkpoint",
        is_path="or address",
    )
    finetune: bool = option(
        False,
        "of the checkpoint of load take only the weights: start at step 0 with new optimizer state",
    )
    load_optim: bool = option(
        True, "load the optimizer state of a checkpoint; off: only its weights and its step"
    )
    auto_resume: bool = option(True, "resume from the newest complete checkpoint of the run folder")
    use_checkpoint_args: bool = option(
        False,
        "take the model from the checkpoint that the run starts from, and seq_length where it is not set",
    )
    pretrained_checkpoint: str | None = option(
        None,
        "Hugging Face folder with the initial weights; its config.json sets the model section",
        is_path="or address",
    )


@dataclass(frozen=True)
class TrainConfig:
    """The run: length, batch size, logging, validation and exit."""

    train_iters: int = option(
        100,
        "optimizer steps; 0: build everything, train nothing",
        check=at_least(0, at_most=10**12),
    )
    micro_batch_size: int = option(1, "samples per rank and microbatch", check=at_least(1))
    global_batch_size: int | None = option(
        None,
        "samples per optimizer step over all ranks; unset: micro_batch_size x data-parallel size",
        check=at_least(1, at_most=10**7),
    )
    rampup_batch_size: list[int] = option(
        [],
        "START INCREMENT SAMPLES: the global batch grows from START by INCREMENT over the first SAMPLES samples to global_batch_size",
        check=at_least(1),
    )
    step_batch_size_schedule: list[str] = option(
        [],
        "TOKENS:SIZE pairs such as 0:768 250B:1536: the global batch size from each number of tokens on, instead of global_batch_size",
    )
    step_seq_length_schedule: list[str] = option(
        [],
        "TOKENS:LENGTH pairs such as 0:1024 10B:4096: the sequence length from each number of tokens on, ascending to seq_length; a sample stays seq_length tokens, split into consecutive sequences of that length",
    )
    seed: int = option(1234, "random seed", check=at_least(0, at_most=2**62))
    run_dir: str | None = option(
        None,
        "folder of the run, or its address in object storage; unset: runs/<recipe>",
        is_path="or address",
    )
    device: DeviceKind = option("auto", "auto (cuda where available), cpu or cuda")
    deterministic_mode: bool = option(
        False,
        "deterministic algorithms of torch, cuBLAS, cuDNN and NCCL; an operator that has none is an error",
    )
    torch_compile: bool | None = option(
        None,
        "compile every transformer block with torch.compile; unset: on GPUs, where nothing that is set forbids it",
    )
    attention_backend: str = option(
        "auto", "kernels of the core attention: auto, flash, fused, unfused, local or flex"
    )
    log_interval: int = option(1, "steps between log lines", check=at_least(1))
    timing_log_level: int = option(
        0,
        "log the time of every phase of a step on the first rank, and mark the phases in traces (torch, NVTX); 2: the actions of the pipeline schedule too; 0: neither",
        check=at_least(0, at_most=2),
    )
    log_max_attention_logit: bool = option(
        False,
        "log the largest attention logit since the last logged step; computes the scores once more",
    )
    log_params_norm: bool = option(False, "log the 2-norm of all parameters")
    log_norms_by_group: bool = option(
        False,
        "log the 2-norms of gradients, updates and parameters of embedding, attention, MLP, experts, norms, head and multi-token prediction; a logged step copies the main parameters",
    )
    log_straggler: bool = option(
        False, "log the seconds of a step in which each rank did not wait for others, on CPUs"
    )
    log_num_zeros_in_grad: bool = option(False, "log the number of zeros in the gradients")
    eval_interval: int = option(500, "steps between validations; 0: never", check=at_least(0))
    eval_iters: int = option(
        10, "global batches per validation; 0: no validation", check=at_least(0)
    )
    eval_tasks: list[str] = option(
        [], "NAME=FILE.jsonl entries: tasks that are scored at every validation", is_path=True
    )
    eval_num_fewshot: int = option(
        0,
        "examples before each question of a task: the first other questions of its file",
        check=at_least(0, at_most=64),
    )
    eval_task_limit: int | None = option(None, "questions per task; unset: all", check=at_least(1))
    exit_interval: int | None = option(
        None, "save and exit at steps that are a multiple of this", check=at_least(1)
    )
    exit_duration_in_mins: float | None = option(
        None, "save and exit after this many minutes", check=above(0)
    )
    hang_timeout_s: float | None = option(
        None,
        "seconds without progress after which the run ends with hang-report.txt; 0: never; unset: 0.9 of the timeout of collectives",
        check=at_least(0),
    )
    max_consecutive_skips: int = option(
        50,
        "steps skipped in a row, as not finite, after which the run saves and ends; 0: never",
        check=at_least(0),
    )
    rollback_on_spike: float | None = option(
        None,
        "after a loss above this multiple of the median of the last steps go back to the newest checkpoint and skip the data since then; unset: never",
        check=above(1),
    )
    debug_nan: bool = option(
        False, "search the first tensor that is not finite, by module, rank and microbatch; slow"
    )
    check_weight_hash_across_dp_replicas_interval: int = option(
        0,
        "steps between comparisons of the replicas of every parameter, bit for bit; 0: never",
        check=at_least(0),
    )
    manual_gc_interval: int = option(
        100, "steps between manual garbage collections; 0: automatic collection", check=at_least(0)
    )
    profile: bool = option(False, "write a torch profiler trace into the run folder")
    profile_step_start: int = option(3, "first profiled step", check=at_least(1))
    profile_step_end: int = option(5, "last profiled step", check=at_least(1))
    profile_ranks: list[int] = option(
        [],
        "ranks that write a trace, or a memory snapshot; empty: all, of more than 64 those of one data-parallel replica",
        check=at_least(0),
    )
    memory_snapshot_path: str | None = option(
        None,
        "file for the history of GPU memory, written at the end of the run or after an error, with the rank in its name",
        is_path=True,
    )
    tensorboard: bool = option(False, "write TensorBoard event files")
    tensorboard_dir: str | None = option(
        None,
        "folder of the TensorBoard event files, turns tensorboard on; unset: in the run folder",
        is_path=True,
    )
    wandb: bool = option(False, "log to Weights & Biases; offline without an API key")
    wandb_project: str = option(
        "nanotrain", "Weights & Biases project; on the command line it turns wandb on"
    )
    wandb_exp_name: str | None = option(
        None, "Weights & Biases: name of the run; unset: the name of the run folder"
    )
    wandb_entity: str | None = option(
        None, "Weights & Biases: team or user; unset: the default of the account"
    )
    prometheus_port: int | None = option(
        None,
        "serve the metrics for Prometheus at this port, from the first rank; unset: do not",
        check=at_least(1, at_most=65535),
    )
    prometheus_address: str = option(
        "127.0.0.1", "address that the Prometheus endpoint binds to; 0.0.0.0: all interfaces"
    )
    notify: str | None = option(
        None,
        "URL that gets a JSON message at start, end, failure and loss spikes; files refer to $NANOTRAIN_NOTIFY",
        check=url(),
        secret="NANOTRAIN_NOTIFY",
    )
    report: bool = option(True, "write report.html into the run folder at the end")
    report_interval: int = option(
        0, "also write the report every this many steps; 0: only at the end", check=at_least(0)
    )
    generate_tokens: int = option(
        0, "tokens to generate at the end of training; 0: none", check=at_least(0)
    )
    generate_prompt: str = option("", "prompt of the generated sample; empty: a new document")


@dataclass(frozen=True)
class Config:
    """The whole configuration; a component takes only the sections that it needs."""

    model: ModelConfig = section(ModelConfig)
    parallel: ParallelConfig = section(ParallelConfig)
    memory: MemoryConfig = section(MemoryConfig)
    precision: PrecisionConfig = section(PrecisionConfig)
    optim: OptimConfig = section(OptimConfig)
    data: DataConfig = section(DataConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    train: TrainConfig = section(TrainConfig)

    @property
    def is_model_known(self) -> bool:
        """Whether the model section is complete before a checkpoint or a Hugging Face folder is
        read.
        """
        return (
            self.checkpoint.pretrained_checkpoint is None
            and not self.checkpoint.use_checkpoint_args
        )

    @property
    def validates(self) -> bool:
        """Whether the run validates: it has steps with a validation, and `split` leaves documents
        for it.

        >>> Config().validates, Config(data=DataConfig(split="100,0,0")).validates
        (True, False)
        """
        train, data = self.train, self.data
        if train.eval_interval == 0 or train.eval_iters == 0:
            return False
        shares = data.split.split(",")
        is_divided = not (data.mock_data or data.train_data_path or data.valid_data_path)
        return not is_divided or len(shares) > 1 and float(shares[1]) > 0

    @property
    def evaluates(self) -> bool:
        """Whether the run validates or scores tasks."""
        return self.validates or bool(self.train.eval_tasks and self.train.eval_interval)
