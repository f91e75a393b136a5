"""Multi-token prediction: layers after the model that each predict one token further.

    hidden states, after the final norm -- hnorm --+
                                                   +-- eh_proj -- block -- final_norm --+-- head
    embeddings of the next tokens -------- enorm --+                                    |     |
                                                                    hidden of the next layer  loss

DeepSeek-V3, section 2.2. At position i layer k reads token i + k and predicts token i + k + 1. It
uses the model's word embedding and head; its block is like the last layer of the model. Evaluation
and generation leave these layers out.

The training loss is the model's loss plus `mtp_loss_scaling_factor` times the mean loss of these
layers. The loss of a layer is a mean over its target tokens of the global batch, as in Megatron-LM
with `--calculate-per-token-loss`.

    B batch   S sequence   H hidden
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nanotrain.config.model import ModelConfig
from nanotrain.data.batch import Batch
from nanotrain.model.context import DropoutPlace, HiddenDropout, LayerContext
from nanotrain.model.norm import build_norm
from nanotrain.model.parameters import Parameters
from nanotrain.parallel.tp.layers import ColumnParallelLinear, TensorParallel


class MTPLayer(nn.Module):
    """One layer of multi-token prediction.

    Args:
        model_config: configuration of the model.
        params: enorm, hnorm, eh_proj, final_norm.
        block: a transformer block with the parameters `block`.
        tensor_parallel: tp group of the stage; the projection is outside its sharded region.
        layer: index after the layers of the model.
    """

    reads_shared = True  # FSDP: this unit also reads embedding and head

    def __init__(
        self,
        model_config: ModelConfig,
        params: Parameters,
        *,
        block: nn.Module,
        tensor_parallel: TensorParallel,
        layer: int,
    ) -> None:
        super().__init__()
        self.enorm = build_norm(model_config, params.submodule("enorm"))
        self.hnorm = build_norm(model_config, params.submodule("hnorm"))
        self.eh_proj = ColumnParallelLinear(
            *params.linear("eh_proj"), tensor_parallel=tensor_parallel.unsharded
        )
        self.block = block
        self.final_norm = build_norm(model_config, params.submodule("final_norm"))
        # `transform_blocks` may replace the block by a function
        self.block_functions: list[Callable[..., Tensor]] = [block]
        self.drop_embedded = HiddenDropout(
            model_config.hidden_dropout, layer, DropoutPlace.embedding, tensor_parallel
        )
        self.loss_sum: Tensor
        self.register_buffer("loss_sum", torch.zeros((), dtype=torch.float64), persistent=False)

    def forward(
        self,
        hidden: Tensor,
        batch: Batch,
        *,
        context: LayerContext,
        embed: Callable[[Tensor], Tensor],
        sum_losses: Callable[[Tensor, Batch], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Predict one token further.

        Args:
            hidden: [B, S or S/tp, H], normalized, from the model or from the previous layer of
                multi-token prediction.
            batch: the sequences, shifted by k tokens for layer k.
            context: context of the layers of the model.
            embed: [B, S] tokens -> [B, S or S/tp, H].
            sum_losses: hidden states and their batch -> the summed cross-entropy.

        Returns:
            hidden states for the next layer, and the summed cross-entropy of unmasked target
            tokens, an fp32 scalar.
        """
        embedded = self.drop_embedded(embed(batch.tokens), context.dropout)
        hidden = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        for function in self.block_functions:
            hidden = function(hidden, context)
        hidden = self.final_norm(hidden)
        loss = sum_losses(hidden, batch)
        self.loss_sum += loss.detach()
        return hidden, loss
