"""The transformer, top to bottom.

    Stage      the layers of one pipeline rank; a model without pipeline parallelism is one stage
    Embedding  tokens -> hidden states        Head  hidden states -> loss or logits
    Block      x + attention(norm(x)), then x + mlp(norm(x)); or with norms of the outputs
    HalfBlock  one of the two, in models with a hybrid layer pattern
    ShortcutBlock   two blocks, to whose end the experts of the first are added

    tokens -> [embedding] -> layers.{first}..{last-1} -> [final_norm -> head] -> loss
              first stage                                 last stage

Other files: those of MIXER_MODULES, norm.py, rope.py, MLPs (mlp.py), experts (moe.py), multi-token
prediction (mtp.py). Parameters are declared in spec/parameters.py and created on the meta device.
Their names are global on every stage.

    B batch   S sequence   H hidden   V vocabulary   Vp vocabulary with padding
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from nanotrain.attention.tiles import chunk_segments
from nanotrain.comm.autograd import concat_along
from nanotrain.config.model import ModelConfig
from nanotrain.data.batch import Batch
from nanotrain.model.attention import Attention
from nanotrain.model.attention_mamba import AttentionMamba2
from nanotrain.model.context import (
    BatchContext,
    DropoutPlace,
    HiddenDropout,
    LayerContext,
    ModelParallel,
)
from nanotrain.model.delta_net import GatedDeltaNet, KimiDeltaAttention
from nanotrain.model.dsa import SparseLatentAttention
from nanotrain.model.mamba import Mamba2
from nanotrain.model.mla import MultiLatentAttention
from nanotrain.model.mlp import build_mlp
from nanotrain.model.moe import MoELayer
from nanotrain.model.mtp import MTPLayer
from nanotrain.model.norm import RMSNorm, build_norm, build_post_norm
from nanotrain.model.parameters import Parameters
from nanotrain.model.rope import layer_tables
from nanotrain.model.short_conv import ShortConv
from nanotrain.parallel.tp.layers import TensorParallel, VocabParallelEmbedding
from nanotrain.parallel.tp.loss import (
    Targets,
    TokenGroups,
    Vocabulary,
    vocab_parallel_cross_entropy,
)
from nanotrain.spec.declaration import Declaration
from nanotrain.spec.kinds import MIXERS
from nanotrain.spec.parameters import declare_stage
from nanotrain.spec.params import LocalParam
from nanotrain.spec.shape import ModelShape
from nanotrain.spec.stages import StageSpec


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); `norm_placement` also normalizes the outputs,
    or only these.

    Args:
        model_config: configuration of the model.
        params: attention, mlp or experts, and those norms before and after them that are declared.
        parallel: groups of the layers.
        layer: index in the model.
    """

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        super().__init__()
        self.attention_norm = build_norm(model_config, params.submodule("attention_norm"))
        self.attention = build_mixer(
            model_config, params.submodule("attention"), parallel=parallel, layer=layer
        )
        self.attention_post_norm = build_post_norm(model_config, params, half="attention")
        self.mlp_norm = build_norm(model_config, params.submodule("mlp_norm"))
        self.mlp = build_mlp(model_config, params.submodule("mlp"), parallel=parallel, layer=layer)
        self.mlp_post_norm = build_post_norm(model_config, params, half="mlp")

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, S or S/tp, H] -> the same shape."""
        x = x + self.attention_post_norm(self.attention(self.attention_norm(x), context))
        return x + self.mlp_post_norm(self.mlp(self.mlp_norm(x), context))


class ShortcutBlock(Block):
    """A block with experts and a dense block, at whose end the experts' outputs are added
    (LongCat-Flash, section 2.2).

        x1 = x + attention(norm(x))        routed experts of norm(x1) ---------------+
        x2 = x1 + shared expert(norm(x1)), through the second block ---------------- + --> out

    Tokens travel to their experts and back while the shared expert and the second block are
    computed.
    """

    mlp: MoELayer

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        super().__init__(model_config, params, parallel=parallel, layer=layer)
        self.second = Block(
            model_config, params.submodule("second"), parallel=parallel, layer=layer
        )

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, S or S/tp, H] -> the same shape."""
        x = x + self.attention_post_norm(self.attention(self.attention_norm(x), context))
        hidden = self.mlp_norm(x)
        finish = self.mlp.start(hidden, context)
        assert self.mlp.shared is not None, "a rule demands a shared expert"
        x = self.second(x + self.mlp_post_norm(self.mlp.shared(hidden, context)), context)
        return x + self.mlp_post_norm(finish())


