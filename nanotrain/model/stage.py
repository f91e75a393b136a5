"""One stage of the model: the layers one pipeline rank holds. The whole model is the stage that holds all.

    tokens -> [embedding] -> layers.{first}..{last-1} -> [final_norm -> head] -> loss
              first stage                                 last stage

Modules are named by their place in the whole model, so parameter names are global names on every stage. With tied
embeddings the last stage holds the word embedding too and reads it as the head's weight at every call: parameters
may be replaced by views of a flat buffer at any time and are never kept in a second place.

    B batch   S sequence   H hidden   V vocabulary   Vp vocabulary with padding
"""

import torch
from torch import Tensor, nn

from nanotrain.config.config import ModelConfig, PositionEmbedding
from nanotrain.data.batch import Batch
from nanotrain.model.attention import Context
from nanotrain.model.block import Block
from nanotrain.model.ends import Embedding, Head
from nanotrain.model.norm import build_norm
from nanotrain.model.parallel import ModelParallel
from nanotrain.model.rope import RotaryTables
from nanotrain.model.router import MoEContext
from nanotrain.topology.stages import StageSpec

ALONE = ModelParallel.single_rank()


class Stage(nn.Module):
    """A contiguous run of layers with, at the ends of the model, the embedding and the head.

    Args:
        model_config: the whole model's shape.
        spec: which part of it this stage is.
        dtype: of the parameters and activations.
        parallel: what its layers talk over; they hold this rank's parts.
    """

    def __init__(
        self, model_config: ModelConfig, spec: StageSpec, *, dtype: torch.dtype, parallel: ModelParallel = ALONE
    ) -> None:
        super().__init__()
        self.model, self.spec, self.parallel = model_config, spec, parallel
        self.is_tied = not model_config.untie_embeddings_and_output_weights
        self.embedding: Embedding | None = None
        self.final_norm: nn.Module | None = None
        self.head: Head | None = None
        if spec.has_embedding or (spec.has_head and self.is_tied):
            learned = model_config.position_embedding_type is PositionEmbedding.learned_absolute
            has_position = learned and spec.has_embedding
            self.embedding = Embedding(
                model_config, dtype=dtype, has_position=has_position, tensor_parallel=parallel.tp
            )
        layers = range(spec.first_layer, spec.last_layer)
        self.layers = nn.ModuleDict({str(i): Block(model_config, i, dtype=dtype, parallel=parallel) for i in layers})
        if spec.has_head:
            self.final_norm = build_norm(
                model_config.normalization,
                model_config.hidden_size,
                epsilon=model_config.norm_epsilon,
                dtype=dtype,
            )
            self.head = Head(model_config, dtype=dtype, tensor_parallel=parallel.tp)
        has_rope = model_config.position_embedding_type is PositionEmbedding.rope
        self._rotary = RotaryTables(model_config) if has_rope else None

    def forward(self, hidden: Tensor | None, batch: Batch) -> Tensor:
        """Run the stage on one microbatch.

        Args:
            hidden: [B, S, H] from the stage before, [B, S/tp, H] with sequence parallelism; None on the first.
            batch: the microbatch, the same on every stage; S tokens of each sequence are this cp rank's.

        Returns:
            With a head the sum over unmasked target tokens of the cross-entropy, an fp32 scalar; else hidden states.
        """
        hidden = self._transform(hidden, batch)
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
        hidden = self._transform(None, Batch.of_tokens(tokens))
        return self.head.logits(hidden[:, -1:] if last_only else hidden, tied=self._tied_weight())

    def _transform(self, hidden: Tensor | None, batch: Batch) -> Tensor:
        """Everything but the head."""
        if self.spec.has_embedding:
            assert self.embedding is not None
            hidden = self.embedding(batch.tokens, batch.position_ids)
        assert hidden is not None, "a stage without the embedding needs the hidden states of the stage before"
        positions = batch.tokens.shape[1] if batch.position_ids is None else batch.position_ids
        context = Context(
            rotation=self._rotary.at(positions, like=hidden) if self._rotary is not None else None,
            mask=self.parallel.core_attention.plan_mask(batch.segment_ids, tokens=batch.tokens),
            moe=MoEContext(aux_scale=batch.aux_scale, places=batch.places),
        )
        for layer in self.layers.values():
            hidden = layer(hidden, context)
        assert hidden is not None
        return hidden if self.final_norm is None else self.final_norm(hidden)

    def _tied_weight(self) -> nn.Parameter | None:
        return self.embedding.word.weight if self.is_tied and self.embedding is not None else None
