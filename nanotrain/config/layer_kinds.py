"""Nested sections of the model, one per kind of layer.

LINEAR_ATTENTION                        kinds of layers in place of attention
MLAConfig, DSAConfig                    multi-latent attention, sparse attention
LinearAttentionConfig, MambaConfig      layers with a state
MoEConfig, MTPConfig                    experts, multi-token prediction
"""

from dataclasses import dataclass
from math import sqrt
from typing import Literal

from nanotrain.config.option import above, at_least, between, option

NormPlacement = Literal["pre", "post", "sandwich"]
ResidualType = Literal["plain", "parallel", "gated", "hyper_connections", "mhc", "attention"]
STREAMS = ("hyper_connections", "mhc", "attention")  # residual types with several streams
SparseAttentionType = Literal["dsa", "blocks", "compressed"]
LinearAttentionType = Literal["gated_delta_net", "kda", "mamba2", "attention_mamba2", "short_conv"]
RouterScore = Literal["softmax", "sigmoid", "sqrtsoftplus"]
LoadBalancing = Literal[
    "aux_loss", "seq_aux_loss", "global_aux_loss", "quantile_balancing", "sinkhorn", "none"
]


@dataclass(frozen=True)
class LinearAttentionKind:
    """Properties of a kind of linear attention that the rules read.

    Args:
        has_delta_rule: whether it has key and value heads, of the sizes linear_num_key_heads and so
            on.
        has_mamba: whether it has the sizes of Mamba-2.
        shards_hidden_size: whether tp shards as many channels as the hidden state has.
    """

    has_delta_rule: bool = False
    has_mamba: bool = False
    shards_hidden_size: bool = False


LINEAR_ATTENTION: dict[str, LinearAttentionKind] = {
    "gated_delta_net": LinearAttentionKind(has_delta_rule=True),
    "kda": LinearAttentionKind(has_delta_rule=True),
    "mamba2": LinearAttentionKind(has_mamba=True),
    "attention_mamba2": LinearAttentionKind(has_mamba=True),
    "short_conv": LinearAttentionKind(shards_hidden_size=True),
}


def linear_attention_kind(mixer: str | None) -> LinearAttentionKind | None:
    """The row of a token mixer; None for softmax attention and for a layer without a mixer."""
    return None if mixer is None else LINEAR_ATTENTION.get(mixer)


@dataclass(frozen=True)
class MLAConfig:
    """Multi-latent attention (DeepSeek-V2, section 2.1); used with multi_latent_attention."""

    q_lora_rank: int | None = option(None, check=at_least(1))
    """width of the compressed queries; unset: queries are projected directly"""

    kv_lora_rank: int = option(512, check=at_least(1))
    """width of the compressed keys and values"""

    qk_head_dim: int = option(128, check=at_least(1))
    """channels of a query/key head without positions"""

    qk_pos_emb_head_dim: int = option(64, check=at_least(1))
    """rotary channels of a query/key head"""

    v_head_dim: int = option(128, check=at_least(1))
    """channels of a value head"""

    compressed_norm_epsilon: float | None = option(None, check=above(0))
    """MLA: norm_epsilon of the norms of compressed queries, keys and values; unset: as in the
    others
    """

    scale_lora: bool = option(False, name="mla_scale_lora")
    """MLA: multiply the normalized compressed queries, and keys and values, by sqrt(hidden_size /
    their width) (LongCat-Flash)
    """

    def lora_scales(self, hidden_size: int) -> tuple[float, float]:
        """The factors on compressed queries, and on compressed keys and values.

        >>> MLAConfig(q_lora_rank=64, kv_lora_rank=16, scale_lora=True).lora_scales(256)
        (2.0, 4.0)
        """
        if not self.scale_lora:
            return 1.0, 1.0
        query_rank = self.q_lora_rank or hidden_size
        return sqrt(hidden_size / query_rank), sqrt(hidden_size / self.kv_lora_rank)