class HalfBlock(nn.Module):
    """x + attention(norm(x)), or x + mlp(norm(x)): one half of a `Block`, with its names and
    arguments.
    """

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        super().__init__()
        half, build = (
            ("attention", build_mixer) if params.submodule("attention") else ("mlp", build_mlp)
        )
        self.add_module(f"{half}_norm", build_norm(model_config, params.submodule(f"{half}_norm")))
        self.add_module(
            half, build(model_config, params.submodule(half), parallel=parallel, layer=layer)
        )
        self.add_module(f"{half}_post_norm", build_post_norm(model_config, params, half=half))

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, S or S/tp, H] -> the same shape."""
        norm, layer, post_norm = self.children()
        return x + post_norm(layer(norm(x), context))


class Embedding(nn.Module):
    """Word embeddings, plus learned absolute positions (Radford et al. 2019) where they are
    declared.

    Args:
        model_config: factor on the word embeddings, which is rounded to their dtype, and their
            norm.
        params: word; position [positions, H] where declared, replicated over tp.
        tensor_parallel: shards the vocabulary; under sequence parallelism each rank embeds its
            slice of the positions.
    """

    is_lookup = True  # as an FSDP unit its backward reads no parameters

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, tensor_parallel: TensorParallel
    ) -> None:
        super().__init__()
        weight, position, self.tensor_parallel = (
            params["word.weight"],
            params.get("position.weight"),
            tensor_parallel,
        )
        self.scale = torch.tensor(
            model_config.embedding_scale, dtype=weight.dtype, device="cpu"
        ).item()
        self.norm = (
            RMSNorm(None, eps=model_config.norm_epsilon)
            if model_config.embedding_l2_norm
            else nn.Identity()
        )
        self.word = VocabParallelEmbedding(weight, tensor_parallel=tensor_parallel)
        unsharded = partial(VocabParallelEmbedding, tensor_parallel=tensor_parallel.unsharded)
        self.position = None if position is None else unsharded(position)

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """[B, S] int64 -> [B, S or S/tp, H]; without position ids the positions are 0..S-1."""
        hidden: Tensor = self.word(tokens)
        hidden = self.norm(hidden * self.scale if self.scale != 1.0 else hidden)
        if self.position is None:
            return hidden
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
        out: Tensor = hidden + self.position(self.tensor_parallel.local_slice(position_ids))
        return out


class Head(nn.Module):
    """The output layer.

    Args:
        weight: [Vp/tp, H]; None where it is tied to the word embedding, which is then passed to
            every call.
        vocabulary: V, scaling and softcap of the logits.
        tensor_parallel: shards the vocabulary.
    """

    def __init__(
        self,
        weight: nn.Parameter | None,
        *,
        vocabulary: Vocabulary,
        tensor_parallel: TensorParallel,
    ) -> None:
        super().__init__()
        self.weight, self.vocabulary, self.tensor_parallel = weight, vocabulary, tensor_parallel
        self.reads_shared = weight is None  # as an FSDP unit it reads the word embedding
        # [2, sources] fp64, sums by `Batch.source_ids` that forward passes add to (`TokenGroups`):
        # of training steps by corpus, since they were last read, and of evaluations by row of a
        # task; None where not counted
        self.source_sums: Tensor | None = None
        self.row_sums: Tensor | None = None

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
        return vocab_parallel_cross_entropy(
            rearrange(self.tensor_parallel.enter(hidden), "b s h -> (b s) h"),
            self._weight(tied),
            targets=Targets(
                batch.labels.flatten(), batch.loss_mask.flatten(), self._groups(batch), grad_scale
            ),
            vocabulary=self.vocabulary,
            group=self.tensor_parallel.group,
        )

    def logits(self, hidden: Tensor, *, tied: nn.Parameter | None) -> Tensor:
        """[..., H] -> [..., V] without padding, gathered over tp; without sequence parallelism."""
        assert not self.tensor_parallel.sequence_parallel, "a rank has the logits of all tokens"
        local = F.linear(
            self.tensor_parallel.enter(hidden), self._weight(tied)[: self.vocabulary.size]
        )
        gathered = concat_along(
            self.vocabulary.cap(local), self.tensor_parallel.group, dim=local.ndim - 1
        )
        return gathered[..., : self.vocabulary.size]

    def _groups(self, batch: Batch) -> TokenGroups | None:
        """The corpus of every token, or its row of a task."""
        sums = self.source_sums if torch.is_grad_enabled() else self.row_sums
        if sums is None or batch.source_ids is None:
            return None
        return TokenGroups(batch.source_ids.repeat_interleave(batch.labels.shape[1]), sums)

    def _weight(self, tied: nn.Parameter | None) -> nn.Parameter:
        weight = self.weight if tied is None else tied
        assert weight is not None, "a tied head needs the word embedding"
        return weight


class Stage(nn.Module):
    """Consecutive layers of a model, with the embedding on the first stage and the head on the
    last.

    With tied embeddings or multi-token prediction the last stage has a replica of the word
    embedding. It is passed to the head at each call: parameters may be replaced by views of a flat
    buffer at any time, so no module keeps a second reference.

    Args:
        model_config: configuration of the model.
        spec: the layers of the stage.
        params: what this rank holds of the stage's parameters, in declared order.
        parallel: groups of the layers.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        spec: StageSpec,
        *,
        params: Sequence[LocalParam],
        parallel: ModelParallel,
    ) -> None:
        super().__init__()
        self.model_config, self.spec, self.params, self.parallel = (
            model_config,
            spec,
            tuple(params),
            parallel,
        )
        shape, declared = ModelShape.of(model_config), Parameters.on_meta(params)
        embed = partial(Embedding, model_config, tensor_parallel=parallel.tp)
        self.embedding = (
            embed(embedding) if (embedding := declared.submodule("embedding")) else None
        )
        self._drop_embedded = HiddenDropout(
            model_config.hidden_dropout, 0, DropoutPlace.embedding, parallel.tp
        )
        # False if a layer attends to all earlier keys, True if one attends within a window; or both
        mtp_layers = shape.mtp_layers if spec.has_head else range(0)
        mixers = {i: shape.kinds(i)[0] for i in (*spec.layers, *mtp_layers)}
        self._has_windows = {
            shape.has_window(i) for i, mixer in mixers.items() if mixer and MIXERS[mixer].has_keys
        }

        def build_block(params: Parameters, layer: int) -> nn.Module:
            usual = ShortcutBlock if len(shape.blocks(layer)) > 1 else Block
            kind = HalfBlock if None in shape.kinds(layer) else usual
            block = kind(model_config, params, parallel=parallel.of_layer(layer), layer=layer)
            if model_config.has_dropout:
                block.register_forward_pre_hook(lambda _, args: (args[0], args[1].of_layer(layer)))
            return block

        self.layers = nn.ModuleDict(
            {str(i): build_block(declared.submodule(f"layers.{i}"), i) for i in spec.layers}
        )
        self.final_norm: nn.Module | None = None
        self.head: Head | None = None
        if spec.has_head:
            self.final_norm = build_norm(model_config, declared.submodule("final_norm"))
            head = declared.get("head.weight")
            vocabulary = Vocabulary(
                shape.vocab_size, model_config.final_logit_softcapping, model_config.logits_scaling
            )
            self.head = Head(head, vocabulary=vocabulary, tensor_parallel=parallel.tp)
        self.mtp = nn.ModuleDict()
        for depth, layer in enumerate(mtp_layers):
            own = declared.submodule(f"mtp.{depth}")
            block = build_block(own.submodule("block"), layer)
            self.mtp[str(depth)] = MTPLayer(
                model_config, own, block=block, tensor_parallel=parallel.tp, layer=layer
            )
        # The layers in order; `transform_blocks` may replace them by functions of one or several
        # layers.
        self.layer_functions: list[Callable[..., Tensor]] = list(self.layers.values())
        self._rotary, self._is_tied = (
            layer_tables(model_config),
            not model_config.untie_embeddings_and_output_weights,
        )
        self._window, self._chunk = model_config.window_size, model_config.attention_chunk_size
        registered = [name for name, _ in self.named_parameters()]
        assert registered == [local.spec.name for local in params], (
            "modules register other parameters than declared"
        )

    def forward(self, hidden: Tensor | None, context: BatchContext) -> Tensor:
        """Run the stage on one microbatch.

        Args:
            hidden: [B, S, H] of the previous stage, [B, S/tp, H] with sequence parallelism; None on
                the first stage.
            context: the microbatch, the same on every stage; S tokens of each sequence are on this
                cp rank.

        Returns:
            With a head the sum over unmasked target tokens of the cross-entropy, an fp32 scalar;
            else hidden states.
        """
        hidden, layer_context = self._transform(hidden, context)
        if self.head is None:
            return hidden
        loss: Tensor = self.head(
            hidden, context.batch, tied=self._tied_weight(), grad_scale=context.loss_scale
        )
        return self._predict_further(hidden, context, layer_context=layer_context, loss=loss)

    def logits(
        self, tokens: Tensor, *, last_only: bool = False, position_ids: Tensor | None = None
    ) -> Tensor:
        """The logits of a stage that is a full model.

        Args:
            tokens: [B, S] int64.
            last_only: only those of the last position, for sampling.
            position_ids: [B, S] int64; None for 0..S-1.

        Returns:
            [B, S, V] or [B, 1, V], without padding, in the dtype of the activations.
        """
        assert self.head is not None, "only a stage with the head has logits"
        hidden, _ = self._transform(
            None, BatchContext(replace(Batch.of_tokens(tokens), position_ids=position_ids))
        )
        return self.head.logits(hidden[:, -1:] if last_only else hidden, tied=self._tied_weight())

    @property
    def mtp_layers(self) -> list[MTPLayer]:
        """The layers of multi-token prediction in order; only the last stage has any."""
        return [layer for layer in self.mtp.values() if isinstance(layer, MTPLayer)]

    def _predict_further(
        self, hidden: Tensor, context: BatchContext, *, layer_context: LayerContext, loss: Tensor
    ) -> Tensor:
        """The loss of the model; its backward also differentiates those of multi-token prediction."""
        scales = context.mtp_scales
        for layer, batch, scale in zip(self.mtp_layers, context.batch.mtp, scales, strict=False):
            assert self.embedding is not None and self.head is not None, (
                "multi-token prediction reads both"
            )
            # `forward`, not a call: their FSDP hooks must not run, the unit of this layer gathers
            # their parameters
            grad_scale = None if context.loss_scale is None else context.loss_scale * scale
            sum_losses = partial(self.head.forward, tied=self._tied_weight(), grad_scale=grad_scale)
            embed = self.embedding.forward
            hidden, further = layer(
                hidden, batch, context=layer_context, embed=embed, sum_losses=sum_losses
            )
            scaled = scale * further
            # not `attach_loss`: the step scales both by one gradient
            loss = loss + (scaled - scaled.detach())
        return loss

    def _transform(
        self, hidden: Tensor | None, context: BatchContext
    ) -> tuple[Tensor, LayerContext]:
        """Run embedding, layers and final norm; returns the hidden states and the context of the
        layers.
        """
        batch, dropout = context.batch, context.dropout()
        if self.spec.has_embedding:
            assert self.embedding is not None, "the first stage has the embedding"
            hidden = self._drop_embedded(self.embedding(batch.tokens, batch.position_ids), dropout)
        assert hidden is not None, (
            "a stage without the embedding needs the hidden states of the previous stage"
        )
        positions = batch.tokens.shape[1] if batch.position_ids is None else batch.position_ids
        rotary, local, factors = (
            None if each is None else each.at(positions, like=hidden) for each in self._rotary
        )
        plan_mask = partial(self.parallel.core_attention.plan_mask, tokens=batch.tokens)
        mask = plan_mask(batch.segment_ids) if False in self._has_windows else None
        chunks, length = batch.segment_ids, batch.tokens.shape[1] * self.parallel.cp.size
        if self._chunk is not None:
            chunks = chunk_segments(chunks, length=length, size=self._chunk)
        window_mask = (
            plan_mask(chunks, window=self._chunk or self._window)
            if True in self._has_windows
            else None
        )
        layer_context = LayerContext(
            rotary=(rotary, local or rotary, factors),
            masks=(mask, window_mask),
            segment_ids=batch.segment_ids,
            sequence_positions=context.sequence_positions,
            dropout=dropout,
            aux_loss_scale=context.aux_loss_scale,
            is_padding=batch.is_padding,
        )
        for function in self.layer_functions:
            hidden = function(hidden, layer_context)
        assert hidden is not None
        return (hidden if self.final_norm is None else self.final_norm(hidden)), layer_context

    def _tied_weight(self) -> nn.Parameter | None:
        return self.embedding.word.weight if self._is_tied and self.embedding is not None else None


