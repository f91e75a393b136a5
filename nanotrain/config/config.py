"""The configuration: one frozen dataclass per section, with strings, numbers and enums only.

A field's flag is `--` and its name in kebab case; fields of `model.moe` have the prefix `--moe-`. Flags are unique over
all sections. `rules.py` holds the rules that span several fields, `load.py` fills the sections.
"""

from dataclasses import dataclass
from enum import Enum

from nanotrain.config.option import above, at_least, between, option, section


class PositionEmbedding(str, Enum):
    learned_absolute = "learned_absolute"
    rope = "rope"
    none = "none"


class Normalization(str, Enum):
    LayerNorm = "LayerNorm"
    RMSNorm = "RMSNorm"


class Activation(str, Enum):
    gelu = "gelu"
    gelu_tanh = "gelu_tanh"
    swiglu = "swiglu"


class ShardingStrategy(str, Enum):
    no_shard = "no_shard"
    optim = "optim"
    optim_grads = "optim_grads"


class DType(str, Enum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class RouterScore(str, Enum):
    softmax = "softmax"
    sigmoid = "sigmoid"


class LoadBalancing(str, Enum):
    seq_aux_loss = "seq_aux_loss"
    none = "none"


class LRDecayStyle(str, Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    inverse_square_root = "inverse-square-root"
    WSD = "WSD"


class WSDDecayStyle(str, Enum):
    linear = "linear"
    cosine = "cosine"
    exponential = "exponential"
    minus_sqrt = "minus_sqrt"


class DeviceKind(str, Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass(frozen=True)
class MLAConfig:
    """Multi-latent attention (DeepSeek-V2, section 2.1); in use with multi_latent_attention."""

    q_lora_rank: int | None = option(None, "width of the query latent; unset: none", check=at_least(1))
    kv_lora_rank: int = option(512, "width of the key/value latent", check=at_least(1))
    qk_head_dim: int = option(128, "width of a query/key head without position", check=at_least(1))
    qk_pos_emb_head_dim: int = option(64, "width of its rotary part", check=at_least(1))
    v_head_dim: int = option(128, "width of a value head", check=at_least(1))


@dataclass(frozen=True)
class MoEConfig:
    """Mixture-of-experts layers and their router; in use where num_experts is set."""

    num_experts: int | None = option(None, "experts per MoE layer; unset: every layer is dense", name="num_experts", check=at_least(1))
    layer_freq: str = option("1", "which layers have experts: N for every Nth from the first, or a pattern like [0]*3+[1]*58")
    ffn_hidden_size: int | None = option(None, "width inside an expert; unset: as ffn_hidden_size", check=at_least(1))
    shared_expert_intermediate_size: int | None = option(None, "width inside the shared expert; unset: none", check=at_least(1))
    router_topk: int = option(2, "experts per token", check=at_least(1))
    router_score_function: RouterScore = option(RouterScore.softmax, "softmax or sigmoid")
    router_pre_softmax: bool = option(False, "take the softmax over all experts and keep its values, in place of over the chosen")
    router_topk_scaling_factor: float = option(1.0, "what the chosen experts' weights are multiplied by", check=above(0))
    router_num_groups: int | None = option(None, "experts are chosen within the best of so many groups; unset: among all", check=at_least(1))
    router_group_topk: int | None = option(None, "groups that a token may choose from", check=at_least(1))
    router_load_balancing_type: LoadBalancing = option(LoadBalancing.seq_aux_loss, "seq_aux_loss (per sequence) or none")
    aux_loss_coeff: float = option(0.0, "weight of the load-balancing loss", check=at_least(0))
    z_loss_coeff: float = option(0.0, "weight of the router z-loss", check=at_least(0))
    router_enable_expert_bias: bool = option(False, "balance loads by a bias on the choice (no auxiliary loss)")
    router_bias_update_rate: float = option(1e-3, "step of that bias", check=at_least(0))
    expert_capacity_factor: float | None = option(None, "tokens an expert takes per sequence, relative to an even share; unset: all", check=above(0))


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a GPT; the names are Megatron-LM's."""

    num_layers: int = option(4, "transformer blocks", check=at_least(1))
    hidden_size: int = option(256, "width of the residual stream", check=at_least(1))
    ffn_hidden_size: int | None = option(None, "width inside the MLP; unset: 4x hidden, or 8/3x rounded up to 64 with swiglu", check=at_least(1))
    num_attention_heads: int = option(4, "query heads", check=at_least(1))
    num_query_groups: int | None = option(None, "key/value heads (grouped-query attention); unset: one per query head", check=at_least(1))
    kv_channels: int | None = option(None, "width of one head; unset: hidden_size / num_attention_heads", check=at_least(1))
    max_position_embeddings: int = option(1024, "longest sequence the model can hold", check=at_least(1))
    vocab_size: int | None = option(None, "tokens the model knows; unset: the tokenizer's", check=at_least(1))
    make_vocab_size_divisible_by: int = option(128, "the embedding is padded to a multiple of this; padded logits are masked", check=at_least(1))
    position_embedding_type: PositionEmbedding = option(PositionEmbedding.rope, "learned_absolute (GPT-2), rope (Llama, Qwen) or none")
    rotary_base: float = option(10000.0, "base of the rotary frequencies", check=above(0))
    use_rope_scaling: bool = option(False, "Llama 3.1's frequency scaling")
    rope_scaling_factor: float = option(8.0, "Llama 3.1: how far low frequencies are stretched", check=above(0))
    rope_low_freq_factor: float = option(1.0, "Llama 3.1: wavelengths above original/low are stretched fully", check=above(0))
    rope_high_freq_factor: float = option(4.0, "Llama 3.1: wavelengths below original/high are left alone", check=above(0))
    rope_original_max_positions: int = option(8192, "Llama 3.1: context length before scaling", check=at_least(1))
    normalization: Normalization = option(Normalization.RMSNorm, "LayerNorm or RMSNorm")
    norm_epsilon: float = option(1e-5, "added to the variance in every norm", check=above(0))
    activation: Activation = option(Activation.swiglu, "gelu, gelu_tanh (GPT-2's approximation) or swiglu (gated SiLU)")
    add_bias_linear: bool = option(False, "biases on every linear layer but the head")
    add_qkv_bias: bool = option(False, "biases on the query, key and value projections only (Qwen2)")
    qk_layernorm: bool = option(False, "normalize each query and key head (Qwen3)")
    untie_embeddings_and_output_weights: bool = option(False, "give the head a weight of its own")
    multi_latent_attention: bool = option(False, "compress keys and values into a latent vector (DeepSeek)")
    init_method_std: float = option(0.02, "standard deviation of the initial weights; output projections get std / sqrt(2 * num_layers)", check=above(0))
    mla: MLAConfig = section(MLAConfig)
    moe: MoEConfig = section(MoEConfig, prefix="moe_")


@dataclass(frozen=True)
class ParallelConfig:
    """How the ranks are arranged and what the data-parallel ranks share."""

    tensor_model_parallel_size: int = option(1, "ranks that share every matrix", check=at_least(1))
    pipeline_model_parallel_size: int = option(1, "ranks that share the layers", check=at_least(1))
    context_parallel_size: int = option(1, "ranks that share every sequence", check=at_least(1))
    expert_model_parallel_size: int = option(1, "ranks that share the experts; carved out of dp x cp x tp", check=at_least(1))
    expert_tensor_parallel_size: int | None = option(None, "ranks that share every expert's matrices; unset: as tensor_model_parallel_size", check=at_least(1))
    num_distributed_optimizer_instances: int = option(1, "shard within each of so many groups and replicate across them (HSDP)", check=at_least(1))
    sequence_parallel: bool = option(False, "cut activations along the sequence between the tensor-parallel layers")
    num_virtual_stages_per_pipeline_rank: int = option(1, "stages that each pipeline rank holds (interleaved)", check=at_least(1))
    pipeline_schedule: str = option("1f1b", "name of the pipeline schedule")
    decoder_first_pipeline_num_layers: int | None = option(None, "layers of the first stage; unset: an even share", check=at_least(1))
    decoder_last_pipeline_num_layers: int | None = option(None, "layers of the last stage; unset: an even share", check=at_least(1))
    cp_comm_type: str = option("p2p", "name of the core attention under context parallelism; p2p is ring attention")
    use_tp_pp_dp_mapping: bool = option(False, "rank order tp-cp-ep-pp-dp in place of tp-cp-ep-dp-pp")
    data_parallel_sharding_strategy: ShardingStrategy = option(ShardingStrategy.no_shard, "no_shard, optim (ZeRO-1) or optim_grads (ZeRO-2)")
    ddp_bucket_size: int | None = option(None, "a bucket closes once it holds so many elements; unset: max(40000000, 1000000 * shard ranks)", check=at_least(1))
    ddp_pad_buckets_for_high_nccl_busbw: bool = option(False, "pad buckets to a multiple of 65536 elements")
    overlap_grad_reduce: bool = option(False, "reduce a bucket's gradients while the backward pass goes on")
    overlap_param_gather: bool = option(False, "gather updated parameters while the next forward pass begins")
    distributed_timeout_minutes: float = option(10.0, "how long a rank waits for the others before it gives up", check=above(0))


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats; gradients and main weights are fp32 whatever the parameters are."""

    params_dtype: DType = option(DType.fp32, "fp32, bf16 or fp16 for parameters and activations")
    initial_loss_scale: float = option(4294967296.0, "fp16: the loss scale to begin with", check=above(0))
    min_loss_scale: float = option(1.0, "fp16: the loss scale never falls below", check=above(0))
    loss_scale_window: int = option(1000, "fp16: clean steps before the loss scale doubles", check=at_least(1))
    hysteresis: int = option(2, "fp16: overflows before the loss scale halves", check=at_least(1))


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning-rate curve."""

    optimizer: str = option("adam", "name of the update rule; adam is AdamW")
    lr: float = option(3e-4, "peak learning rate", check=above(0))
    min_lr: float = option(0.0, "learning rate at the end of the decay", check=at_least(0))
    lr_decay_style: LRDecayStyle = option(LRDecayStyle.cosine, "constant, linear, cosine, inverse-square-root or WSD")
    lr_decay_iters: int | None = option(None, "steps after which min_lr is reached; unset: train_iters", check=at_least(1))
    lr_warmup_iters: int = option(0, "steps of linear warmup", check=at_least(0))
    lr_warmup_init: float = option(0.0, "learning rate at the start of the warmup", check=at_least(0))
    lr_wsd_decay_iters: int | None = option(None, "WSD: length of the final decay", unit="steps", check=at_least(1))
    lr_wsd_decay_style: WSDDecayStyle = option(WSDDecayStyle.exponential, "WSD: linear, cosine, exponential or minus_sqrt")
    weight_decay: float = option(0.1, "decoupled weight decay; never on biases and 1-D parameters", check=at_least(0))
    adam_beta1: float = option(0.9, "decay of the gradient average", check=between(0, 1))
    adam_beta2: float = option(0.95, "decay of the squared-gradient average", check=between(0, 1))
    adam_eps: float = option(1e-8, "added to the square root of the second moment", check=above(0))
    clip_grad: float = option(1.0, "largest global gradient norm; 0 turns clipping off", check=at_least(0))


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from and how they become samples."""

    data_path: list[str] = option([], "token file prefixes, each optionally after its weight: 0.7 a 0.3 b; empty: the quick-start corpus")
    split: str = option("969,30,1", "documents for training, validation and test, in proportion")
    seq_length: int = option(256, "tokens in a sample", check=at_least(1))
    tokenizer_model: str | None = option(None, "Hugging Face name or folder, a tokenizer.json, or 'bytes'; unset: found beside the data")
    mock_data: bool = option(False, "synthetic tokens, for benchmarks")
    shuffle: bool = option(True, "visit samples in a keyed random order; off: sample i is tokens [i*S, i*S+S+1)")
    num_workers: int = option(1, "processes that load data; 0: load in the training process", check=at_least(0))
    reset_position_ids: bool = option(False, "count positions from each document's start")
    reset_attention_mask: bool = option(False, "attend within a document only")
    eod_mask_loss: bool = option(False, "leave the token that follows an end-of-document out of the loss")
    quickstart_vocab_size: int = option(8192, "quick-start corpus: size of the BPE vocabulary trained on it", check=at_least(300))


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, when, and where a run starts from."""

    save: bool = option(True, "write checkpoints into the run folder")
    save_interval: int = option(500, "steps between checkpoints; 0: only at the end", check=at_least(0))
    keep_last: int = option(3, "checkpoints to keep; 0: all", check=at_least(0))
    load: str | None = option(None, "start from this checkpoint, or the newest of this run folder, in place of the run's own")
    auto_resume: bool = option(True, "go on from the newest complete checkpoint of the run folder")
    pretrained_checkpoint: str | None = option(None, "start from the weights of this Hugging Face folder; its config.json gives the model section")


@dataclass(frozen=True)
class TrainConfig:
    """The run: how long, how big, what is written down."""

    train_iters: int = option(100, "optimizer steps", check=at_least(0))
    micro_batch_size: int = option(1, "samples one rank passes through the model at once", check=at_least(1))
    global_batch_size: int | None = option(None, "samples per optimizer step over all ranks; unset: micro_batch_size x data-parallel size", check=at_least(1))
    seed: int = option(1234, "every random choice follows from it", check=at_least(0))
    run_dir: str | None = option(None, "folder of the run; unset: runs/<recipe>")
    device: DeviceKind = option(DeviceKind.auto, "auto (cuda where there is one), cpu or cuda")
    torch_compile: bool = option(False, "compile every transformer block with torch.compile")
    log_interval: int = option(1, "steps between console lines", check=at_least(1))
    eval_interval: int = option(500, "steps between validations; 0: never", check=at_least(0))
    eval_iters: int = option(10, "global batches of one validation", check=at_least(1))
    exit_interval: int | None = option(None, "save and exit at every multiple of so many steps", check=at_least(1))
    exit_duration_in_mins: float | None = option(None, "save and exit after so many minutes", check=above(0))
    manual_gc_interval: int = option(100, "steps between collections of Python garbage; 0: leave it to Python", check=at_least(0))
    profile: bool = option(False, "write a torch profiler trace into the run folder")
    profile_step_start: int = option(3, "first profiled step", check=at_least(1))
    profile_step_end: int = option(5, "last profiled step", check=at_least(1))
    tensorboard: bool = option(False, "write TensorBoard event files into the run folder")
    wandb: bool = option(False, "track with Weights & Biases; offline where there is no key")
    wandb_project: str = option("nanotrain", "Weights & Biases project")
    generate_tokens: int = option(0, "length of the sample the model writes when training ends; 0: none", unit="tokens", check=at_least(0))
    generate_prompt: str = option("", "text that the sample goes on from; empty: a new document")


@dataclass(frozen=True)
class Config:
    """The whole configuration; a component takes only the sections that it needs."""

    model: ModelConfig = section(ModelConfig)
    parallel: ParallelConfig = section(ParallelConfig)
    precision: PrecisionConfig = section(PrecisionConfig)
    optim: OptimConfig = section(OptimConfig)
    data: DataConfig = section(DataConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    train: TrainConfig = section(TrainConfig)
