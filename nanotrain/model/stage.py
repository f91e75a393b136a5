"""One stage of the model: the layers one pipeline rank holds. The whole model is the stage that holds all.

    tokens -> [embedding] -> layers.{first}..{last-1} -> [final_norm -> head] -> loss
              first stage                                 last stage

Modules are named by their place in the whole model, so parameter names are global names on every stage. With tied
embeddings the last stage holds the word embedding too and reads it as the head's weight at every call: parameters
may be replaced by views of a flat buffer at any time and are never kept in a second place.

    B batch   S sequence   H hidden   V vocabulary   Vp vocabulary with padding
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.comm.group import Group
from nanotrain.config.config import ModelConfig, PositionEmbedding
from nanotrain.config.derive import padded_vocab_size
from nanotrain.data.batch import Batch
from nanotrain.model.attention import Context, document_mask
from nanotrain.model.block import Block
from nanotrain.model.norm import build_norm
from nanotrain.model.rope import RotaryTables
from nanotrain.parallel.tp.loss import vocab_parallel_cross_entropy
from nanotrain.topology.stages import StageSpec


class Embedding(nn.Module):
    """Words, plus learned positions where the model has them."""

    def __init__(self, model: ModelConfig, *, dtype: torch.dtype, has_position: bool) -> None:
        super().__init__()
        self.word = nn.Embedding(padded_vocab_size(model), model.hidden_size, dtype=dtype, device="meta")
        self.position: nn.Embedding | None = None
        if has_position:
            size = model.max_position_embeddings
            self.position = nn.Embedding(size, model.hidden_size, dtype=dtype, device="meta")

    def forward(self, tokens: Tensor, position_ids: Tensor | None) -> Tensor:
        """[B, S] int64 -> [B, S, H]; no position ids means 0..S-1."""
        hidden: Tensor = self.word(tokens)
        if self.position is None:
            return hidden
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)
        out: Tensor = hidden + self.position(position_ids)
        return out


class Head(nn.Module):
    """The output layer; its weight is its own or, tied, the one it is handed."""

    def __init__(self, model: ModelConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        assert model.vocab_size is not None, "the vocabulary size is resolved before a model is built"
        self.vocab_size = model.vocab_size
        self.group = Group.alone("tp")
        self.weight: nn.Parameter | None = None
        if model.untie_embeddings_and_output_weights:
            shape = (padded_vocab_size(model), model.hidden_size)
            self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))

    def forward(self, hidden: Tensor, batch: Batch, *, tied: Tensor | None) -> Tensor:
        """The summed loss of the batch: [B, S, H] -> fp32 scalar."""
        return vocab_parallel_cross_entropy(
            hidden.flatten(0, 1),
            self._weight(tied),
            labels=batch.labels.flatten(),
            loss_mask=batch.loss_mask.flatten(),
            vocab_size=self.vocab_size,
            group=self.group,
        )

    def logits(self, hidden: Tensor, *, tied: Tensor | None) -> Tensor:
        """[..., H] -> [..., V], padding cut off."""
        return F.linear(hidden, self._weight(tied)[: self.vocab_size])

    def _weight(self, tied: Tensor | None) -> Tensor:
        weight = self.weight if tied is None else tied
        assert weight is not None, "a tied head must be handed the word embedding"
        return weight


class Stage(nn.Module):
    """A contiguous run of layers with, at the ends of the model, the embedding and the head.

    Args:
        model: the whole model's shape.
        spec: which part of it this stage is.
        dtype: of the parameters and activations.
    """

    def __init__(self, model: ModelConfig, spec: StageSpec, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.spec = model, spec
        self.is_tied = not model.untie_embeddings_and_output_weights
        self.embedding: Embedding | None = None
        self.final_norm: nn.Module | None = None
        self.head: Head | None = None
        if spec.has_embedding or (spec.has_head and self.is_tied):
            learned = model.position_embedding_type is PositionEmbedding.learned_absolute
            self.embedding = Embedding(model, dtype=dtype, has_position=learned and spec.has_embedding)
        layers = range(spec.first_layer, spec.last_layer)
        self.layers = nn.ModuleDict({str(i): Block(model, dtype=dtype) for i in layers})
        if spec.has_head:
            self.final_norm = build_norm(
                model.normalization, model.hidden_size, epsilon=model.norm_epsilon, dtype=dtype
            )
            self.head = Head(model, dtype=dtype)
        has_rope = model.position_embedding_type is PositionEmbedding.rope
        self._rotary = RotaryTables(model) if has_rope else None

    def forward(self, hidden: Tensor | None, batch: Batch) -> Tensor:
        """Run the stage on one microbatch.

        Args:
            hidden: [B, S, H] from the stage before; None on the first.
            batch: the microbatch, the same on every stage.

        Returns:
            With a head the sum over unmasked target tokens of the cross-entropy, an fp32 scalar; else [B, S, H].
        """
        hidden = self._transform(hidden, batch.tokens, position_ids=batch.position_ids, document_ids=batch.document_ids)
        if self.head is None:
            return hidden
        loss: Tensor = self.head(hidden, batch, tied=self._tied_weight())
        return loss

    def logits(self, tokens: Tensor, *, last_only: bool = False) -> Tensor:
        """The logits of a stage that is the whole model.

        Args:
            tokens: [B, S] int64.
            last_only: only those of the last position, as sampling needs them.

        Returns:
            [B, S, V] (or [B, 1, V]), padding cut off, in the dtype of the activations.
        """
        assert self.head is not None, "only a stage with the head has logits"
        hidden = self._transform(None, tokens)
        return self.head.logits(hidden[:, -1:] if last_only else hidden, tied=self._tied_weight())

    def _transform(
        self,
        hidden: Tensor | None,
        tokens: Tensor,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Everything but the head."""
        if self.spec.has_embedding:
            assert self.embedding is not None
            hidden = self.embedding(tokens, position_ids)
        assert hidden is not None, "a stage without the embedding needs the hidden states of the stage before"
        positions = tokens.shape[1] if position_ids is None else position_ids
        context = Context(
            rotation=self._rotary.at(positions, like=hidden) if self._rotary is not None else None,
            mask=document_mask(document_ids) if document_ids is not None else None,
        )
        for layer in self.layers.values():
            hidden = layer(hidden, context)
        assert hidden is not None
        return hidden if self.final_norm is None else self.final_norm(hidden)

    def _tied_weight(self) -> Tensor | None:
        return self.embedding.word.weight if self.is_tied and self.embedding is not None else None
