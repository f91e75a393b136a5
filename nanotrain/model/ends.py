"""Both ends of a model: the embedding of the first stage and the output layer of the last one.

Embedding   tokens -> hidden states
Head        hidden states -> loss or logits

B batch   S sequence   H hidden   V vocabulary   Vp vocabulary with padding
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.comm.autograd import concat_along
from nanotrain.config.model import ModelConfig
from nanotrain.data.batch import Batch
from nanotrain.model.norm import RMSNorm, build_scale
from nanotrain.model.parameters import Parameters
from nanotrain.parallel.tp.layers import TensorParallel, VocabParallelEmbedding
from nanotrain.parallel.tp.loss import (
    Targets,
    TokenGroups,
    Vocabulary,
    vocab_parallel_cross_entropy,
)


class Embedding(nn.Module):
    """Word embeddings, plus learned absolute positions (Radford et al. 2019) if declared.

    Args:
        model_config: norm and scale of the word embeddings; the scale is rounded to their dtype.
        params: word; position [positions, H] where declared, replicated over tp.
        tensor_parallel: shards the vocabulary; under sequence parallelism each rank embeds its
            slice of the positions.
    """

    is_lookup = True  # FSDP: the backward of this unit reads no parameters

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, tensor_parallel: TensorParallel
    ) -> None:
        super().__init__()
        weight = params["word.weight"]
        self.word = VocabParallelEmbedding(weight, tensor_parallel=tensor_parallel)
        self.position_offset = model_config.learned_position_offset
        self.position: nn.Module | None = None
        if "position.weight" in params:
            self.position = VocabParallelEmbedding(
                params["position.weight"], tensor_parallel=tensor_parallel.unsharded
            )
        scale = torch.tensor(model_config.embedding_scale, dtype=weight.dtype, device="cpu")
        self.scale = build_scale(scale.item())
        self.norm: nn.Module = nn.Identity()
        if model_config.embedding_l2_norm:
            self.norm = RMSNorm(None, eps=model_config.norm_epsilon)
        self.tensor_parallel = tensor_parallel

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """[B, S] int64 -> [B, S or S/tp, H]; without position ids the positions are 0..S-1."""
        hidden: Tensor = self.norm(self.scale(self.word(tokens)))
        if self.position is None:
            return hidden
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
        rows = self.tensor_parallel.local_slice(position_ids + self.position_offset)
        positions: Tensor = self.position(rows)
        return hidden + positions


class Head(nn.Module):
    """The output layer.

    Args:
        weight: [Vp/tp, H]; None where the word embedding is passed to every call (tied).
        bias: [Vp/tp]; None where the logits have none.
        vocabulary: V, scaling and softcap of the logits.
        tensor_parallel: shards the vocabulary.
    """

    def __init__(
        self,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None = None,
        *,
        vocabulary: Vocabulary,
        tensor_parallel: TensorParallel,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.vocabulary = vocabulary
        self.tensor_parallel = tensor_parallel
        self.reads_shared = weight is None  # FSDP: this unit also reads the word embedding
        # [2, sources] fp64, sums by `Batch.source_ids` to which forward passes add (`TokenGroups`);
        # None where nothing is counted
        self.source_sums: Tensor | None = None  # training: by corpus, since they were last read
        self.row_sums: Tensor | None = None  # evaluation: by row of a task

    def forward(
        self,
        hidden: Tensor,
        batch: Batch,
        *,
        tied: nn.Parameter | None,
        grad_scale: float | Tensor | None = None,
    ) -> Tensor:
        """The summed cross-entropy: [B, S or S/tp, H] -> fp32 scalar, the same on every tp rank.

        Its gradient is `grad_scale` where that is known.
        """
        targets = Targets(
            batch.labels.flatten(), batch.loss_mask.flatten(), self.token_groups(batch), grad_scale
        )
        hidden = self.tensor_parallel.enter(hidden)
        return vocab_parallel_cross_entropy(
            hidden.flatten(0, 1),
            self._weight(tied),
            targets=targets,
            vocabulary=self.vocabulary,
            group=self.tensor_parallel.group,
            bias=self.bias,
        )

    def logits(self, hidden: Tensor, *, tied: nn.Parameter | None) -> Tensor:
        """[..., H] -> [..., V] without padding, gathered over tp; without sequence parallelism."""
        assert not self.tensor_parallel.sequence_parallel, "a rank has the logits of all tokens"
        size = self.vocabulary.size
        bias = None if self.bias is None else self.bias[:size]
        local = F.linear(self.tensor_parallel.enter(hidden), self._weight(tied)[:size], bias)
        capped = self.vocabulary.cap(local)
        gathered = concat_along(capped, self.tensor_parallel.group, dim=local.ndim - 1)
        return gathered[..., :size]

    def token_groups(self, batch: Batch) -> TokenGroups | None:
        """The corpus, or the row of a task, to which every token belongs."""
        sums = self.source_sums if torch.is_grad_enabled() else self.row_sums
        if sums is None or batch.source_ids is None:
            return None
        source_of_token = batch.source_ids.repeat_interleave(batch.labels.shape[1])
        return TokenGroups(source_of_token, sums)

    def _weight(self, tied: nn.Parameter | None) -> nn.Parameter:
        """The weight of the head: its own, or the tied word embedding."""
        weight = self.weight if tied is None else tied
        assert weight is not None, "a tied head needs the word embedding"
        return weight
