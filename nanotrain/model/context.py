"""Inputs of the layers besides parameters and activations.

    ModelParallel      groups, core attention and recomputation of a stage, for building it
    local_heads        the heads of a projection that a tp rank computes, and their channels
    BatchContext       a microbatch, for a stage
    LayerContext       inputs that the layers of a stage share for a microbatch
    MaskPlanner        the attention masks of a microbatch, with and without a window
    AttentionInputs    rotary tables and mask of the layers with, or without, a window
    TokenCache         tokens that were read before, in generation
    CachedLayer        a layer with state between tokens
    DropoutContext     random words of the microbatch
    HiddenDropout      dropout of hidden states at one place in a layer:

    embedding      word embeddings                                  rate hidden_dropout
    weights        attention weights                                attention_dropout
    attention      output of the attention                          hidden_dropout
    mlp            output of the MLP or the experts                 hidden_dropout

Outputs are dropped before the residual sum, and before they are normalized (`--norm-placement post`
or `sandwich`).

A word is a 32-bit hash of the seed, the sample, the layer, the place and the position; see
kernels/dropout.py.

    B batch   S sequence   H hidden
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Protocol, Self, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.attention.call import CoreAttention
from nanotrain.attention.sdpa import SDPAttention
from nanotrain.attention.tiles import chunk_segments
from nanotrain.comm.group import Group
from nanotrain.config.model import ModelConfig
from nanotrain.data.batch import Batch
from nanotrain.kernels.dropout import dropout, mix_in, sample_words
from nanotrain.memory.recompute import Recompute
from nanotrain.model.rope import Rotary
from nanotrain.parallel.cp.split import local_positions
from nanotrain.parallel.ep.token_dispatcher import DispatchOptions
from nanotrain.parallel.tp.layers import TensorParallel
from nanotrain.spec.kinds import MIXERS
from nanotrain.spec.shape import ModelShape, Source


@dataclass(frozen=True)
class ModelParallel:
    """Parallel implementations that the layers of a stage use."""

    tp: TensorParallel  # shards matrices and the vocabulary
    core_attention: CoreAttention  # attention over sequences sharded over cp
    ep: Group  # ranks that share the experts
    etp: Group  # ranks that share the matrices of each expert
    # ranks that hold the tokens of one sequence (tp x cp); a single rank if every rank has all
    # tokens (generation)
    sequence: Group
    dp: Group  # ranks that read different samples
    cp: Group  # ranks that share the sequences
    # recurrent layers over cp: "a2a" is an all-to-all, any other value passes states
    cp_comm_type: str = "p2p"
    recompute: Recompute = field(default_factory=Recompute)  # recomputation in the stage
    tracks_logits: bool = False  # attention layers keep their largest logits, for QK-clip
    # options of sending tokens to their experts
    dispatch: DispatchOptions = field(default_factory=DispatchOptions)
    layers_in_bf16: frozenset[int] = frozenset()  # layers without fp8, where others have it

    @property
    def routing_tp(self) -> Group:
        """The tp ranks that route different tokens; a single rank where every rank has all."""
        return Group.single_rank("tp") if self.sequence.size == 1 else self.tp.group

    def for_layer(self, layer: int) -> "ModelParallel":
        """The groups and options of one layer, without fp8 if the layer is excluded from it."""
        if layer not in self.layers_in_bf16:
            return self
        return replace(self, tp=replace(self.tp, fp8=None))

    @classmethod
    def single_rank(cls) -> "ModelParallel":
        """One rank, without model parallelism."""
        return cls(
            TensorParallel.single_rank(),
            SDPAttention(),
            ep=Group.single_rank("ep"),
            etp=Group.single_rank("etp"),
            sequence=Group.single_rank("tp_cp"),
            dp=Group.single_rank("dp"),
            cp=Group.single_rank("cp"),
        )


class DropoutPlace(IntEnum):
    """Index of a dropout within a layer."""

    embedding = 0
    weights = 1
    attention = 2
    mlp = 3


@dataclass(frozen=True)
class DropoutContext:
    """The random words and the positions of a microbatch."""

    words: Tensor  # [B] int64, one per sample
    positions: Tensor  # [S] int64, of this rank's tokens in their sequence
    # [places, B] int64, of one layer; None for the context of all layers
    layer_words: Tensor | None = None

    def for_layer(self, layer: int) -> "DropoutContext":
        """The context with the words of a layer, computed outside of compiled graphs.

        A graph would take the number of the layer as a constant: one graph per layer, and none
        after the eighth.
        """
        num_places = len(DropoutPlace)
        first = layer * num_places
        numbers = torch.arange(first, first + num_places, device=self.words.device)
        return replace(self, layer_words=mix_in(self.words, numbers[:, None]))

    def words_of(self, layer: int, place: DropoutPlace) -> Tensor:
        """The words [B] of a place in a layer."""
        if self.layer_words is not None:
            return self.layer_words[int(place)]
        return mix_in(self.words, layer * len(DropoutPlace) + place)


@dataclass(frozen=True)
class HiddenDropout:
    """Dropout of the hidden states at one place."""

    rate: float
    layer: int
    place: DropoutPlace
    tensor_parallel: TensorParallel

    def __call__(self, x: Tensor, context: DropoutContext | None) -> Tensor:
        """[B, S or S/tp, H] -> the same shape; a context of None drops nothing."""
        if context is None or self.rate == 0:
            return x
        positions = self.tensor_parallel.local_slice(context.positions[None])
        words = mix_in(context.words_of(self.layer, self.place)[:, None], positions)
        return dropout(x, words, rate=self.rate)


@dataclass(frozen=True)
class BatchContext:
    """A microbatch with the positions, scales and seed that the step adds."""

    batch: Batch  # the tokens of this rank, [B, S]
    # [S] int64, positions of this rank's tokens in their sequence under context parallelism; None
    # for 0..S-1. Unlike position ids they do not restart with a document.
    sequence_positions: Tensor | None = None
    # factor of one sequence's auxiliary losses in the differentiated loss; their mean over the
    # global batch with loss scale / sequences. A tensor if the loss scale is dynamic
    aux_loss_scale: float | Tensor = 0.0
    # factor of the summed loss that is differentiated, where a backward follows; a tensor as
    # `aux_loss_scale`
    loss_scale: float | Tensor | None = None
    dropout_seed: int | None = None  # None: nothing is dropped, as in evaluation
    # factors of the summed losses of the layers of multi-token prediction, relative to the summed
    # loss of the model; empty in evaluation, which leaves those layers out
    mtp_scales: tuple[float, ...] = ()

    @classmethod
    def of(cls, batch: Batch, *, cp: Group, **fields: Any) -> Self:
        """The context of a batch whose sequences are sharded over cp, with further fields."""
        positions = None
        if cp.size > 1:
            length = batch.tokens.shape[1] * cp.size
            positions = local_positions(
                length, index=cp.index, size=cp.size, device=batch.tokens.device
            )
        return cls(batch, positions, **fields)

    def dropout(self) -> DropoutContext | None:
        """The random words of dropout; None if nothing is dropped."""
        if self.dropout_seed is None:
            return None
        sample_ids = self.batch.sample_ids
        assert sample_ids is not None, "dropout needs the indices of the samples"
        positions = self.sequence_positions
        if positions is None:
            tokens = self.batch.tokens
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        return DropoutContext(sample_words(self.dropout_seed, sample_ids), positions)


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs that all attention layers with a window share, or all without a window."""

    rotary: Rotary | None = None  # for layers with rotary positions
    mask: Any = None  # made by `CoreAttention.plan_mask`


