"""The model section of the configuration: the architecture of a GPT, its attention and its experts.

The fields are in `model_fields.py`, nested sections in `layer_kinds.py`. Here is what follows from
them: sizes, and the kinds of all layers.
"""

from dataclasses import dataclass, replace
from math import lcm
from typing import Self

from nanotrain.config.layer_kinds import (
    CompressedAttentionConfig,
    DSAConfig,
    LinearAttentionConfig,
    MambaConfig,
    MLAConfig,
    MoEConfig,
    MTPConfig,
)
from nanotrain.config.model_fields import LongRopeConfig, ModelFields, YarnConfig
from nanotrain.config.notation import (
    COMPRESSED_LETTERS,
    read_compressed_pattern,
    read_hybrid_pattern,
    read_layer_pattern,
    read_mtp_patterns,
)
from nanotrain.errors import ConfigError
from nanotrain.quantities import round_up

__all__ = [
    "CompressedAttentionConfig",
    "DSAConfig",
    "LinearAttentionConfig",
    "LongRopeConfig",
    "MLAConfig",
    "MTPConfig",
    "MambaConfig",
    "MoEConfig",
    "ModelConfig",
    "YarnConfig",
]

GATED = ("swiglu", "quick_geglu", "geglu_tanh")  # activations with a gate projection
MLP_LETTERS = {"-": "dense", "E": "moe"}  # kinds of MLP by their letters in hybrid_layer_pattern


