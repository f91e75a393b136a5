"""The model section of the configuration: the architecture of a GPT, its attention and its experts.

Fields are named as in Megatron-LM where it has them; `layer_kinds.py` has the sections of kinds of
layers, `config.py` those of other areas.
"""

from dataclasses import dataclass, replace
from math import lcm, log, sqrt
from typing import Literal, Self

from nanotrain.config.layer_kinds import (
    DSAConfig,
    LinearAttentionConfig,
    LinearAttentionType,
    MambaConfig,
    NormPlacement,
    SparseAttentionType,
)
from nanotrain.config.notation import (
    read_hybrid_pattern,
    read_layer_pattern,
    read_mtp_patterns,
)
from nanotrain.config.option import above, at_least, between, option, section
from nanotrain.errors import ConfigError
from nanotrain.quantities import round_up

PositionEmbedding = Literal["learned_absolute", "rope", "yarn", "none"]
Normalization = Literal["LayerNorm", "RMSNorm", "L2Norm"]
SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
Activation = Literal[
    "gelu", "gelu_tanh", "swiglu", "squared_relu", "quick_geglu", "geglu_tanh", "xielu"
]
GATED = ("swiglu", "quick_geglu", "geglu_tanh")
MLP_LETTERS = {"-": "dense", "E": "moe"}  # of hybrid_layer_pattern
RouterScore = Literal["softmax", "sigmoid"]
LoadBalancing = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "none"]


@dataclass(frozen=True)
class MLAConfig:
    """Multi-latent attention (DeepSeek-V2, section 2.1); used with multi_latent_attention."""

    q_lora_rank: int | None = option(
        None,
        "width of the compressed queries; unset: queries are projected directly",
        check=at_least(1),
    )
    kv_lora_rank: int = option(512, "width of the compressed keys and values", check=at_least(1))
    qk_head_dim: int = option(
        128, "channels of a query/key head without positions", check=at_least(1)
    )
    qk_pos_emb_head_dim: int = option(64, "rotary channels of a query/key head", check=at_least(1))
    v_head_dim: int = option(128, "channels of a value head", check=at_least(1))
    compressed_norm_epsilon: float | None = option(
        None,
        "MLA: norm_epsilon of the norms of compressed queries, keys and values; unset: as in the others",
        check=above(0),
    )
    scale_lora: bool = option(
        False,
        "MLA: multiply the normalized compressed queries, and keys and values, by sqrt(hidden_size / their width) (LongCat-Flash)",
        name="mla_scale_lora",
    )

    def lora_scales(self, hidden_size: int) -> tuple[float, float]:
        """The factors on compressed queries, and on compressed keys and values.

        >>> MLAConfig(q_lora_rank=64, kv_lora_rank=16, scale_lora=True).lora_scales(256)
        (2.0, 4.0)
        """
        ranks = (
            (self.q_lora_rank or hidden_size, self.kv_lora_rank)
            if self.scale_lora
            else (hidden_size, hidden_size)
        )
        return sqrt(hidden_size / ranks[0]), sqrt(hidden_size / ranks[1])