@dataclass(frozen=True)
class LayerContext:
    """Inputs that all layers of a stage share for one microbatch."""

    full: AttentionInputs = field(default_factory=AttentionInputs)  # layers without a window
    windowed: AttentionInputs = field(default_factory=AttentionInputs)  # layers with a window
    # [S, 1, 1] or [B, S, 1, 1], factors of the queries in layers without rotary positions
    query_scale: Tensor | None = None
    tokens: Tensor | None = None  # [B, S], the tokens of this rank; a stage sets them
    # [B, S], the segments of full sequences on every cp rank; None without documents
    segment_ids: Tensor | None = None
    sequence_positions: Tensor | None = None  # see `BatchContext`
    dropout: DropoutContext | None = None  # None where nothing is dropped
    aux_loss_scale: float | Tensor = 0.0  # see `BatchContext`
    is_padding: bool = False  # see `Batch`
    # by router: tokens_per_expert to which it compares this microbatch; a recomputed forward reads
    # the counts of the first forward
    balance_counts: dict[Any, Tensor] = field(default_factory=dict)
    # likewise, by token dispatcher; every prediction of multi-token prediction has its own
    dispatch_splits: dict[Any, Any] = field(default_factory=dict)
    # what layers keep for later layers, [B, S, ...] each; also of earlier stages
    state: dict[Source, tuple[Tensor, ...]] = field(default_factory=dict)

    def keep(self, source: Source, *tensors: Tensor) -> None:
        """Keep tensors for later layers; a recomputed forward does not replace them.

        The tensors are views, which no recomputation of their layer discards.
        """
        if source not in self.state:
            self.state[source] = tuple(tensor.view_as(tensor) for tensor in tensors)

    def for_layer(self, layer: int) -> Self:
        """The context with the random words of a layer."""
        if self.dropout is None:
            return self
        return replace(self, dropout=self.dropout.for_layer(layer))

    @property
    def starts(self) -> Tensor | None:
        """[B, S] bool, the first tokens of documents in full sequences; None without documents."""
        if self.segment_ids is None:
            return None
        segments = F.pad(self.segment_ids, (1, 0), value=-1)
        return segments[:, 1:] != segments[:, :-1]


