"""Multi-token prediction: layers after the model that each predict one token further.

    hidden states, after the final norm -- hnorm --+
                                                   +-- eh_proj -- block -- final_norm --+-- head
    embeddings of the next tokens -------- enorm --+                                    |     |
                                                                    hidden of the next layer  loss

DeepSeek-V3, section 2.2. At position i layer k reads token i + k and predicts token i + k + 1. It
uses the model's word embedding and head; its block is like the last layer of the model. Evaluation
and generation leave these layers out. With `--mtp-use-repeated-layer` one layer is applied at every
depth, with the same weights.

The training loss is the model's loss plus `mtp_loss_scaling_factor` times the mean loss of these
layers. The loss of a layer is a mean over its target tokens of the global batch, as in Megatron-LM
with `--calculate-per-token-loss`.

    B batch   S sequence   H hidden
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nanotrain.config.model import ModelConfig
from nanotrain.data.batch import Batch
from nanotrain.model.context import DropoutPlace, HiddenDropout, LayerContext
from nanotrain.model.norm import build_norm
from nanotrain.model.parameters import Parameters
from nanotrain.parallel.tp.layers import ColumnParallelLinear, TensorParallel


def for_repeated_layer(model_config: ModelConfig) -> ModelConfig:
    """The configuration of a block; if it is applied several times, its balance loss counts once.

    Source: Megatron-LM, `router.py`, which divides it by mtp_num_layers.
    """
    moe = model_config.moe
    num_predictions = model_config.mtp.num_layers or 1
    if moe is None or not model_config.mtp.use_repeated_layer:
        return model_config
    coefficients = [coefficient / num_predictions for coefficient in moe.aux_loss_coeff]
    return replace(model_config, moe=replace(moe, aux_loss_coeff=coefficients))


@dataclass(frozen=True)
class Prediction:
    """One token further that a layer predicts in a microbatch."""

    batch: Batch  # the sequences, shifted by k tokens for the kth prediction of the model
    scale: float  # of its summed loss, relative to the summed loss of the model
    # hidden states and their batch -> the summed cross-entropy of unmasked target tokens
    sum_losses: Callable[[Tensor, Batch], Tensor]


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
        mtp = model_config.mtp
        # tokens that it predicts, one after another
        self.num_predictions = (mtp.num_layers or 1) if mtp.use_repeated_layer else 1
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
        self.loss_sums: Tensor  # by prediction
        zeros = torch.zeros(self.num_predictions, dtype=torch.float64)
        self.register_buffer("loss_sums", zeros, persistent=False)

    def forward(
        self,
        hidden: Tensor,
        predictions: Sequence[Prediction],
        *,
        context: LayerContext,
        embed: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, ...]:
        """Predict one token further, or several, one after another.

        One call has all predictions of the layer, so FSDP gathers its weights once.

        Args:
            hidden: [B, S or S/tp, H], normalized, from the model or from the previous layer of
                multi-token prediction.
            predictions: the predictions of this layer.
            context: context of the layers of the model.
            embed: [B, S] tokens -> [B, S or S/tp, H].

        Returns:
            hidden states for the next layer, and for every prediction the summed cross-entropy of
            unmasked target tokens, an fp32 scalar. FSDP keeps the weights of a module that returns
            a scalar until its backward.
        """
        losses = []
        for prediction in predictions:
            embedded = self.drop_embedded(embed(prediction.batch.tokens), context.dropout)
            hidden = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
            # a recomputed prediction sends its tokens by its own split sizes
            own_context = replace(context, dispatch_splits={})
            for function in self.block_functions:
                hidden = function(hidden, own_context)
            hidden = self.final_norm(hidden)
            losses.append(prediction.sum_losses(hidden, prediction.batch))
        self.loss_sums += torch.stack(losses).detach()
        return hidden, *losses