@dataclass(frozen=True)
class DSAConfig:
    """The indexer of sparse attention (DeepSeek-V3.2, section 2.1; MiniMax-M3); used with
    sparse_attention_type.
    """

    n_heads: int = option(64, check=at_least(1))
    """sparse attention: index heads; with blocks as many as there are query groups"""

    head_dim: int = option(128, check=at_least(1))
    """sparse attention: channels of an index head; the first qk_pos_emb_head_dim are rotary"""

    topk: int = option(2048, check=at_least(1))
    """sparse attention: keys that a query attends to"""

    share_freq: str = option("0")
    """sparse attention: layers without an indexer, which attend to the keys that the last earlier
    indexer selected (GLM-5.2): N for every Nth layer, 0 for none, or a pattern such as [0]+[1]*3
    with 1 for each of them
    """

    loss_coeff: float = option(1e-3, check=at_least(0))
    """sparse attention: coefficient of the indexer's loss; 0: the indexer gets no gradient"""

    use_sparse_loss: bool = option(False)
    """sparse attention: the indexer's loss is over the selected keys instead of all"""

    k_norm_epsilon: float = option(1e-6, check=above(0))
    """sparse attention: added to the variance in the norm of index keys, and of index queries"""

    block_size: int = option(128, check=at_least(1))
    """blocks: keys that are selected together; it divides dsa_indexer_topk"""

    num_local_blocks: int = option(1, check=at_least(0))
    """blocks: of the selected blocks, that of the query and the ones just before it"""

    layer_freq: str = option("1")
    """blocks: layers that select, N for every Nth layer from the first, or a pattern such as
    [0]*3+[1]*57; the others attend to all keys
    """

    @property
    def topk_blocks(self) -> int:
        """Blocks that a query attends to."""
        return self.topk // self.block_size


@dataclass(frozen=True)
class CompressedAttentionConfig:
    """Attention to a window and to compressed keys (DeepSeek-V4, section 2.3); used with
    sparse_attention_type compressed.
    """

    layer_pattern: str | None = option(None)
    """compressed attention: a letter per layer, or per layer of a group that is repeated: W the
    window alone, C also the compressed keys that an indexer selects, H also all heavily compressed
    keys; unset: HH, then H and C in turn
    """

    sparse_ratio: int = option(4, check=at_least(2))
    """compressed attention: tokens of a compressed key in layers C"""

    heavy_ratio: int = option(128, check=at_least(2))
    """compressed attention: tokens of a compressed key in layers H"""

    q_lora_rank: int = option(1024, check=at_least(1))
    """compressed attention: width of the compressed queries"""

    output_groups: int = option(8, check=at_least(1))
    """compressed attention: groups of heads, each with a first output projection of its own"""

    output_lora_rank: int = option(1024, check=at_least(1))
    """compressed attention: outputs of the first output projection of a group"""


@dataclass(frozen=True)
class LinearAttentionConfig:
    """Layers with a state in place of keys and values; used with linear_attention_type."""

    conv_kernel_dim: int = option(4, check=at_least(2))
    """linear attention: tokens that a short convolution sees, its own included"""

    key_head_dim: int = option(128, check=at_least(1))
    """linear attention: channels of a query or key head"""

    value_head_dim: int = option(128, check=at_least(1))
    """linear attention: channels of a value head"""

    num_key_heads: int = option(16, check=at_least(1))
    """linear attention: query and key heads"""

    num_value_heads: int = option(32, check=at_least(1))
    """linear attention: value heads"""

    allow_neg_eigval: bool = option(False)
    """linear attention: corrections of up to twice the error, so states may change their sign (OLMo
    Hybrid)
    """

    decay_bound: float | None = option(None, check=above(0))
    """kda: the logarithm of a decay is -decay_bound times a sigmoid, which is never below
    -decay_bound (Ling 3); unset: minus a softplus, without a bound
    """

    full_rank_gates: bool = option(False)
    """kda: the gate and the steps of decays are one projection each, in place of two of low rank
    (Ling 3)
    """

    norm_epsilon: float | None = option(None, check=above(0))
    """linear attention: norm_epsilon of the norm of its outputs; unset: as in the others"""

    norm_placement: NormPlacement | None = option(None)
    """linear attention: norm_placement of its layers; unset: as in the others (OLMo Hybrid: pre
    beside post)
    """


