"""The shape of a model: every size that follows from the model section of a configuration, resolved
once.

Parameters, FLOPs, modules and Hugging Face files read these sizes; none of them derives one again.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

from nanotrain.config.layer_kinds import (
    CompressedAttentionConfig,
    DSAConfig,
    LinearAttentionConfig,
    MambaConfig,
    NormPlacement,
    linear_attention_kind,
)
from nanotrain.config.model import MLAConfig, ModelConfig, MoEConfig
from nanotrain.config.model_fields import Normalization
from nanotrain.config.mup import width_multiplier


class Chunks(NamedTuple):
    """Equally long chunks of a sequence, within which tokens attend to each other."""

    number: int
    length: int


class Source(NamedTuple):
    """State that a layer, or the embedding, keeps for later layers."""

    kind: str  # row of `SHARED` in spec/shared_state.py
    layer: int  # index in the model of the layer that keeps it, or for which the embedding does
    is_embedded: bool = False  # kept by the embedding

    def is_before(self, layer: int) -> bool:
        """Whether it is kept before a layer runs."""
        return self.is_embedded or self.layer < layer


@dataclass(frozen=True)
class ModelShape:
    """Sizes and structure of a model, over all ranks."""

    num_layers: int  # transformer blocks
    hidden_size: int  # width of the residual stream
    vocab_size: int  # tokens of the vocabulary
    padded_vocab_size: int  # rows of the embedding and the head
    num_positions: int | None  # rows of the learned position table; None without one
    num_heads: int  # query heads
    query_groups: int  # key/value heads
    head_dim: int  # width of a query or key head
    value_head_dim: int  # width of a value head
    ffn_size: int  # inner width of a dense MLP
    is_gated: bool  # the MLP has a gate projection
    activation: str  # of MLPs and experts
    has_linear_bias: bool  # biases on every linear layer but the head
    has_qkv_bias: bool  # biases on query, key and value
    has_output_bias: bool  # biases on the output projections of attention
    has_mlp_bias: bool  # biases on the projections of dense MLPs and shared experts
    has_head_bias: bool  # a bias on the logits
    normalization: Normalization
    has_norm_weight: bool  # norms have weights
    has_norm_bias: bool  # and biases, as LayerNorm
    has_qk_norm: bool  # a norm per query and key head, of the kind of the others
    has_wide_qk_norm: bool  # one RMSNorm over all query heads and one over all key heads
    # an RMSNorm without weights per query and key head, in layers with rotary positions
    qk_l2_norm: bool
    norm_placement: NormPlacement  # of the inputs of attention and MLP, of their outputs, or both
    norm_init: float  # initial value of norm weights
    residual_type: str  # kind of residual connections; spec/residuals
    parallel_shared_norm: bool  # attention and MLP side by side read one norm
    residual_streams: int  # streams of kinds with several
    mhc_sinkhorn_iterations: int  # of their mixing matrices
    has_sink: bool  # a learned score per query head that every query attends to
    is_tied: bool  # the head reads the word embedding
    init_std: float  # standard deviation of the initial weights of matrices between layers
    embedding_std: float  # of the embeddings and the head
    width_multiplier: float = 1.0  # with muP: its width divided by the width of the narrow model
    # earlier keys that a query attends to, in some layers; None for all
    window_size: int | None = None
    # positions of a chunk, to which they attend in place of a window
    attention_chunk_size: int | None = None
    window_layers: tuple[bool, ...] = ()  # whether each layer has the window
    # query heads of these layers, and their key/value heads; None: as in other layers
    window_num_attention_heads: int | None = None
    window_query_groups: int | None = None
    # widths of their query or key heads, and of their value heads; 0: as in other layers
    window_head_dim: int = 0
    window_value_head_dim: int = 0
    sinks_in_windows_only: bool = False  # they alone have sinks
    # values of layers without a window are their projected keys
    attention_k_eq_v: bool = False
    # layers that read keys of earlier layers have a dense MLP of twice the width
    use_double_wide_mlp: bool = False
    value_l2_norm: bool = False  # an RMSNorm without weights per value head
    no_rope_layers: tuple[bool, ...] = ()  # whether each layer is without rotary positions
    # kind of token mixer of each layer (spec/kinds)
    mixers: tuple[str | None, ...] = ()
    mlps: tuple[str | None, ...] = ()  # kind of MLP of each layer
    # the earlier layer whose keys and values each layer reads; None: its own, or none
    kv_sources: tuple[int | None, ...] = ()
    # the earlier layer whose indexer selects the keys of each layer; None: its own, or none
    selection_sources: tuple[int | None, ...] = ()
    layer_scale: bool = False  # a learned factor of the hidden states after each layer
    has_output_gate: bool = False  # attention multiplies its output by gates
    attention_output_gate_per_head: bool = False  # one for all channels of a head
    attention_output_gate_activation: str = "sigmoid"
    rotary_dim: int = 0  # channels of a head with rotary positions
    has_rotary: bool = True  # queries and keys have rotary positions, but in `no_rope_layers`
    layer_input_size: int = 0  # channels of the input of its own that each layer reads
    embedding_l2_norm: bool = False  # word embeddings are normalized
    # gated activations: the number added to the linear part, and the bound of gate and linear part
    glu_linear_offset: float = 0.0
    activation_func_clamp_value: float | None = None
    has_plain_swiglu: bool = False  # MLPs compute silu(gate) * up, without these and factors
    has_score_options: bool = False  # scores are capped or dropped, or have a sink
    mla: MLAConfig | None = None  # sizes of multi-head latent attention (DeepSeek-V2)
    dsa: DSAConfig | None = None  # sizes of the indexer of sparse attention
    # sizes of attention to a window and to compressed keys
    compressed: CompressedAttentionConfig | None = None
    # sizes of layers with linear_attention_type
    linear_attention: LinearAttentionConfig | None = None
    mamba: MambaConfig = MambaConfig()  # sizes of layers of Mamba-2
    mamba_heads: int = 0  # their heads
    moe: MoEConfig | None = None  # sizes of the mixture-of-experts layers
    moe_layers: tuple[bool, ...] = ()  # whether each layer has experts
    moe_ffn_size: int = 0  # inner width of an expert
    expert_input_size: int = 0  # width of what it reads and writes
    # of attention and MLP in multi-token prediction
    mtp_kinds: tuple[str | None, str | None] | None = None
    # layers of multi-token prediction; in the methods below they follow the model's layers
    num_mtp_layers: int = 0
    num_mtp_predictions: int = 0  # tokens that they predict; more than layers where one is repeated

    @classmethod
    def of(cls, model_config: ModelConfig) -> Self:
        """The shape of a configured model.

        Raises:
            ConfigError: the vocabulary size is unset, or the pattern of MoE layers does not fit.

        >>> ModelShape.of(ModelConfig(hidden_size=256, vocab_size=50257)).padded_vocab_size
        50304
        """
        num_positions = None
        if model_config.position_embedding_type == "learned_absolute":
            num_positions = model_config.max_position_embeddings
            num_positions += model_config.learned_position_offset
        has_qkv_bias = model_config.add_bias_linear or model_config.add_qkv_bias
        has_output_bias = model_config.add_bias_linear or model_config.add_attention_output_bias
        has_mlp_bias = model_config.add_bias_linear or model_config.add_mlp_bias
        has_wide_qk_norm = model_config.qk_layernorm and model_config.qk_layernorm_across_heads
        has_qk_norm = model_config.qk_layernorm and not model_config.qk_layernorm_across_heads
        width = width_multiplier(model_config)
        norm_init = 0.0 if model_config.apply_layernorm_1p else 1.0
        # what the configuration itself has under the same name, as a field or a property
        names = [field.name for field in fields(cls) if hasattr(model_config, field.name)]
        shared = {name: getattr(model_config, name) for name in names}
        return cls(
            **shared,
            num_positions=num_positions,
            num_heads=model_config.num_attention_heads,
            has_rotary=model_config.has_rope,
            has_linear_bias=model_config.add_bias_linear,
            has_qkv_bias=has_qkv_bias,
            has_output_bias=has_output_bias,
            has_mlp_bias=has_mlp_bias,
            has_head_bias=model_config.add_head_bias,
            has_qk_norm=has_qk_norm,
            has_wide_qk_norm=has_wide_qk_norm,
            norm_init=norm_init,
            has_sink=model_config.softmax_type == "learnable",
            has_output_gate=model_config.attention_output_gate,
            is_tied=not model_config.untie_embeddings_and_output_weights,
            init_std=model_config.init_method_std / math.sqrt(width),
            embedding_std=model_config.init_method_std,
            width_multiplier=width,
            num_mtp_layers=model_config.mtp.num_own_layers,
            num_mtp_predictions=model_config.mtp.num_layers or 0,
        )

    def kinds(self, layer: int) -> tuple[str | None, str | None]:
        """The kinds of attention and MLP of a layer, by its index in the model."""
        if layer >= self.num_layers and self.mtp_kinds is not None:
            return self.mtp_kinds
        index = self._kind_of(layer)
        mixer = self.mixers[index]
        if layer >= self.num_layers and mixer == "shared_dsa":
            mixer = "dsa"  # multi-token prediction has an indexer of its own
        return mixer, self.mlps[index]

    def attention_chunks(self, layer: int, *, seq_length: int) -> tuple[Chunks, ...]:
        """The chunks of a sequence within which a layer attends: full ones, and the last one."""
        size = self.attention_chunk_size
        if size is None or size >= seq_length or not self.has_window(layer):
            return (Chunks(1, seq_length),)
        num_full, rest = divmod(seq_length, size)
        full = Chunks(num_full, size)
        return (full, Chunks(1, rest)) if rest else (full,)

    def blocks(self, layer: int) -> tuple[tuple[str | None, str | None], ...]:
        """The kinds of attention and MLP of the blocks of a layer, by its index in the model: two
        with a shortcut.
        """
        mixer, mlp = self.kinds(layer)
        has_shortcut = mlp == "moe" and self.moe is not None and self.moe.shortcut
        if has_shortcut:
            return (mixer, mlp), (mixer, "dense")
        return ((mixer, mlp),)

    def residual(self, layer: int) -> str:
        """The kind of residual connections of a layer, by its index in the model."""
        if len(self.blocks(layer)) > 1:
            return "shortcut"
        is_extended = self.layer_scale or self.layer_input_size > 0
        return "extended" if is_extended else self.residual_type

    def for_layer(self, layer: int) -> Self:
        """The shape with the heads, sinks and norms of heads of a layer, by its index in the
        model.
        """
        has_window = self.has_window(layer)
        own: dict[str, Any] = {
            "has_sink": self.has_sink and (has_window or not self.sinks_in_windows_only),
            "qk_l2_norm": self.qk_l2_norm and self.has_rope(layer),
            "attention_k_eq_v": self.attention_k_eq_v and not has_window,
        }
        if has_window:
            own["num_heads"] = self.window_num_attention_heads or self.num_heads
            own["query_groups"] = self.window_query_groups or self.query_groups
            own["head_dim"] = self.window_head_dim or self.head_dim
            own["value_head_dim"] = self.window_value_head_dim or self.value_head_dim
        if self.use_double_wide_mlp and self.kinds(layer)[0] == "shared_kv":
            own["ffn_size"] = 2 * self.ffn_size
        if all(getattr(self, name) == value for name, value in own.items()):
            return self
        return replace(self, **own)

    @property
    def gate_channels(self) -> int:
        """Channels of a head of the output gate."""
        return 1 if self.attention_output_gate_per_head else self.value_head_dim

    @property
    def has_offset_norms(self) -> bool:
        """Whether weights of norms are differences from 1, which are added in fp32."""
        return self.norm_init == 0.0

    def norms_of(self, layer: int) -> tuple[bool, bool]:
        """Whether a layer, by its index in the model, has norms of inputs of attention and MLP, and
        of outputs.
        """
        placement = self.norm_placement
        kind = linear_attention_kind(self.kinds(layer)[0])
        if self.linear_attention is not None and kind is not None and kind.has_delta_rule:
            placement = self.linear_attention.norm_placement or placement
        return placement != "post", placement != "pre"

    def sources(self, layer: int) -> tuple[Source, ...]:
        """The state of earlier layers that a layer reads, by its index in the model."""
        sources: list[Source] = []
        key_value = self.key_value_source(layer)
        if key_value is not None:
            sources.append(key_value)
        selection = self.selection_source(layer)
        if selection is not None:
            sources.append(selection)
        if self.layer_input_size:
            sources.append(Source("layer_input", layer, is_embedded=True))
        return tuple(sources)

    def key_value_source(self, layer: int) -> Source | None:
        """The keys and values of an earlier layer that a layer reads."""
        source = self.kv_sources[layer] if layer < len(self.kv_sources) else None
        return None if source is None else Source("key_value", source)

    def selection_source(self, layer: int) -> Source | None:
        """The selection of an earlier layer's indexer that a layer reads."""
        sources = self.selection_sources
        source = sources[layer] if layer < len(sources) else None
        return None if source is None else Source("selection", source)

    def kept(self, layer: int) -> tuple[Source, ...]:
        """The state that a layer, by its index in the model, keeps for later layers."""
        return tuple(
            source
            for source in self._last_reader
            if source.layer == layer and not source.is_embedded
        )

    def carried(self, first_layer: int) -> tuple[Source, ...]:
        """The state that layers before `first_layer` keep and later layers read."""
        return tuple(
            source
            for source, last_reader in self._last_reader.items()
            if source.is_before(first_layer) and 0 < first_layer <= last_reader
        )

    @cached_property
    def _last_reader(self) -> dict[Source, int]:
        """The last layer that reads each kept state."""
        last: dict[Source, int] = {}
        for layer in range(self.num_layers):
            for source in self.sources(layer):
                last[source] = layer
        return last

    @property
    def has_separate_norms(self) -> bool:
        """Whether experts have norms of their inputs in place of the norm in front of an MLP."""
        return self.moe is not None and self.moe.separate_norms

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, by its index in the model, is a mixture of experts."""
        return self.kinds(layer)[1] == "moe"

    def has_window(self, layer: int) -> bool:
        """Whether a layer, by its index in the model, attends within the window."""
        return self.window_layers[self._kind_of(layer)]

    def has_rope(self, layer: int) -> bool:
        """Whether a layer, by its index in the model, has the rotary positions of the model."""
        return not self.no_rope_layers[self._kind_of(layer)]

    def first_like(self, layer: int) -> int:
        """The first layer that has the kinds, the window and the rotary positions of a layer."""
        return self._first_of_kind[self._structure(layer)]

    @cached_property
    def _first_of_kind(self) -> dict[Hashable, int]:
        """The first layer of every structure."""
        first: dict[Hashable, int] = {}
        for layer in range(self.num_layers + self.num_mtp_layers):
            first.setdefault(self._structure(layer), layer)
        return first

    def _structure(self, layer: int) -> Hashable:
        """A key that is equal for layers with the same parameters and operators."""
        keeps = bool(self.kept(layer))
        return self.kinds(layer), self.has_window(layer), self.has_rope(layer), keeps

    @property
    def has_half_layers(self) -> bool:
        """Whether some layers are attention or an MLP alone."""
        return None in (*self.mixers, *self.mlps)

    @property
    def has_embedding_at_end(self) -> bool:
        """Whether the last stage reads the word embedding: as the head, or for multi-token
        prediction.
        """
        return self.is_tied or self.num_mtp_layers > 0

    @property
    def mtp_layers(self) -> range:
        """Indices of the layers of multi-token prediction."""
        return range(self.num_layers, self.num_layers + self.num_mtp_layers)

    @property
    def mtp_predictions(self) -> tuple[int, ...]:
        """The layer of each further prediction: every layer once, or one layer each time."""
        if self.num_mtp_layers == self.num_mtp_predictions:
            return tuple(self.mtp_layers)
        return (self.num_layers,) * self.num_mtp_predictions

    def _kind_of(self, layer: int) -> int:
        """The layer of the model whose structure a layer has: itself, or the last one for
        multi-token prediction.
        """
        return min(layer, self.num_layers - 1)

    def replicates_kv_heads(self, tensor_parallel_size: int) -> bool:
        """Whether key and value weights are replicated over tp, because there are fewer heads than
        tp ranks.
        """
        return self.query_groups % tensor_parallel_size != 0
