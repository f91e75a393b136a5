"""Modules whose results do not depend on the layout, in any bit (`--invariant`).

`make_invariant` gives every module of a built stage its invariant implementation, a row of
IMPLEMENTATIONS by the type of the module. A module with parameters and without a row is an error.

    linear layers, embedding, loss    parallel/tp/invariant.py, invariant_loss.py
    norms, activations                invariant_elements.py
    Mamba-2, gated DeltaNet           invariant_scan.py
    attention                         parallel/cp/block_attention.py, by `invariant_parallel`
    the shared key of MLA             invariant_mla.py
    routers and experts               invariant_experts.py
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanotrain.comm.autograd import concat_along
from nanotrain.config.config import Config
from nanotrain.config.invariant import (
    num_expert_blocks,
    num_position_blocks,
    num_token_blocks,
    num_weight_blocks,
)
from nanotrain.config.schedules import batch_schedule, global_batch_size
from nanotrain.data.batch import Batch
from nanotrain.model.context import ModelParallel
from nanotrain.model.delta_net import GatedDeltaNet
from nanotrain.model.ends import Embedding, Head
from nanotrain.model.invariant_elements import (
    InWholeVectors,
    invariant_layer_norm,
    invariant_rms_norm,
)
from nanotrain.model.invariant_experts import (
    use_blocked_logits,
    use_token_blocks,
)
from nanotrain.model.invariant_mla import use_ordered_heads
from nanotrain.model.invariant_scan import use_exact_taps, use_grouped_scan
from nanotrain.model.mamba import Mamba2
from nanotrain.model.mla import MultiLatentAttention
from nanotrain.model.mlp import MLP
from nanotrain.model.moe import MoELayer
from nanotrain.model.norm import LayerNorm, RMSNorm
from nanotrain.model.recurrence import ShortConvolution
from nanotrain.model.router import Router
from nanotrain.parallel.cp.block_attention import BlockAttention
from nanotrain.parallel.ep.experts import Experts, GroupedLinear
from nanotrain.parallel.tp.invariant import UnitBlocks, invariant_functions
from nanotrain.parallel.tp.invariant_loss import BlockedVocabulary, blocked_cross_entropy
from nanotrain.parallel.tp.layers import (
    SEQUENCE,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from nanotrain.parallel.tp.loss import Targets


@dataclass(frozen=True)
class InvariantEmbedding:
    """`Embedding.forward` with positions per sample: their gradients are summed exactly."""

    embed: Callable[..., Tensor]

    def __call__(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """[B, S] int64 -> [B, S or S/tp, H]."""
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return self.embed(tokens, position_ids.expand(tokens.shape))


@dataclass(frozen=True)
class InvariantHead:
    """`Head.forward` in blocks of the vocabulary."""

    head: Head
    blocks: UnitBlocks

    def __call__(
        self,
        hidden: Tensor,
        batch: Batch,
        *,
        tied: nn.Parameter | None,
        grad_scale: float | Tensor | None = None,
    ) -> Tensor:
        """[B, S or S/tp, H] -> the summed losses, an fp64 scalar, the same on every tp rank."""
        head = self.head
        group = head.tensor_parallel.group
        if head.tensor_parallel.sequence_parallel:
            hidden = concat_along(hidden, group, dim=SEQUENCE)
        weight = head.weight if tied is None else tied
        assert weight is not None, "a tied head needs the word embedding"
        return blocked_cross_entropy(
            hidden,
            weight,
            targets=Targets(batch.labels, batch.loss_mask, head.token_groups(batch)),
            vocabulary=BlockedVocabulary(self.blocks, group, head.vocabulary.size),
        )


def _embedding(embedding: Embedding, blocks: UnitBlocks) -> Callable[..., Tensor]:
    """The forward of an embedding, with positions per sample."""
    return InvariantEmbedding(embedding.forward)


def _head(head: Head, blocks: UnitBlocks) -> Callable[..., Tensor]:
    """The forward of a head: logits and loss in fixed blocks of tokens and vocabulary."""
    return InvariantHead(head, blocks)


def _rms_norm(norm: RMSNorm, blocks: UnitBlocks) -> Callable[..., Tensor]:
    """The forward of an RMSNorm."""
    return partial(invariant_rms_norm, norm, blocks=blocks)


def _layer_norm(norm: LayerNorm, blocks: UnitBlocks) -> Callable[..., Tensor]:
    """The forward of a LayerNorm."""
    return partial(invariant_layer_norm, norm, blocks=blocks)


def _mlp(mlp: MLP, blocks: UnitBlocks) -> Callable[..., Tensor]:
    """The forward of an MLP, whose activation is computed in whole vectors."""
    mlp.activation = InWholeVectors(mlp.activation)
    return mlp.forward


def _moe(layer: MoELayer, blocks: UnitBlocks) -> Callable[..., Tensor]:
    """The forward of an MoE layer, whose experts read blocks of tokens."""
    layer.experts.activation = InWholeVectors(layer.experts.activation)
    return use_token_blocks(layer, blocks)


def _router(router: Router, blocks: UnitBlocks) -> Callable[..., Tensor]:
    """The forward of a router, with logits in blocks of tokens."""
    assert router.scale is None and router.expert_scale is None and router.bias is None
    if router.moe.router_score_function == "sigmoid":
        router.score = InWholeVectors(router.score)
    return use_blocked_logits(router, blocks.by_token_block())


def _as_built(layer: nn.Module, blocks: UnitBlocks) -> Callable[..., Tensor]:
    """Layers choose their implementation when they are built (`TensorParallel.functions`)."""
    forward: Callable[..., Tensor] = layer.forward
    return forward


# the forward of a module, by its type
IMPLEMENTATIONS: dict[type[nn.Module], Callable[[Any, UnitBlocks], Callable[..., Tensor]]] = {
    ColumnParallelLinear: _as_built,
    RowParallelLinear: _as_built,
    VocabParallelEmbedding: _as_built,
    Embedding: _embedding,
    Head: _head,
    RMSNorm: _rms_norm,
    LayerNorm: _layer_norm,
    MLP: _mlp,
    MoELayer: _moe,
    Router: _router,
    Experts: _as_built,  # replaced with its layer
    GroupedLinear: _as_built,
    MultiLatentAttention: use_ordered_heads,
    ShortConvolution: use_exact_taps,
    Mamba2: use_grouped_scan,
    GatedDeltaNet: use_grouped_scan,
}


def unit_blocks(config: Config, *, dp: int) -> UnitBlocks:
    """The blocks of a model, and the addends of a sum in its largest global batch."""
    schedule = batch_schedule(config)
    sizes = schedule.sizes if schedule else [global_batch_size(config.train, dp)]
    # multi-token prediction looks tokens up and predicts them again
    num_losses = 1 + (config.model.mtp.num_layers or 0)
    num_heads = config.model.num_attention_heads
    if config.model.linear_attention is not None:
        num_heads = max(num_heads, config.model.linear_attention.num_value_heads)
    return UnitBlocks(
        num_weight_blocks(config),
        config.data.seq_length // num_position_blocks(config),
        num_tokens=max(sizes) * config.data.seq_length * num_losses,
        num_heads=num_heads,
        tokens_per_block=config.data.seq_length // num_token_blocks(config),
        num_expert_blocks=num_expert_blocks(config),
    )


def invariant_parallel(parallel: ModelParallel, config: Config, *, dp: int) -> ModelParallel:
    """The implementations that layers and attention choose when they are built.

    Args:
        parallel: groups and options of the layers of a run.
        config: configuration of the run.
        dp: number of data-parallel ranks.
    """
    blocks = unit_blocks(config, dp=dp)
    return replace(
        parallel,
        tp=replace(parallel.tp, functions=invariant_functions(blocks)),
        core_attention=BlockAttention(parallel.cp, blocks.block_length),
    )


def make_invariant(stage: nn.Module, blocks: UnitBlocks) -> None:
    """Replace the implementations of the modules of a built stage.

    Gradients of parameters are fp64 from here on, as the gradients in the flat buffers are.
    """
    for name, module in list(stage.named_modules()):
        implementation = IMPLEMENTATIONS.get(type(module))
        if implementation is None:
            own = [param_name for param_name, _ in module.named_parameters(recurse=False)]
            assert not own, f"{name} ({type(module).__name__}) has {own} and no invariant form"
        else:
            module.forward = implementation(module, blocks)
    for param in stage.parameters():
        param.grad_dtype = torch.float64
