"""The section of the optimizer and its schedules."""

from dataclasses import dataclass
from typing import Literal

from nanotrain.config.option import above, at_least, between, option

WSDDecayStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]
WeightDecayStyle = Literal["constant", "linear", "cosine"]
MuonScaleMode = Literal["spectral", "unit_rms_norm", "shape_scaling"]
MuonCoefficientType = Literal["simple", "quintic", "polar_express", "hybrid"]
NewtonSchulzAlgorithm = Literal["standard", "gram"]
MuonTPMode = Literal["distributed", "blockwise"]
MatmulPrecision = Literal["medium", "highest"]
MUON_OPTIMIZERS = ("muon", "normuon", "muon_h")  # update rules that orthogonalize matrices
FIXED_NORM_OPTIMIZERS = ("muon_h", "adam_h")  # update rules that fix the norms of matrices


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule."""

    optimizer: str = option("adam")
    """name of the update rule: adam (AdamW), sgd, lion, muon, normuon (a second moment per neuron),
    or muon_h and adam_h (Hyperball: fixed norms of matrices and of their updates)
    """

    lr: float = option(3e-4, check=above(0))
    """peak learning rate"""

    min_lr: float = option(0.0, check=at_least(0))
    """minimum learning rate, at the end of the decay"""

    lr_decay_style: str = option("cosine")
    """name of the learning-rate decay: constant, linear, cosine, inverse-square-root or WSD"""

    lr_decay_iters: int | None = option(None, check=at_least(1))
    """steps of the schedule, at the end of which lr is min_lr; unset: train_iters"""

    lr_warmup_iters: int = option(0, check=at_least(0))
    """steps of linear warmup"""

    lr_decay_samples: int | None = option(None, check=at_least(1))
    """the length of the schedule in samples, instead of lr_decay_iters"""

    lr_warmup_samples: int | None = option(None, check=at_least(0))
    """samples of linear warmup, instead of lr_warmup_iters"""

    lr_warmup_fraction: float | None = option(None, check=between(0, 1))
    """linear warmup as a fraction of the schedule, instead of lr_warmup_iters"""

    lr_warmup_init: float = option(0.0, check=at_least(0))
    """learning rate at the start of the warmup"""

    lr_wsd_decay_iters: int | None = option(None, check=at_least(1))
    """WSD: length of the final decay [steps]"""

    lr_wsd_decay_samples: int | None = option(None, check=at_least(1))
    """WSD: length of the final decay in samples, instead of lr_wsd_decay_iters"""

    lr_wsd_decay_style: WSDDecayStyle = option("exponential")
    """WSD: shape of the final decay: linear, cosine, exponential or minus_sqrt"""

    weight_decay: float = option(0.1, check=at_least(0))
    """decoupled weight decay; not applied to biases and 1-D parameters"""

    apply_wd_to_qk_layernorm: bool = option(False)
    """weight decay applies to the norms of qk_layernorm too (Qwen3-Next)"""

    apply_wd_to_all_params: bool = option(False)
    """weight decay applies to biases and 1-D parameters too (one group of torch.optim.AdamW)"""

    weight_decay_incr_style: WeightDecayStyle = option("constant")
    """how weight decay grows over the run: constant (weight_decay), linear or cosine (from
    start_weight_decay to end_weight_decay)
    """

    start_weight_decay: float | None = option(None, check=at_least(0))
    """weight decay of the first step, with weight_decay_incr_style"""

    end_weight_decay: float | None = option(None, check=at_least(0))
    """weight decay at the end of the run, with weight_decay_incr_style"""

    adam_beta1: float = option(0.9, check=between(0, 1))
    """decay rate of the first moment"""

    adam_beta2: float = option(0.95, check=between(0, 1))
    """decay rate of the second moment"""

    adam_eps: float = option(1e-8, check=above(0))
    """added to the square root of the second moment"""

    sgd_momentum: float = option(0.9, check=between(0, 1))
    """sgd: factor of the momentum buffer; 0: no momentum"""

    lion_beta1: float = option(0.95, check=between(0, 1))
    """lion: decay rate of the momentum inside the sign"""

    lion_beta2: float = option(0.98, check=between(0, 1))
    """lion: decay rate of the stored momentum"""

    muon_momentum: float = option(0.95, check=between(0, 1))
    """muon: decay rate of the momentum"""

    muon_use_nesterov: bool = option(False)
    """muon: Nesterov momentum"""

    muon_num_ns_steps: int = option(5, check=at_least(1))
    """muon: steps of the Newton-Schulz iteration"""

    muon_coefficient_type: MuonCoefficientType = option("simple")
    """muon: coefficients of the Newton-Schulz iteration: simple (the same in every step, as
    torch.optim.Muon), quintic (five steps, the default of Megatron-LM), polar_express, or hybrid
    (DeepSeek-V4: the last two steps bring singular values to 1)
    """

    muon_ns_algorithm: NewtonSchulzAlgorithm = option("standard")
    """muon: products of the Newton-Schulz iteration: standard, or gram (of matrices of the smaller
    side, with a restart after every second step; fewer FLOPs where a side is 1.5 times the other)
    """

    muon_scale_mode: MuonScaleMode = option("spectral")
    """muon: factor of the update by the shape of a matrix: spectral, unit_rms_norm or shape_scaling
    """

    muon_extra_scale_factor: float = option(1.0, check=above(0))
    """muon: further factor of the update; 0.2 with spectral matches the size of Adam's updates"""

    muon_tp_mode: MuonTPMode = option("distributed")
    """muon: distributed (full matrices, each at one rank) or blockwise (the block of each
    tensor-parallel rank alone)
    """

    normuon_beta2: float = option(0.95, check=between(0, 1))
    """normuon: decay rate of the second moment of the rows of an update"""

    normuon_eps: float = option(1e-8, check=above(0))
    """normuon: added to the square root of the second moment"""

    muon_split_qkv_per_head: bool = option(False)
    """muon: orthogonalize every head of queries, keys, values and output gates apart; in MLA's
    up-projections the channels with and without position and the values of every head
    """

    muon_fp32_matmul_prec: MatmulPrecision = option("medium")
    """muon: precision of the Newton-Schulz iteration: medium (bf16) or highest (fp32)"""

    muon_scalar_optimizer: str = option("adam")
    """muon: name of the update rule of all other parameters: adam or lion"""

    qk_clip: bool = option(False)
    """after every step scale down the query and key weights of heads with too large attention
    logits (MuonClip)
    """

    qk_clip_alpha: float = option(0.5, check=between(0, 1))
    """qk_clip: power of the factor that query weights are scaled by; key weights get the rest"""

    qk_clip_threshold: float = option(100.0, check=above(0))
    """qk_clip: attention logit that a head may reach"""

    decoupled_lr: float | None = option(None, check=above(0))
    """peak learning rate of the embedding and the output layer; unset: lr"""

    decoupled_min_lr: float | None = option(None, check=at_least(0))
    """minimum learning rate of the embedding and the output layer; unset: min_lr"""

    optimizer_cpu_offload: bool = option(False)
    """keep main parameters and optimizer state in host memory and update them there"""

    optimizer_offload_fraction: float = option(1.0, check=above(0))
    """optimizer_cpu_offload: fraction of the optimizer state in host memory"""

    ema_decay: float | None = option(None, check=between(0, 1))
    """decay rate of an exponential moving average of the weights, kept in fp32 and saved in
    checkpoints; unset: none
    """

    freeze: list[str] = option([])
    """patterns of parameters that are not trained, such as 'embedding.*': they have no gradient and
    no optimizer state; STAGE=PATTERN applies to one of data_stages
    """

    train_only: list[str] = option([])
    """patterns of the only parameters that are trained, such as 'layers.*.attention.indexer.*';
    STAGE=PATTERN applies to one of data_stages
    """

    clip_grad: float = option(1.0, check=at_least(0))
    """maximum global gradient norm; 0: no clipping"""


def has_trained_stages(optim: OptimConfig) -> bool:
    """Whether stages of the data may train other parameters: patterns begin with STAGE=."""
    return any("=" in pattern for pattern in (*optim.freeze, *optim.train_only))