@dataclass(frozen=True)
class MoEConfig:
    """Mixture-of-experts layers and their router; used when num_experts is set."""

    num_experts: int = option(
        None,
        "experts per MoE layer; unset: every layer is dense",
        name="num_experts",
        check=at_least(1),
    )
    layer_freq: str = option(
        "1", "MoE layers: N for every Nth layer from the first, or a pattern such as [0]*3+[1]*58"
    )
    ffn_hidden_size: int | None = option(
        None, "inner width of an expert; unset: ffn_hidden_size", check=at_least(1)
    )
    num_zero_experts: int = option(
        0,
        "further experts that a router chooses from, which return their input (LongCat-Flash)",
        check=at_least(0),
    )
    shortcut: bool = option(
        False,
        "layers with experts have a second attention and a dense MLP as wide as the shared expert, after which the output of the experts is added (LongCat-Flash)",
    )
    latent_size: int | None = option(
        None,
        "width of the tokens that experts read and write, by projections before and after them (Nemotron 3 Super); unset: hidden_size",
        check=at_least(1),
    )
    shared_expert_intermediate_size: int | None = option(
        None, "inner width of the shared expert; unset: no shared expert", check=at_least(1)
    )
    shared_expert_gate: bool = option(
        False,
        "multiply the output of the shared expert by the sigmoid of a learned projection of the token",
    )
    router_topk: int = option(2, "experts per token", check=at_least(1))
    router_score_function: RouterScore = option(
        "softmax", "function of the router scores: softmax or sigmoid"
    )
    router_pre_softmax: bool = option(
        False,
        "softmax before the top-k selection, over all experts, instead of over the selected ones",
    )
    router_norm_epsilon: float = option(
        1e-20,
        "added to the sum of sigmoid scores by which those of the selected experts are divided",
        check=at_least(0),
    )
    router_topk_scaling_factor: float = option(
        1.0, "factor on the weights of the selected experts", check=above(0)
    )
    apply_probs_on_input: bool = option(
        False,
        "multiply the input of an expert by its weight instead of the output, with moe_router_topk 1 (Llama 4)",
    )
    router_num_groups: int | None = option(
        None, "group-limited routing: number of expert groups; unset: no groups", check=at_least(1)
    )
    router_group_topk: int | None = option(
        None, "group-limited routing: groups selected per token", check=at_least(1)
    )
    router_load_balancing_type: list[LoadBalancing] = option(
        ["seq_aux_loss"],
        "load-balancing losses: per microbatch, per sequence, over all ranks and the microbatches so far (weaker in Megatron-LM, see moe_divide_global_aux_loss_by_dp), or none",
    )
    router_force_load_balancing: bool = option(
        False, "send every token to experts in turn instead of the best ones, for benchmarks"
    )
    aux_loss_coeff: list[float] = option(
        [0.0], "coefficients of the load-balancing losses, one for each", check=at_least(0)
    )
    divide_global_aux_loss_by_dp: bool = option(
        False,
        "divide the coefficient of global_aux_loss by the number of data-parallel ranks, as Megatron-LM does in effect; the loss then depends on the layout",
    )
    z_loss_coeff: float = option(0.0, "coefficient of the router z-loss", check=at_least(0))
    router_enable_expert_bias: bool = option(
        False,
        "auxiliary-loss-free balancing: add a bias per expert to the scores for the top-k selection",
    )
    router_bias_update_rate: float = option(
        1e-3,
        "auxiliary-loss-free balancing: change of a bias per optimizer step",
        check=at_least(0),
    )
    expert_capacity_factor: float | None = option(
        None,
        "capacity factor: tokens per expert and sequence, relative to an even share; unset: no token is dropped",
        check=above(0),
    )

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
        """Whether there can be pairs of a token and an expert that are sent to no expert."""
        return self.expert_capacity_factor is not None or self.num_zero_experts > 0


@dataclass(frozen=True)
class MTPConfig:
    """Multi-token prediction (DeepSeek-V3, section 2.2); used when num_layers is set."""

    num_layers: int | None = option(
        None,
        "multi-token prediction: layers after the model, each of which predicts one token further; unset or 0: none",
        check=at_least(0),
    )
    loss_scaling_factor: float = option(
        0.1, "multi-token prediction: factor on the mean of the layers' losses", check=at_least(0)
    )