class TokenCache(Protocol):
    """Keys, values and states of the tokens that a model has read (inference/cache.py)."""

    def attend(
        self,
        core_attention: Callable[..., Any],
        *,
        has_window: bool,
        keeps: Iterable[Source] = (),
        reads: Source | None = None,
    ) -> Callable[..., Any]:
        """A core attention that stores keys and values and attends to all of them.

        With `reads` it attends to the keys and values that an earlier layer stores under that name.
        """

    def segment_ids(self, device: torch.device, *, before: int) -> Tensor:
        """[B, before + S], of the last tokens and the new ones: 1, or 0 for padding."""


@runtime_checkable
class CachedLayer(Protocol):
    """A layer with state between tokens, which a cache keeps in generation."""

    def cached_function(self, cache: TokenCache) -> Callable[..., Any]:
        """The function of the layer that also reads the earlier tokens of a cache."""

    def swap_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Use such a function in further forward passes; returns the one used until now."""


@dataclass(frozen=True)
class AttentionMasks:
    """Results of `CoreAttention.plan_mask`; None also where no layer needs the mask."""

    full: Any  # layers that attend to all earlier keys
    windowed: Any  # layers that attend within a window or a chunk


@dataclass(frozen=True)
class MaskPlanner:
    """Plans the masks of a stage."""

    has_full: bool  # whether a layer attends to all earlier keys
    has_windowed: bool  # whether a layer attends within a window or a chunk
    window: int | None  # earlier keys in the window
    chunk: int | None  # positions of a chunk

    @classmethod
    def of(cls, model_config: ModelConfig, layers: Iterable[int]) -> "MaskPlanner":
        """The planner of some layers of a model."""
        shape = ModelShape.of(model_config)
        has_full = has_windowed = False
        for layer in layers:
            mixer, _ = shape.kinds(layer)
            if mixer is None or not MIXERS[mixer].has_keys:
                continue
            if shape.has_window(layer):
                has_windowed = True
            else:
                has_full = True
        return cls(
            has_full, has_windowed, model_config.window_size, model_config.attention_chunk_size
        )

    def plan(self, batch: Batch, parallel: ModelParallel) -> AttentionMasks:
        """The masks of a microbatch of this rank."""
        core = parallel.core_attention
        full = windowed = None
        if self.has_full:
            full = core.plan_mask(batch.segment_ids, tokens=batch.tokens)
        if self.has_windowed and self.chunk is None:
            windowed = core.plan_mask(batch.segment_ids, tokens=batch.tokens, window=self.window)
        if self.has_windowed and self.chunk is not None:
            length = batch.tokens.shape[1] * parallel.cp.size
            chunks = chunk_segments(batch.segment_ids, length=length, size=self.chunk)
            windowed = core.plan_mask(chunks, tokens=batch.tokens, window=self.chunk)
        return AttentionMasks(full, windowed)


def local_heads(num_heads: int, group: Group) -> range:
    """The heads that a tp rank computes, at least one; several ranks may share a head."""
    first = group.index * num_heads // group.size
    return range(first, first + max(1, num_heads // group.size))


def head_channels(heads: range, head_dim: int) -> slice:
    """The channels of consecutive heads in a projection of all heads."""
    return slice(heads.start * head_dim, heads.stop * head_dim)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[..., heads * head_dim] -> [..., heads, head_dim]."""
    return x.unflatten(-1, (-1, head_dim))