@dataclass(frozen=True)
class MambaConfig:
    """Mamba-2 (Dao and Gu 2024); used in layers of that kind."""

    state_dim: int = option(128, check=at_least(1))
    """Mamba-2: channels of a key or query, and rows of a state"""

    head_dim: int = option(64, check=at_least(1))
    """Mamba-2: channels of a value head"""

    num_groups: int = option(8, check=at_least(1))
    """Mamba-2: groups of heads with one key and query"""

    num_heads: int | None = option(None, check=at_least(1))
    """Mamba-2: value heads; unset: 2 * hidden_size / mamba_head_dim"""

    conv_kernel_dim: int = option(4, check=at_least(2))
    """Mamba-2: tokens that a short convolution sees, its own included"""

    time_step_min: float = option(0.0, check=at_least(0))
    """Mamba-2: lower bound of the steps of tokens"""

    rms_norm: bool = option(True)
    """Mamba-2: normalize the gated outputs of every group"""

    multipliers: list[float] = option([1.0] * 5)
    """Mamba-2: factors on gate, value, key, query and step (Falcon-H1)"""

    output_multiplier: float = option(1.0, check=above(0))
    """attention_mamba2: factor on the output of Mamba-2"""


@dataclass(frozen=True)
class MoEConfig:
    """Mixture-of-experts layers and their router; used when num_experts is set."""

    num_experts: int = option(None, name="num_experts", check=at_least(1, at_most=100_000))
    """experts per MoE layer; unset: every layer is dense"""

    layer_freq: str = option("1")
    """MoE layers: N for every Nth layer from the first, or a pattern such as [0]*3+[1]*58"""

    hash_layers: str = option("0")
    """MoE layers in which the token id alone chooses the experts, by a table, and the router only
    weighs them (DeepSeek-V4): N for every Nth layer, 0 for none, or a pattern such as [1]*3+[0]*40
    """

    ffn_hidden_size: int | None = option(None, check=at_least(1, at_most=10_000_000))
    """inner width of an expert; unset: ffn_hidden_size"""

    num_zero_experts: int = option(0, check=at_least(0))
    """further experts that a router chooses from, which return their input (LongCat-Flash)"""

    shortcut: bool = option(False)
    """layers with experts have a second attention and a dense MLP as wide as the shared expert,
    after which the output of the experts is added (LongCat-Flash)
    """

    latent_size: int | None = option(None, check=at_least(1))
    """width of the tokens that experts read and write, by projections before and after them
    (Nemotron 3 Super); unset: hidden_size
    """

    shared_expert_intermediate_size: int | None = option(None, check=at_least(1))
    """inner width of the shared expert; unset: no shared expert"""

    separate_norms: bool = option(False)
    """the shared expert and the routed experts have norms of their inputs and outputs of their own,
    and the router a learned vector on its input and a learned factor per expert (Gemma 4)
    """

    shared_expert_average: bool = option(False)
    """the output is the mean of the routed experts and the shared expert, in place of their sum
    (Cohere 2 MoE)
    """

    output_norm: bool = option(False)
    """normalize the outputs of layers with experts, and not of dense MLPs (A.X-K1)"""

    shared_expert_gate: bool = option(False)
    """multiply the output of the shared expert by the sigmoid of a learned projection of the token
    """

    router_topk: int = option(2, check=at_least(1))
    """experts per token"""

    router_score_function: RouterScore = option("softmax")
    """function of the router scores: softmax, sigmoid, or the square root of softplus (DeepSeek-V4)
    """

    router_pre_softmax: bool = option(False)
    """softmax before the top-k selection, over all experts, instead of over the selected ones"""

    router_norm_epsilon: float = option(1e-20, check=at_least(0))
    """added to the sum of sigmoid or sqrtsoftplus scores by which those of the selected experts are
    divided
    """

    router_topk_scaling_factor: float = option(1.0, check=above(0))
    """factor on the weights of the selected experts"""

    apply_probs_on_input: bool = option(False)
    """multiply the input of an expert by its weight instead of the output, with moe_router_topk 1
    (Llama 4)
    """

    router_num_groups: int | None = option(None, check=at_least(1))
    """group-limited routing: number of expert groups; unset: no groups"""

    router_group_topk: int | None = option(None, check=at_least(1))
    """group-limited routing: groups selected per token"""

    router_load_balancing_type: list[LoadBalancing] = option(["seq_aux_loss"])
    """load-balancing losses: per microbatch, per sequence, over all ranks and the microbatches so
    far (weaker in Megatron-LM, see moe_divide_global_aux_loss_by_dp), or none; quantile_balancing
    is no loss: once per step it sets the bias of every expert from the scores of the global batch;
    sinkhorn is none either: in training the tokens of a sequence choose experts about equally often
    """

    router_force_load_balancing: bool = option(False)
    """send every token to experts in turn instead of the best ones, for benchmarks"""

    aux_loss_coeff: list[float] = option([0.0], check=at_least(0))
    """coefficients of the load-balancing losses, one for each"""

    divide_global_aux_loss_by_dp: bool = option(False)
    """divide the coefficient of global_aux_loss by the number of data-parallel ranks, as
    Megatron-LM does in effect; the loss then depends on the layout
    """

    z_loss_coeff: float = option(0.0, check=at_least(0))
    """coefficient of the router z-loss"""

    router_enable_expert_bias: bool = option(False)
    """auxiliary-loss-free balancing: add a bias per expert to the scores for the top-k selection"""

    router_bias_update_rate: float = option(1e-3, check=at_least(0))
    """auxiliary-loss-free balancing: change of a bias per optimizer step"""

    router_quantile_balancing_ema: float = option(0.0, check=between(0, 1))
    """quantile_balancing: factor of the last bias; 0: the bias is that of the last step's scores"""

    router_qb_num_bins: int = option(1000, check=at_least(2))
    """quantile_balancing: bins of equal width in which scores are counted, per expert"""

    expert_capacity_factor: float | None = option(None, check=above(0))
    """capacity factor: tokens per expert and sequence, relative to an even share; unset: no token
    is dropped
    """

    @property
    def balances_quantiles(self) -> bool:
        """Whether the biases of experts are quantiles of the scores."""
        return "quantile_balancing" in self.router_load_balancing_type

    @property
    def uses_sinkhorn(self) -> bool:
        """Whether experts are chosen by Sinkhorn's algorithm."""
        return "sinkhorn" in self.router_load_balancing_type

    @property
    def num_choices(self) -> int:
        """Experts that a router chooses from."""
        return self.num_experts + self.num_zero_experts

    @property
    def mean_topk(self) -> float:
        """Experts with weights that a token is sent to, on average."""
        return self.router_topk * self.num_experts / self.num_choices

    @property
    def may_drop(self) -> bool:
        """Whether a token may be sent to fewer experts than its router selects."""
        return self.expert_capacity_factor is not None or self.num_zero_experts > 0


@dataclass(frozen=True)
class MTPConfig:
    """Multi-token prediction (DeepSeek-V3, section 2.2); used when num_layers is set."""

    num_layers: int | None = option(None, check=at_least(0))
    """multi-token prediction: layers after the model, each of which predicts one token further;
    unset or 0: none
    """

    loss_scaling_factor: float = option(0.1, check=at_least(0))
    """multi-token prediction: factor on the mean of the layers' losses"""

    use_repeated_layer: bool = option(False)
    """multi-token prediction: one layer predicts all mtp_num_layers tokens further, one after
    another
    """

    @property
    def num_own_layers(self) -> int:
        """Layers with weights of their own."""
        number = self.num_layers or 0
        return min(number, 1) if self.use_repeated_layer else number
