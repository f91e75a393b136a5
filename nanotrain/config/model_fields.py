"""The fields of the model section, and the section of YaRN.

Fields are named as in Megatron-LM where it has them. `model.py` has what follows from them,
`layer_kinds.py` the other nested sections.
"""

from dataclasses import dataclass
from math import log
from typing import Literal

from nanotrain.config.layer_kinds import (
    CompressedAttentionConfig,
    DSAConfig,
    LinearAttentionConfig,
    LinearAttentionType,
    MambaConfig,
    MLAConfig,
    MoEConfig,
    MTPConfig,
    NormPlacement,
    ResidualType,
    SparseAttentionType,
)
from nanotrain.config.option import above, at_least, between, option, section

PositionEmbedding = Literal["learned_absolute", "rope", "yarn", "longrope", "none"]
Normalization = Literal["LayerNorm", "RMSNorm", "L2Norm"]
LayerNormParameters = Literal["weight_and_bias", "weight", "none"]
GateActivation = Literal["sigmoid", "softplus"]
SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
Activation = Literal[
    "gelu", "gelu_tanh", "relu", "swiglu", "squared_relu", "quick_geglu", "geglu_tanh", "xielu"
]


@dataclass(frozen=True)
class YarnConfig:
    """YaRN (Peng et al. 2023), RoPE for longer contexts; used with position_embedding_type yarn."""

    rotary_scaling_factor: float = option(1.0, check=at_least(1))
    """YaRN: factor between the context length and the original one"""

    original_max_position_embeddings: int = option(4096, check=at_least(1))
    """YaRN: context length before the extension"""

    beta_fast: float = option(32.0, check=above(0))
    """YaRN: pairs with more rotations in the original context are not scaled"""

    beta_slow: float = option(1.0, check=above(0))
    """YaRN: pairs with fewer rotations in the original context are scaled fully"""

    correction_range_round_to_int: bool = option(True, name="yarn_correction_range_round_to_int")
    """YaRN: round the range of interpolated pairs to whole pairs"""

    mscale: float = option(1.0, check=at_least(0))
    """YaRN: coefficient of the growth of cosines and sines"""

    query_scaling_beta: float = option(0.0, check=at_least(0))
    """YaRN: multiply a query by 1 + beta * log(1 + floor(position /
    original_max_position_embeddings)) (Ministral 3); 0: none
    """

    mscale_all_dim: float = option(0.0, check=at_least(0))
    """YaRN: coefficient that divides it, with MLA of the growth of the softmax scale; 0: none"""

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
class LongRopeConfig:
    """LongRoPE (Ding et al. 2024); used with position_embedding_type longrope (Phi-3)."""

    short_factor: list[float] = option([], check=above(0))
    """LongRoPE: divisor of the frequency of every pair in sequences up to
    longrope_original_max_positions
    """

    long_factor: list[float] = option([], check=above(0))
    """LongRoPE: divisor of the frequency of every pair in longer sequences"""

    original_max_positions: int = option(4096, check=at_least(1))
    """LongRoPE: context length before the extension"""

    attention_factor: float = option(1.0, check=above(0))
    """LongRoPE: factor on the cosines and sines"""