def build_stage(
    model_config: ModelConfig, spec: StageSpec | None = None, *, dtype: str = "fp32"
) -> Stage:
    """A stage without tensor and expert parallelism, on the meta device.

    Args:
        model_config: configuration of the model, its vocabulary size set.
        spec: the layers; None for the full model.
        dtype: dtype of the parameters and activations, "fp32", "bf16" or "fp16".
    """
    spec = spec or StageSpec.single(model_config.num_layers)
    specs = declare_stage(Declaration(ModelShape.of(model_config), dtype), spec)
    params = [LocalParam.unsharded(param) for param in specs]
    return Stage(model_config, spec, params=params, parallel=ModelParallel.single_rank())


# by the kinds of spec/kinds.MIXERS: __init__(model_config, params, *, parallel, layer),
# forward(hidden, context)
MIXER_MODULES: dict[str, type[nn.Module]] = {
    "attention": Attention,
    "mla": MultiLatentAttention,
    "dsa": SparseLatentAttention,
    "gated_delta_net": GatedDeltaNet,
    "kda": KimiDeltaAttention,
    "mamba2": Mamba2,
    "attention_mamba2": AttentionMamba2,
    "short_conv": ShortConv,
}


def build_mixer(
    model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
) -> nn.Module:
    """The attention of a layer, or what is in its place."""
    kind = ModelShape.of(model_config).kinds(layer)[0] or ""
    return MIXER_MODULES[kind](model_config, params, parallel=parallel, layer=layer)
