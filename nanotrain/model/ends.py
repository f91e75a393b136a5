"""The two ends of the model: `Embedding` turns tokens into hidden states, `Head` hidden states into the loss.

B batch   S sequence   H hidden   V vocabulary   Vp vocabulary with padding
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.config.config import ModelConfig
from nanotrain.config.derive import padded_vocab_size
from nanotrain.data.batch import Batch
from nanotrain.kernels.linear import fprop
from nanotrain.model.meta import meta_parameter, shard_size
from nanotrain.parallel.tp.layers import VocabParallelEmbedding
from nanotrain.parallel.tp.loss import vocab_parallel_cross_entropy
from nanotrain.parallel.tp.tensor_parallel import TensorParallel


class Positions(nn.Module):
    """Learned positions (Radford et al. 2019): a table that every tp rank holds whole."""

    def __init__(self, model_config: ModelConfig, *, dtype: torch.dtype, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        shape = (model_config.max_position_embeddings, model_config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        self.tensor_parallel = tensor_parallel

    def forward(self, position_ids: Tensor) -> Tensor:
        """[B or 1, S] int64 -> [B or 1, S or S/tp, H]."""
        return F.embedding(self.tensor_parallel.local_slice(position_ids), self.weight)


class Embedding(nn.Module):
    """Words, plus learned positions where the model has them."""

    def __init__(
        self, model_config: ModelConfig, *, dtype: torch.dtype, has_position: bool, tensor_parallel: TensorParallel
    ) -> None:
        super().__init__()
        num_rows = shard_size(padded_vocab_size(model_config), tensor_parallel)
        self.word = VocabParallelEmbedding(
            meta_parameter(num_rows, model_config.hidden_size, dtype=dtype), tensor_parallel=tensor_parallel
        )
        self.position = Positions(model_config, dtype=dtype, tensor_parallel=tensor_parallel) if has_position else None

    def forward(self, tokens: Tensor, position_ids: Tensor | None) -> Tensor:
        """[B, S] int64 -> [B, S or S/tp, H]; no position ids means 0..S-1."""
        hidden: Tensor = self.word(tokens)
        if self.position is None:
            return hidden
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
        out: Tensor = hidden + self.position(position_ids)
        return out


class Head(nn.Module):
    """The output layer; its weight is its own or, tied, the one it is handed."""

    def __init__(self, model_config: ModelConfig, *, dtype: torch.dtype, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        assert model_config.vocab_size is not None, "the vocabulary size is resolved before a model is built"
        self.vocab_size, self.tensor_parallel = model_config.vocab_size, tensor_parallel
        self.weight: nn.Parameter | None = None
        if model_config.untie_embeddings_and_output_weights:
            shape = (padded_vocab_size(model_config) // tensor_parallel.group.size, model_config.hidden_size)
            self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))

    def forward(self, hidden: Tensor, batch: Batch, *, tied: nn.Parameter | None) -> Tensor:
        """The summed loss of the batch: [B, S or S/tp, H] -> fp32 scalar, the same on every tp rank."""
        return vocab_parallel_cross_entropy(
            self.tensor_parallel.enter(hidden).flatten(0, 1),
            self._weight(tied),
            labels=batch.labels.flatten(),
            loss_mask=batch.loss_mask.flatten(),
            vocab_size=self.vocab_size,
            group=self.tensor_parallel.group,
        )

    def logits(self, hidden: Tensor, *, tied: nn.Parameter | None) -> Tensor:
        """[..., H] -> [..., V], padding cut off; of a head that no tp group shares."""
        assert self.tensor_parallel.group.size == 1, "logits of a cut vocabulary would have to be gathered"
        return fprop(hidden, self._weight(tied)[: self.vocab_size])

    def _weight(self, tied: nn.Parameter | None) -> nn.Parameter:
        weight = self.weight if tied is None else tied
        assert weight is not None, "a tied head must be handed the word embedding"
        return weight