@dataclass(frozen=True)
class ModelFields:
    """Fields and nested sections of `ModelConfig`."""

    num_layers: int = option(4, check=at_least(1, at_most=100_000))
    """transformer blocks"""

    hidden_size: int = option(256, check=at_least(1, at_most=200_000))
    """width of the residual stream"""

    ffn_hidden_size: int | None = option(None, check=at_least(1, at_most=10_000_000))
    """inner width of the MLP; unset: 4 * hidden_size, with swiglu 8/3 * hidden_size rounded up to a
    multiple of 64
    """

    num_attention_heads: int = option(4, check=at_least(1, at_most=100_000))
    """query heads"""

    num_query_groups: int | None = option(None, check=at_least(1))
    """key/value heads (grouped-query attention); unset: one per query head"""

    use_double_wide_mlp: bool = option(False)
    """layers of num_kv_shared_layers have a dense MLP of twice the width (Gemma 4)"""

    kv_channels: int | None = option(None, check=at_least(1, at_most=100_000))
    """channels of a head; unset: hidden_size / num_attention_heads"""

    value_channels: int | None = option(None, check=at_least(1))
    """channels of a value head (MiMo-V2); unset: kv_channels"""

    window_kv_channels: int | None = option(None, check=at_least(1))
    """channels of a head in layers with a window (Gemma 4); unset: kv_channels"""

    window_num_attention_heads: int | None = option(None, check=at_least(1, at_most=100_000))
    """query heads in layers with a window (Laguna); unset: as in the others"""

    window_query_groups: int | None = option(None, check=at_least(1))
    """key/value heads in layers with a window (MiMo-V2); unset: as in the others"""

    attention_k_eq_v: bool = option(False)
    """layers without a window: values are the projected keys, before their norm and rotation (Gemma
    4)
    """

    value_l2_norm: bool = option(False)
    """normalize each value head by an RMSNorm without weights (Gemma 4)"""

    num_kv_shared_layers: int = option(0, check=at_least(0))
    """last layers whose attention reads keys and values of the last earlier layer of its type, with
    or without a window, and has no projections of its own (Gemma 4); 0: none
    """

    max_position_embeddings: int = option(1024, check=at_least(1))
    """maximum sequence length of the model"""

    vocab_size: int | None = option(None, check=at_least(1, at_most=1_000_000_000))
    """size of the vocabulary; unset: from the tokenizer"""

    make_vocab_size_divisible_by: int = option(128, check=at_least(1))
    """pad the vocabulary to a multiple of this; padded logits are masked"""

    position_embedding_type: PositionEmbedding = option("rope")
    """learned_absolute (GPT-2), rope (Llama, Qwen), yarn or longrope (RoPE for longer contexts) or
    none
    """

    learned_position_offset: int = option(0, check=at_least(0))
    """position_embedding_type learned_absolute: rows of the table before that of the first
    position, which nothing reads (OPT)
    """

    rotary_base: float = option(10000.0, check=above(0))
    """base of the rotary frequencies"""

    rotary_percent: float = option(1.0, check=above(0))
    """share of the channels of a head that RoPE rotates, the first ones"""

    rotary_proportional: bool = option(False)
    """layers without a window: rotate rotary_percent of the pairs of a full head, by the
    frequencies of a full head; layers with a window rotate all channels (Gemma 4)
    """

    no_rope_freq: str = option("0")
    """layers without rotary positions: N for every Nth layer, 0 for none, or a pattern such as
    [0]*3+[1] with 1 for each of them
    """

    window_rotary_percent: float | None = option(None, check=above(0))
    """rotary_percent of layers with a window (Laguna); unset: as in the others"""

    use_rope_scaling: bool = option(False)
    """RoPE frequency scaling of Llama 3.1"""

    rope_scaling_factor: float = option(8.0, check=above(0))
    """Llama 3.1: factor on the wavelengths of low frequencies"""

    rope_low_freq_factor: float = option(1.0, check=above(0))
    """Llama 3.1: wavelengths above original / low are scaled fully"""

    rope_high_freq_factor: float = option(4.0, check=above(0))
    """Llama 3.1: wavelengths below original / high are not scaled"""

    rope_original_max_positions: int = option(8192, check=at_least(1))
    """Llama 3.1: context length before scaling"""

    rotary_base_local: float | None = option(None, check=above(0))
    """base of the rotary frequencies in layers with a window, which are then not scaled (Gemma 3);
    unset: as in the other layers
    """

    rotary_seq_len_interpolation_factor: float = option(1.0, check=above(0))
    """rope: divide positions by this, for longer contexts"""

    normalization: Normalization = option("RMSNorm")
    """LayerNorm, RMSNorm or L2Norm (RMSNorm without weights, nanochat)"""

    layernorm_parameters: LayerNormParameters = option("weight_and_bias")
    """LayerNorm: weight_and_bias, weight (Cohere) or none (OLMo 1)"""

    norm_epsilon: float = option(1e-5, check=above(0))
    """added to the variance in every norm"""

    apply_layernorm_1p: bool = option(False)
    """store norm weights as their difference from 1"""

    norm_placement: NormPlacement = option("pre")
    """norms of a block: pre (before attention and MLP), post (of their outputs, OLMo 2) or sandwich
    (both, Gemma 3)
    """

    residual_type: ResidualType = option("plain")
    """plain (attention, then the MLP), parallel (side by side, of one input: GPT-J, GPT-NeoX),
    gated (a learned weight per channel: Muse Spark), hyper_connections (several streams with
    learned weights), mhc (the same, with a doubly stochastic matrix: DeepSeek-V4) or attention (to
    the embedding and blocks of layers: block attention residuals, Kimi)
    """

    parallel_shared_norm: bool = option(False)
    """residual_type parallel: attention and MLP read one norm (GPT-J, Cohere); off: each its own
    (GPT-NeoX)
    """

    residual_gate_temperature: float = option(0.3, check=above(0))
    """residual_type gated: divisor of the learned weights"""

    residual_streams: int = option(4, check=at_least(2, at_most=64))
    """residual_type hyper_connections, mhc or attention: streams; of attention the embedding and
    blocks of layers
    """

    mhc_sinkhorn_iterations: int = option(20, check=at_least(1, at_most=1000))
    """residual_type mhc: divisions of rows and columns by their sums"""

    mhc_epsilon: float = option(1e-6, check=above(0))
    """residual_type mhc: added to weights and sums"""

    activation: Activation = option("swiglu")
    """gelu, gelu_tanh (GPT-2's approximation), relu (OPT), swiglu (gated SiLU), squared_relu,
    quick_geglu (gated sigmoid GELU), geglu_tanh or xielu (with two learned weights, Apertus)
    """

    glu_linear_offset: float = option(0.0)
    """gated activations: added to the linear part, activation(gate) * (up + offset) (gpt-oss)"""

    activation_func_clamp_value: float | None = option(None, check=above(0))
    """gated activations: clamp the gate from above and the linear part on both sides; unset: none
    """

    add_bias_linear: bool = option(False)
    """biases on every linear layer except the head, of experts and routers too"""

    add_qkv_bias: bool = option(False)
    """biases on the query, key and value projections only (Qwen2)"""

    add_attention_output_bias: bool = option(False)
    """biases on the output projections of attention only (GPT-Neo)"""

    add_mlp_bias: bool = option(False)
    """biases on the projections of dense MLPs and shared experts only (GPT-J)"""

    add_head_bias: bool = option(False)
    """a bias on the logits (GPT-J, Phi)"""

    qk_layernorm: bool = option(False)
    """normalize each query and key head by a norm of the kind of the others (Qwen3)"""

    qk_layernorm_across_heads: bool = option(False)
    """qk_layernorm: one norm over all heads together instead of one per head (OLMo 2)"""

    qk_layernorm_after_rope: bool = option(False)
    """qk_layernorm: normalize queries and keys after their rotation (HunYuan)"""

    qk_l2_norm: bool = option(False)
    """normalize each query and key head by an RMSNorm without weights, in layers with rotary
    positions (Llama 4)
    """

    attn_scale: float = option(0.0, check=at_least(0))
    """layers without rotary positions: multiply a query by 1 + attn_scale * log(1 + floor((position
    + 1) / floor_scale)) (Llama 4); 0: none
    """

    floor_scale: int = option(8192, check=at_least(1))
    """layers without rotary positions: positions after which queries have the next factor of
    attn_scale
    """

    softmax_scale: float | None = option(None, check=above(0))
    """factor on the attention scores; unset: 1 / sqrt(channels of a head)"""

    attn_logit_softcapping: float | None = option(None, check=above(0))
    """soft-cap attention scores by c * tanh(score / c) (Gemma 2); unset: none"""

    softmax_type: SoftmaxType = option("vanilla")
    """attention sinks: vanilla (none), off-by-one (one more score of 0) or learnable (one per head,
    gpt-oss)
    """

    sinks_in_windows_only: bool = option(False)
    """softmax_type learnable: layers without a window have no sinks (MiMo-V2)"""

    attention_dropout: float = option(0.0, check=between(0, 1))
    """share of the attention weights that are dropped in training"""

    hidden_dropout: float = option(0.0, check=between(0, 1))
    """share of the outputs of embedding, attention and MLP that are dropped in training"""

    window_size: int | None = option(None, check=at_least(0))
    """sliding-window attention: keys before its own that a query attends to, the left number of
    Megatron-LM's pair; unset: all
    """

    attention_chunk_size: int | None = option(None, check=at_least(1))
    """layers with a window attend within chunks of this many positions, in place of a sliding
    window (Llama 4); unset: none
    """

    window_attn_skip_freq: str = option("0")
    """layers without the window: N for every Nth layer, 0 for none, or a pattern such as [1]*5+[0]
    with 0 for each of them
    """

    untie_embeddings_and_output_weights: bool = option(False)
    """use separate weights for embedding and head"""

    scale_embeddings: bool = option(False)
    """multiply word embeddings by sqrt(hidden_size) (Gemma)"""

    layer_input_size: int = option(0, check=at_least(0))
    """channels of the input of its own that each layer reads, from a second embedding of the tokens
    and a projection of the first (Gemma 4); 0: none
    """

    embedding_l2_norm: bool = option(False)
    """normalize word embeddings by an RMSNorm without weights (nanochat)"""

    embedding_multiplier: float = option(1.0, check=above(0))
    """factor on the word embeddings (Granite)"""

    residual_multiplier: float = option(1.0, check=above(0))
    """factor on the outputs of attention and MLP before the residual sum (Granite)"""

    attention_output_multiplier: float = option(1.0, check=above(0))
    """factor on the output of attention, of MLA none (Falcon-H1; MiMo-V2, where values have it)"""

    mlp_gate_multiplier: float = option(1.0, check=above(0))
    """gated activations: factor on the gate (Falcon-H1)"""

    mlp_output_multiplier: float = option(1.0, check=above(0))
    """factor on the outputs of MLPs before the residual sum (Falcon-H1)"""

    layer_scale: bool = option(False)
    """multiply the hidden states after each layer by a learned number (Gemma 4)"""

    logits_scaling: float = option(1.0, check=above(0))
    """divisor of the logits, before their softcap (Granite)"""

    final_logit_softcapping: float | None = option(None, check=above(0))
    """soft-cap logits by c * tanh(logits / c); unset: none"""

    multi_latent_attention: bool = option(False)
    """multi-latent attention: low-rank compression of keys and values (DeepSeek)"""

    sparse_attention_type: SparseAttentionType | None = option(None)
    """dsa: multi-latent attention to the keys that an indexer selects (DeepSeek-V3.2); blocks:
    attention to the blocks of keys that it selects (MiniMax-M3); compressed: attention to a window
    and to compressed keys (DeepSeek-V4); unset: to all
    """

    attention_output_gate: bool = option(False)
    """multiply the output of attention by gates, a learned projection of the token (Qwen3-Next)"""

    attention_output_gate_per_head: bool = option(False)
    """attention_output_gate: one gate per head instead of one per channel (LFM3)"""

    attention_output_gate_activation: GateActivation = option("sigmoid")
    """attention_output_gate: sigmoid or softplus (Laguna)"""

    hybrid_layer_pattern: str | None = option(None)
    """one letter per layer, which is then attention or an MLP alone: * attention, + multi-latent
    attention, M Mamba-2, G linear_attention_type, - MLP, E experts; | begins a pipeline stage, /*E
    and the like are layers of multi-token prediction; unset: layers have both
    """

    linear_attention_type: LinearAttentionType | None = option(None)
    """kind of the layers in place of attention (docs/layer_kinds.md has models of each); unset:
    none
    """

    linear_attention_freq: str = option("0")
    """layers with softmax attention beside linear_attention_type: N for every Nth layer, 0 for
    none, or a pattern such as [1]*3+[0] with 0 for each of them
    """

    init_method_std: float = option(0.02, check=above(0))
    """standard deviation of the initial weights; output projections get std / sqrt(2 * num_layers)
    """

    use_mup: bool = option(False)
    """maximal update parametrization (muP): learning rates, initial weights, attention scores and
    logits follow the width, so that settings found at mup_base_hidden_size hold at any width
    """

    mup_base_hidden_size: int | None = option(None, check=at_least(1))
    """use_mup: hidden_size of the model for which the settings were found; unset: hidden_size"""

    mup_base_head_dim: float | None = option(None, check=above(0))
    """use_mup: channels of a head of that model, with which scores are scaled as without muP;
    unset: 1
    """

    mup_attn_scale_power: float = option(1.0, check=above(0))
    """use_mup: scores are scaled by sqrt(mup_base_head_dim) / (channels of a head) ^ this power"""

    mup_embedding_mult: float = option(1.0, check=above(0))
    """use_mup: factor on the word embeddings"""

    mup_output_mult: float = option(1.0, check=above(0))
    """use_mup: factor on the logits; 1: mup_base_hidden_size / hidden_size"""

    yarn: YarnConfig | None = section(YarnConfig, switch="position_embedding_type", value="yarn")
    longrope: LongRopeConfig | None = section(
        LongRopeConfig, prefix="longrope_", switch="position_embedding_type", value="longrope"
    )
    linear_attention: LinearAttentionConfig | None = section(
        LinearAttentionConfig, prefix="linear_", switch="linear_attention_type"
    )
    mamba: MambaConfig = section(MambaConfig, prefix="mamba_")
    dsa: DSAConfig | None = section(
        DSAConfig, prefix="dsa_indexer_", switch="sparse_attention_type"
    )
    compressed: CompressedAttentionConfig | None = section(
        CompressedAttentionConfig,
        prefix="compressed_",
        switch="sparse_attention_type",
        value="compressed",
    )
    mla: MLAConfig | None = section(MLAConfig, switch="multi_latent_attention")
    moe: MoEConfig | None = section(MoEConfig, prefix="moe_", switch="num_experts")
    mtp: MTPConfig = section(MTPConfig, prefix="mtp_")