@dataclass(frozen=True)
class ModelConfig(ModelFields):
    """The architecture of a GPT; names as in Megatron-LM."""

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate projection."""
        return self.activation in GATED

    @property
    def head_dim(self) -> int:
        """Channels of a query or key head; of multi-latent attention with and without positions.

        >>> ModelConfig(hidden_size=256, num_attention_heads=4).head_dim
        64
        """
        if self.mla is not None:
            return self.mla.qk_head_dim + self.mla.qk_pos_emb_head_dim
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def value_head_dim(self) -> int:
        """Channels of a value head."""
        if self.mla is not None:
            return self.mla.v_head_dim
        return self.value_channels or self.head_dim

    @property
    def window_head_dim(self) -> int:
        """Channels of a query or key head in layers with a window."""
        return self.window_kv_channels or self.head_dim

    @property
    def window_value_head_dim(self) -> int:
        """Channels of a value head in layers with a window."""
        if self.window_kv_channels is None:
            return self.value_head_dim
        return self.value_channels or self.window_kv_channels

    @property
    def query_groups(self) -> int:
        """Key/value heads: one per query head by default, and with multi-latent attention."""
        if self.mla is not None:
            return self.num_attention_heads
        return self.num_query_groups or self.num_attention_heads

    @property
    def has_norm_weight(self) -> bool:
        """Whether norms have weights."""
        if self.normalization == "LayerNorm":
            return self.layernorm_parameters != "none"
        return self.normalization == "RMSNorm"

    @property
    def has_norm_bias(self) -> bool:
        """Whether norms have biases."""
        is_layer_norm = self.normalization == "LayerNorm"
        return is_layer_norm and self.layernorm_parameters == "weight_and_bias"

    @property
    def embedding_scale(self) -> float:
        """The factor on the word embeddings.

        >>> ModelConfig(hidden_size=256, scale_embeddings=True).embedding_scale
        16.0
        """
        scale = self.hidden_size**0.5 if self.scale_embeddings else 1.0
        if self.use_mup:
            scale *= self.mup_embedding_mult
        return self.embedding_multiplier * scale

    @property
    def has_rope(self) -> bool:
        """Whether queries and keys are rotated, plainly or for longer contexts.

        MLA also rotates with learned positions, which are added to the embeddings.
        """
        if self.multi_latent_attention and self.position_embedding_type == "learned_absolute":
            return True
        return self.position_embedding_type in ("rope", "yarn", "longrope")

    @property
    def rotary_dim(self) -> int:
        """Rotated channels of a head; with MLA its rotary channels."""
        if self.mla is not None:
            return self.mla.qk_pos_emb_head_dim
        if self.rotary_proportional:
            return self.head_dim
        return int(self.head_dim * self.rotary_percent)

    @property
    def window_rotary_dim(self) -> int:
        """Rotated channels of a head in layers with a window."""
        if self.mla is not None:
            return self.rotary_dim
        if self.rotary_proportional:
            return self.window_head_dim
        percent = self.window_rotary_percent or self.rotary_percent
        return int(self.window_head_dim * percent)

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
    def has_plain_swiglu(self) -> bool:
        """Whether gated MLPs compute silu(gate) * up, without bounds, offsets and factors."""
        has_bound = self.activation_func_clamp_value is not None
        has_factor = self.mlp_gate_multiplier != 1.0
        if has_bound or has_factor or self.glu_linear_offset:
            return False
        return self.activation == "swiglu"

    @property
    def ffn_size(self) -> int:
        """Inner width of the MLP.

        Unset it is 4 * hidden_size, with swiglu 8/3 * hidden_size rounded up to a multiple of 64.
        With `moe.shortcut` all MLPs have the width of the shared expert.

        >>> ModelConfig(hidden_size=256, activation="swiglu").ffn_size
        704
        >>> ModelConfig(hidden_size=256, activation="gelu").ffn_size
        1024
        """
        width = self.ffn_hidden_size
        if self.moe is not None and self.moe.shortcut:
            width = self.moe.shared_expert_intermediate_size
        if width is not None:
            return width
        if self.activation != "swiglu":
            return 4 * self.hidden_size
        return round_up(-(-8 * self.hidden_size // 3), 64)

    @property
    def moe_ffn_size(self) -> int:
        """Inner width of an expert."""
        if self.moe is None or self.moe.ffn_hidden_size is None:
            return self.ffn_size
        return self.moe.ffn_hidden_size

    @property
    def expert_input_size(self) -> int:
        """Width of the inputs and outputs of experts."""
        if self.moe is None or self.moe.latent_size is None:
            return self.hidden_size
        return self.moe.latent_size

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: the vocabulary with padding for tensor parallelism.

        Raises:
            ConfigError: the size of the vocabulary is not set.

        >>> ModelConfig(vocab_size=50257).padded_vocab_size
        50304
        """
        if self.vocab_size is None:
            raise ConfigError(
                "the size of the vocabulary is not known yet",
                why="model.vocab_size is unset and no tokenizer was read",
                fix="set --vocab-size",
            )
        return round_up(self.vocab_size, self.make_vocab_size_divisible_by)

    def with_padding_for(self, tensor_parallel_size: int) -> Self:
        """The model with a vocabulary that this many ranks can share, with more padding if needed.

        >>> model = ModelConfig(vocab_size=257, make_vocab_size_divisible_by=1)
        >>> model.with_padding_for(2).make_vocab_size_divisible_by
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

        >>> moe = MoEConfig(num_experts=8, layer_freq="[0]*1+[1]*3")
        >>> ModelConfig(num_layers=4, moe=moe).moe_layers
        (False, True, True, True)
        """
        return tuple(kind == "moe" for kind in self.mlps)

    @property
    def mixers(self) -> tuple[str | None, ...]:
        """The kind of token mixer (attention, Mamba-2, ...) per layer; None for an MLP alone.

        Raises:
            ConfigError: an invalid pattern.

        >>> model = ModelConfig(linear_attention_type="mamba2", linear_attention_freq="3")
        >>> replace(model, num_layers=3).mixers
        ('mamba2', 'mamba2', 'attention')
        """
        mixers = list(self._own_mixers)
        for layer, source in enumerate(self.kv_sources):
            if source is not None:
                mixers[layer] = "shared_kv"
        for layer, source in enumerate(self.selection_sources):
            if source is not None:
                mixers[layer] = "shared_dsa"
        return tuple(mixers)

    @property
    def selection_sources(self) -> tuple[int | None, ...]:
        """The layer whose indexer selects the keys of each layer; None: its own, or none.

        >>> model = ModelConfig(num_layers=5, multi_latent_attention=True)
        >>> dsa = DSAConfig(share_freq="[0,1,1,0,1]")
        >>> replace(model, sparse_attention_type="dsa", mla=MLAConfig(), dsa=dsa).selection_sources
        (None, 0, 0, None, 3)
        """
        if self.dsa is None:
            return (None,) * self.num_layers
        sources: list[int | None] = []
        last: int | None = None
        for layer, mixer in enumerate(self._own_mixers):
            is_shared = mixer == "dsa" and self.shared_selections[layer]
            sources.append(last if is_shared else None)
            if mixer == "dsa" and not is_shared:
                last = layer
        return tuple(sources)

    @property
    def shared_selections(self) -> tuple[bool, ...]:
        """Whether each layer has no indexer; a ConfigError for an invalid pattern."""
        pattern = "0" if self.dsa is None else self.dsa.share_freq
        return read_layer_pattern("dsa_indexer_share_freq", pattern, num_layers=self.num_layers)

    @property
    def kv_sources(self) -> tuple[int | None, ...]:
        """The layer whose keys and values each layer reads; None: its own, or none.

        >>> model = ModelConfig(window_size=2, window_attn_skip_freq="2", num_kv_shared_layers=2)
        >>> replace(model, num_layers=5).kv_sources
        (None, None, None, 1, 2)
        """
        if self.num_kv_shared_layers == 0:
            return (None,) * self.num_layers
        first = self.num_layers - self.num_kv_shared_layers
        last_of_type: dict[tuple[bool, bool], int] = {}
        sources: list[int | None] = []
        types = zip(self.window_layers, self.no_rope_layers, strict=True)
        for layer, (mixer, attention_type) in enumerate(zip(self._own_mixers, types, strict=False)):
            is_attention = mixer == "attention"
            if is_attention and layer < first:
                last_of_type[attention_type] = layer
            is_shared = is_attention and layer >= first
            sources.append(last_of_type.get(attention_type) if is_shared else None)
        return tuple(sources)

    @property
    def unshared_layers(self) -> list[int]:
        """The layers with attention that compute their keys and values."""
        return [layer for layer, mixer in enumerate(self.mixers) if mixer == "attention"]

    @property
    def _own_mixers(self) -> tuple[str | None, ...]:
        """The kinds of token mixers, before some attention reads keys of earlier layers."""
        if self.hybrid_layer_pattern is not None:
            letters = read_hybrid_pattern(self.hybrid_layer_pattern)
            return tuple(self.mixer_letters.get(letter) for letter in letters)
        if self.sparse_attention_type == "blocks":
            return self._block_mixers
        if self.compressed is not None:
            return tuple(COMPRESSED_LETTERS[letter] for letter in self.compressed_pattern)
        if self.linear_attention_type is None:
            return (self.softmax_attention,) * self.num_layers
        layers = read_layer_pattern(
            "linear_attention_freq", self.linear_attention_freq, num_layers=self.num_layers
        )
        return tuple(
            self.linear_attention_type if is_linear else self.softmax_attention
            for is_linear in layers
        )

    @property
    def _block_mixers(self) -> tuple[str, ...]:
        """The kinds of token mixers where some layers select blocks of keys."""
        assert self.dsa is not None, "sparse_attention_type is blocks"
        layers = read_layer_pattern(
            "dsa_indexer_layer_freq", self.dsa.layer_freq, num_layers=self.num_layers
        )
        return tuple("block_sparse" if selects else "attention" for selects in layers)

    @property
    def compressed_pattern(self) -> str:
        """The letter of every layer of compressed attention; a ConfigError for an invalid pattern.

        >>> compressed = CompressedAttentionConfig()
        >>> ModelConfig(num_layers=6, compressed=compressed).compressed_pattern
        'HHHCHC'
        """
        assert self.compressed is not None, "sparse_attention_type is compressed"
        pattern = self.compressed.layer_pattern
        return read_compressed_pattern(pattern, num_layers=self.num_layers)

    @property
    def hash_layers(self) -> tuple[bool, ...]:
        """Whether the token id chooses the experts of each layer; a ConfigError for an invalid
        pattern.
        """
        moe = self.moe
        if moe is None or moe.num_experts is None:
            return (False,) * self.num_layers
        layers = read_layer_pattern("moe_hash_layers", moe.hash_layers, num_layers=self.num_layers)
        if not any(layers):
            return layers
        pairs = zip(layers, self.moe_layers, strict=True)
        return tuple(is_hashed and has_experts for is_hashed, has_experts in pairs)

    def router_kind(self, layer: int) -> str:
        """The kind of router of a layer with experts, by its index in the model: a row of `ROUTERS`
        in model/moe.py.
        """
        assert self.moe is not None, "a dense model has no routers"
        if layer < self.num_layers and self.hash_layers[layer]:
            return "hash"
        return "sinkhorn" if self.moe.uses_sinkhorn else "topk"

    @property
    def softmax_attention(self) -> str:
        """The kind of the layers with softmax attention."""
        if self.mla is None:
            return "attention"
        return "mla" if self.dsa is None else "dsa"

    @property
    def mixer_letters(self) -> dict[str, str | None]:
        """The kinds of token mixers by their letters in `hybrid_layer_pattern`."""
        return {
            "*": self.softmax_attention,
            "+": self.softmax_attention,
            "G": self.linear_attention_type,
            "M": "mamba2",
        }

    @property
    def mamba_heads(self) -> int:
        """Heads of a layer of Mamba-2."""
        return self.mamba.num_heads or 2 * self.hidden_size // self.mamba.head_dim

    @property
    def mlps(self) -> tuple[str | None, ...]:
        """The kind of MLP of each layer, dense or moe; None for a layer without one."""
        if self.hybrid_layer_pattern is not None:
            letters = read_hybrid_pattern(self.hybrid_layer_pattern)
            return tuple(MLP_LETTERS.get(letter) for letter in letters)
        moe = self.moe
        # num_experts is None in a model that is not complete yet, with other settings of experts
        if moe is None or moe.num_experts is None:
            return ("dense",) * self.num_layers
        layers = read_layer_pattern("moe_layer_freq", moe.layer_freq, num_layers=self.num_layers)
        return tuple("moe" if has_experts else "dense" for has_experts in layers)

    @property
    def mtp_kinds(self) -> tuple[str | None, str | None] | None:
        """The token mixer and MLP of multi-token prediction; None: as in the last layer.

        >>> ModelConfig(hybrid_layer_pattern="M-*-/*-").mtp_kinds, ModelConfig().mtp_kinds
        (('attention', 'dense'), None)
        """
        patterns = read_mtp_patterns(self.hybrid_layer_pattern or "")
        if not patterns:
            return None
        letters = patterns[0]
        return self.mixer_letters[letters[0]], MLP_LETTERS[letters[1]]

    @property
    def window_layers(self) -> tuple[bool, ...]:
        """Whether each layer attends within a window; a ConfigError for an invalid pattern.

        Layers that attend to compressed keys too have other rotary positions, and count as layers
        without a window.
        """
        if self.compressed is not None:
            return tuple(letter == "W" for letter in self.compressed_pattern)
        if self.window_size is None and self.attention_chunk_size is None:
            return (False,) * self.num_layers
        return read_layer_pattern(
            "window_attn_skip_freq", self.window_attn_skip_freq, num_layers=self.num_layers
        )

    @property
    def no_rope_layers(self) -> tuple[bool, ...]:
        """Whether each layer is without rotary positions; a ConfigError for an invalid pattern."""
        return read_layer_pattern("no_rope_freq", self.no_rope_freq, num_layers=self.num_layers)