@dataclass(frozen=True)
class YarnConfig:
    """YaRN (Peng et al. 2023), RoPE for longer contexts; used with position_embedding_type yarn."""

    rotary_scaling_factor: float = option(
        1.0, "YaRN: factor between the context length and the original one", check=at_least(1)
    )
    original_max_position_embeddings: int = option(
        4096, "YaRN: context length before the extension", check=at_least(1)
    )
    beta_fast: float = option(
        32.0,
        "YaRN: pairs with more rotations in the original context are not scaled",
        check=above(0),
    )
    beta_slow: float = option(
        1.0,
        "YaRN: pairs with fewer rotations in the original context are scaled fully",
        check=above(0),
    )
    correction_range_round_to_int: bool = option(
        True,
        "YaRN: round the range of interpolated pairs to whole pairs",
        name="yarn_correction_range_round_to_int",
    )
    mscale: float = option(
        1.0, "YaRN: coefficient of the growth of cosines and sines", check=at_least(0)
    )
    query_scaling_beta: float = option(
        0.0,
        "YaRN: multiply a query by 1 + beta * log(1 + floor(position / original_max_position_embeddings)) (Ministral 3); 0: none",
        check=at_least(0),
    )
    mscale_all_dim: float = option(
        0.0,
        "YaRN: coefficient that divides it, with MLA of the growth of the softmax scale; 0: none",
        check=at_least(0),
    )

    @property
    def rotary_mscale(self) -> float:
        """The factor on the cosines and sines.

        >>> YarnConfig(rotary_scaling_factor=1.0).rotary_mscale
        1.0
        """
        return self._growth(self.mscale) / self._growth(self.mscale_all_dim)

    @property
    def softmax_mscale(self) -> float:
        """The factor on the softmax scale of MLA."""
        return self._growth(self.mscale_all_dim) ** 2

    def _growth(self, coefficient: float) -> float:
        """The logarithmic growth with the scaling factor (equation 22)."""
        return 0.1 * coefficient * log(self.rotary_scaling_factor) + 1.0


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of a GPT; names as in Megatron-LM."""

    num_layers: int = option(4, "transformer blocks", check=at_least(1, at_most=100_000))
    hidden_size: int = option(256, "width of the residual stream", check=at_least(1))
    ffn_hidden_size: int | None = option(
        None,
        "inner width of the MLP; unset: 4 * hidden_size, with swiglu 8/3 * hidden_size rounded up to a multiple of 64",
        check=at_least(1),
    )
    num_attention_heads: int = option(4, "query heads", check=at_least(1))
    num_query_groups: int | None = option(
        None,
        "key/value heads (grouped-query attention); unset: one per query head",
        check=at_least(1),
    )
    kv_channels: int | None = option(
        None, "channels of a head; unset: hidden_size / num_attention_heads", check=at_least(1)
    )
    value_channels: int | None = option(
        None, "channels of a value head (MiMo-V2); unset: kv_channels", check=at_least(1)
    )
    window_query_groups: int | None = option(
        None,
        "key/value heads in layers with a window (MiMo-V2); unset: as in the others",
        check=at_least(1),
    )
    max_position_embeddings: int = option(
        1024, "maximum sequence length of the model", check=at_least(1)
    )
    vocab_size: int | None = option(
        None, "size of the vocabulary; unset: from the tokenizer", check=at_least(1)
    )
    make_vocab_size_divisible_by: int = option(
        128, "pad the vocabulary to a multiple of this; padded logits are masked", check=at_least(1)
    )
    position_embedding_type: PositionEmbedding = option(
        "rope",
        "learned_absolute (GPT-2), rope (Llama, Qwen), yarn (RoPE for longer contexts) or none",
    )
    rotary_base: float = option(10000.0, "base of the rotary frequencies", check=above(0))
    rotary_percent: float = option(
        1.0, "share of the channels of a head that RoPE rotates, the first ones", check=above(0)
    )
    no_rope_freq: str = option(
        "0",
        "layers without rotary positions: N for every Nth layer, 0 for none, or a pattern such as [0]*3+[1] with 1 for each of them",
    )
    use_rope_scaling: bool = option(False, "RoPE frequency scaling of Llama 3.1")
    rope_scaling_factor: float = option(
        8.0, "Llama 3.1: factor on the wavelengths of low frequencies", check=above(0)
    )
    rope_low_freq_factor: float = option(
        1.0, "Llama 3.1: wavelengths above original / low are scaled fully", check=above(0)
    )
    rope_high_freq_factor: float = option(
        4.0, "Llama 3.1: wavelengths below original / high are not scaled", check=above(0)
    )
    rope_original_max_positions: int = option(
        8192, "Llama 3.1: context length before scaling", check=at_least(1)
    )
    rotary_base_local: float | None = option(
        None,
        "base of the rotary frequencies in layers with a window, which are then not scaled (Gemma 3); unset: as in the other layers",
        check=above(0),
    )
    rotary_seq_len_interpolation_factor: float = option(
        1.0, "rope: divide positions by this, for longer contexts", check=above(0)
    )
    normalization: Normalization = option(
        "RMSNorm", "LayerNorm, RMSNorm or L2Norm (RMSNorm without weights, nanochat)"
    )
    norm_epsilon: float = option(1e-5, "added to the variance in every norm", check=above(0))
    apply_layernorm_1p: bool = option(False, "store norm weights as their difference from 1")
    norm_placement: NormPlacement = option(
        "pre",
        "norms of a block: pre (before attention and MLP), post (of their outputs, OLMo 2) or sandwich (both, Gemma 3)",
    )
    activation: Activation = option(
        "swiglu",
        "gelu, gelu_tanh (GPT-2's approximation), swiglu (gated SiLU), squared_relu, quick_geglu (gated sigmoid GELU), geglu_tanh or xielu (with two learned weights, Apertus)",
    )
    glu_linear_offset: float = option(
        0.0,
        "gated activations: added to the linear part, activation(gate) * (up + offset) (gpt-oss)",
    )
    activation_func_clamp_value: float | None = option(
        None,
        "gated activations: clamp the gate from above and the linear part on both sides; unset: none",
        check=above(0),
    )
    add_bias_linear: bool = option(
        False, "biases on every linear layer except the head, of experts and routers too"
    )
    add_qkv_bias: bool = option(
        False, "biases on the query, key and value projections only (Qwen2)"
    )
    qk_layernorm: bool = option(
        False, "normalize each query and key head by a norm of the kind of the others (Qwen3)"
    )
    qk_layernorm_across_heads: bool = option(
        False, "qk_layernorm: one norm over all heads together instead of one per head (OLMo 2)"
    )
    qk_layernorm_after_rope: bool = option(
        False, "qk_layernorm: normalize queries and keys after their rotation (HunYuan)"
    )
    qk_l2_norm: bool = option(
        False,
        "normalize each query and key head by an RMSNorm without weights, in layers with rotary positions (Llama 4)",
    )
    attn_scale: float = option(
        0.0,
        "layers without rotary positions: multiply a query by 1 + attn_scale * log(1 + floor((position + 1) / floor_scale)) (Llama 4); 0: none",
        check=at_least(0),
    )
    floor_scale: int = option(
        8192,
        "layers without rotary positions: positions after which queries have the next factor of attn_scale",
        check=at_least(1),
    )
    softmax_scale: float | None = option(
        None, "factor on the attention scores; unset: 1 / sqrt(channels of a head)", check=above(0)
    )
    attn_logit_softcapping: float | None = option(
        None,
        "soft-cap attention scores by c * tanh(score / c) (Gemma 2); unset: none",
        check=above(0),
    )
    softmax_type: SoftmaxType = option(
        "vanilla",
        "attention sinks: vanilla (none), off-by-one (one more score of 0) or learnable (one per head, gpt-oss)",
    )
    sinks_in_windows_only: bool = option(
        False, "softmax_type learnable: layers without a window have no sinks (MiMo-V2)"
    )
    attention_dropout: float = option(
        0.0, "share of the attention weights that are dropped in training", check=between(0, 1)
    )
    hidden_dropout: float = option(
        0.0,
        "share of the outputs of embedding, attention and MLP that are dropped in training",
        check=between(0, 1),
    )
    window_size: int | None = option(
        None,
        "sliding-window attention: keys before its own that a query attends to, the left number of Megatron-LM's pair; unset: all",
        check=at_least(0),
    )
    attention_chunk_size: int | None = option(
        None,
        "layers with a window attend within chunks of this many positions, in place of a sliding window (Llama 4); unset: none",
        check=at_least(1),
    )
    window_attn_skip_freq: str = option(
        "0",
        "layers without the window: N for every Nth layer, 0 for none, or a pattern such as [1]*5+[0] with 0 for each of them",
    )
    untie_embeddings_and_output_weights: bool = option(
        False, "use separate weights for embedding and head"
    )
    scale_embeddings: bool = option(False, "multiply word embeddings by sqrt(hidden_size) (Gemma)")
    embedding_l2_norm: bool = option(
        False, "normalize word embeddings by an RMSNorm without weights (nanochat)"
    )
    embedding_multiplier: float = option(
        1.0, "factor on the word embeddings (Granite)", check=above(0)
    )
    residual_multiplier: float = option(
        1.0,
        "factor on the outputs of attention and MLP before the residual sum (Granite)",
        check=above(0),
    )
    attention_output_multiplier: float = option(
        1.0,
        "factor on the output of attention, of MLA none (Falcon-H1; MiMo-V2, where values have it)",
        check=above(0),
    )
    mlp_gate_multiplier: float = option(
        1.0, "gated activations: factor on the gate (Falcon-H1)", check=above(0)
    )
    mlp_output_multiplier: float = option(
        1.0, "factor on the outputs of MLPs before the residual sum (Falcon-H1)", check=above(0)
    )
    logits_scaling: float = option(
        1.0, "divisor of the logits, before their softcap (Granite)", check=above(0)
    )
    final_logit_softcapping: float | None = option(
        None, "soft-cap logits by c * tanh(logits / c); unset: none", check=above(0)
    )
    multi_latent_attention: bool = option(
        False, "multi-latent attention: low-rank compression of keys and values (DeepSeek)"
    )
    sparse_attention_type: SparseAttentionType | None = option(
        None,
        "dsa: multi-latent attention to the keys that an indexer selects (DeepSeek-V3.2); unset: to all",
    )
    attention_output_gate: bool = option(
        False,
        "multiply the output of attention by the sigmoid of a learned projection of the token (Qwen3-Next)",
    )
    hybrid_layer_pattern: str | None = option(
        None,
        "one letter per layer, which is then attention or an MLP alone: * attention, + multi-latent attention, M Mamba-2, G linear_attention_type, - MLP, E experts; | begins a pipeline stage, /*E and the like are layers of multi-token prediction; unset: layers have both",
    )
    linear_attention_type: LinearAttentionType | None = option(
        None,
        "layers in place of attention: gated_delta_net (Qwen3-Next), kda (Kimi Linear), mamba2 (Granite 4), attention_mamba2 (both side by side, Falcon-H1) or short_conv (LFM2); unset: none",
    )
    linear_attention_freq: str = option(
        "0",
        "layers with softmax attention beside linear_attention_type: N for every Nth layer, 0 for none, or a pattern such as [1]*3+[0] with 0 for each of them",
    )
    init_method_std: float = option(
        0.02,
        "standard deviation of the initial weights; output projections get std / sqrt(2 * num_layers)",
        check=above(0),
    )
    yarn: YarnConfig | None = section(YarnConfig, switch="position_embedding_type", value="yarn")
    linear_attention: LinearAttentionConfig | None = section(
        LinearAttentionConfig, prefix="linear_", switch="linear_attention_type"
    )
    mamba: MambaConfig = section(MambaConfig, prefix="mamba_")
    dsa: DSAConfig | None = section(
        DSAConfig, prefix="dsa_indexer_", switch="sparse_attention_type"
    )
    mla: MLAConfig | None = section(MLAConfig, switch="multi_latent_attention")
    moe: MoEConfig | None = section(MoEConfig, prefix="moe_", switch="num_experts")
    mtp: MTPConfig = section(MTPConfig, prefix="mtp_")

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate projection."""
        return self.activation in GATED

    @property
    def head_dim(self) -> int:
        """Channels of a query or key head; with multi-latent attention those without and with
        positions.

        >>> ModelConfig(hidden_size=256, num_attention_heads=4).head_dim
        64
        """
        if self.mla is not None:
            return self.mla.qk_head_dim + self.mla.qk_pos_emb_head_dim
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def value_head_dim(self) -> int:
        """Channels of a value head."""
        return self.value_channels or self.head_dim if self.mla is None else self.mla.v_head_dim

    @property
    def query_groups(self) -> int:
        """Key/value heads: one per query head by default, and with multi-latent attention."""
        return self.mla is None and self.num_query_groups or self.num_attention_heads

    @property
    def embedding_scale(self) -> float:
        """The factor on the word embeddings.

        >>> ModelConfig(hidden_size=256, scale_embeddings=True).embedding_scale
        16.0
        """
        return self.embedding_multiplier * (self.hidden_size**0.5 if self.scale_embeddings else 1.0)

    @property
    def has_rope(self) -> bool:
        """Whether queries and keys are rotated, plainly or by YaRN."""
        return self.position_embedding_type in ("rope", "yarn")

    @property
    def rotary_dim(self) -> int:
        """Rotated channels of a head; with MLA its rotary channels."""
        return (
            int(self.head_dim * self.rotary_percent)
            if self.mla is None
            else self.mla.qk_pos_emb_head_dim
        )

    @property
    def has_dropout(self) -> bool:
        """Whether training drops anything."""
        return self.attention_dropout > 0 or self.hidden_dropout > 0

    @property
    def has_score_options(self) -> bool:
        """Whether training changes attention scores or weights in addition to the softmax."""
        has_softcap = self.attn_logit_softcapping is not None
        return has_softcap or self.softmax_type != "vanilla" or self.attention_dropout > 0

    @property
    def ffn_size(self) -> int:
        """Inner width of the MLP: 4x hidden, or with swiglu 8/3x hidden rounded up to a multiple of
        64.

        With `moe.shortcut` all MLPs have the width of the shared expert.

        >>> ModelConfig(hidden_size=256).ffn_size, ModelConfig(hidden_size=256, activation="gelu").ffn_size
        (704, 1024)
        """
        moe = self.moe
        width = (
            moe.shared_expert_intermediate_size if moe and moe.shortcut else self.ffn_hidden_size
        )
        if width is not None:
            return width
        is_swiglu = self.activation == "swiglu"
        return round_up(-(-8 * self.hidden_size // 3), 64) if is_swiglu else 4 * self.hidden_size

    @property
    def moe_ffn_size(self) -> int:
        """Inner width of an expert."""
        return (
            self.ffn_size
            if self.moe is None or self.moe.ffn_hidden_size is None
            else self.moe.ffn_hidden_size
        )

    @property
    def expert_input_size(self) -> int:
        """Width of what experts read and write."""
        return (
            self.hidden_size
            if self.moe is None or self.moe.latent_size is None
            else self.moe.latent_size
        )

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: the vocabulary rounded up, so that every tensor-parallel size may
        divide it.

        Raises:
            ConfigError: the size of the vocabulary is not set.

        >>> ModelConfig(vocab_size=50257).padded_vocab_size
        50304
        """
        if self.vocab_size is None:
            why = "model.vocab_size is unset and no tokenizer was read"
            raise ConfigError(
                "the size of the vocabulary is not known yet", why=why, fix="set --vocab-size"
            )
        return round_up(self.vocab_size, self.make_vocab_size_divisible_by)

    def with_padding_for(self, tensor_parallel_size: int) -> Self:
        """The model with a vocabulary that this many ranks can share: where they cannot, it has
        more padding.

        >>> ModelConfig(vocab_size=257, make_vocab_size_divisible_by=1).with_padding_for(2).make_vocab_size_divisible_by
        2
        """
        if self.padded_vocab_size % tensor_parallel_size == 0:
            return self
        multiple = lcm(self.make_vocab_size_divisible_by, tensor_parallel_size)
        return replace(self, make_vocab_size_divisible_by=multiple)

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """Whether each layer has experts.

        Raises:
            ConfigError: a pattern that is invalid or does not have one 0 or 1 per layer.

        >>> ModelConfig(num_layers=4, moe=MoEConfig(num_experts=8, layer_freq="[0]*1+[1]*3")).moe_layers
        (False, True, True, True)
        """
        return tuple(kind == "moe" for kind in self.mlps)

    @property
    def mixers(self) -> tuple[str | None, ...]:
        """The kind of attention, or of what is in its place, of each layer; None for a layer that
        is an MLP alone.

        Raises:
            ConfigError: an invalid pattern.

        >>> ModelConfig(num_layers=3, linear_attention_type="short_conv", linear_attention_freq="3").mixers
        ('short_conv', 'short_conv', 'attention')
        """
        if self.hybrid_layer_pattern is not None:
            return tuple(map(self._letters.get, read_hybrid_pattern(self.hybrid_layer_pattern)))
        softmax = self._letters["*"]
        if self.linear_attention_type is None:
            return (softmax,) * self.num_layers
        layers = read_layer_pattern(
            "linear_attention_freq", self.linear_attention_freq, num_layers=self.num_layers
        )
        return tuple(self.linear_attention_type if is_linear else softmax for is_linear in layers)

    @property
    def _letters(self) -> dict[str, str | None]:
        """The kinds of attention, or of what is in its place, by their letters in
        `hybrid_layer_pattern`.
        """
        softmax = "attention" if self.mla is None else "mla" if self.dsa is None else "dsa"
        return {"*": softmax, "+": softmax, "G": self.linear_attention_type, "M": "mamba2"}

    @property
    def mamba_heads(self) -> int:
        """Heads of a layer of Mamba-2."""
        return self.mamba.num_heads or 2 * self.hidden_size // self.mamba.head_dim

    @property
    def mlps(self) -> tuple[str | None, ...]:
        """The kind of MLP of each layer, dense or moe; None for a layer without one."""
        if self.hybrid_layer_pattern is not None:
            return tuple(map(MLP_LETTERS.get, read_hybrid_pattern(self.hybrid_layer_pattern)))
        moe = self.moe
        # a model that is not complete yet has other settings of experts
        if moe is None or moe.num_experts is None:
            return ("dense",) * self.num_layers
        return tuple(
            "moe" if has else "dense"
            for has in read_layer_pattern(
                "moe_layer_freq", moe.layer_freq, num_layers=self.num_layers
            )
        )

    @property
    def mtp_kinds(self) -> tuple[str | None, str | None] | None:
        """The kinds of attention and MLP of a layer of multi-token prediction; None for those of
        the last layer.

        >>> ModelConfig(hybrid_layer_pattern="M-*-/*-").mtp_kinds, ModelConfig().mtp_kinds
        (('attention', 'dense'), None)
        """
        if not (patterns := read_mtp_patterns(self.hybrid_layer_pattern or "")):
            return None
        return self._letters[patterns[0][0]], MLP_LETTERS[patterns[0][1]]

    @property
    def window_layers(self) -> tuple[bool, ...]:
        """Whether each layer attends within a window; a ConfigError for an invalid pattern."""
        if self.window_size is None and self.attention_chunk_size is None:
            return (False,) * self.num_layers
        return read_layer_pattern(
            "window_attn_skip_freq", self.window_attn_skip_freq, num_layers=self.num_layers
        )

    @property
    def no_rope_layers(self) -> tuple[bool, ...]:
        """Whether each layer is without rotary positions, in a model that has them; see
        `window_layers`.
        """
        return read_layer_pattern("no_rope_freq", self.no_rope_freq, num_layers=self.num_layers)
