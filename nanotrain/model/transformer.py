"""The transformer, top to bottom.

    Block           x + attention(norm(x)), then x + mlp(norm(x)); or with norms of the outputs
    HalfBlock       one of the two, in models with a hybrid layer pattern
    ExtendedBlock   a block, then an input of its own and a learned factor
    ShortcutBlock   two blocks; the experts of the first are added at the end of the second
    RESIDUAL_MODULES   all kinds of residual connections: blocks, and both ends of the streams
    Stage           the layers of one pipeline rank; without pipeline parallelism the full model

    tokens -> [embedding] -> layers.{first}..{last-1} -> [final_norm -> head] -> loss
              first stage                                 last stage

The other files of the package hold the embedding and the head (ends.py), the mixer and the MLP of
a block (sublayers.py), norms (norm.py), rotary positions (rope.py), MLPs (mlp.py), experts (moe.py)
and multi-token prediction (mtp.py). Parameters are declared in spec/parameters.py and created on
the meta device. Their names are global on every stage.

    B batch   S sequence   H hidden   V vocabulary   Vp vocabulary with padding
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from torch import Tensor, nn

from nanotrain.config.model import ModelConfig
from nanotrain.config.mup import logits_divisor
from nanotrain.data.batch import Batch
from nanotrain.model.attention_residuals import AttendStreams, AttentionConnection, EnterBlocks
from nanotrain.model.context import (
    AttentionInputs,
    BatchContext,
    DropoutContext,
    DropoutPlace,
    HiddenDropout,
    LayerContext,
    MaskPlanner,
    ModelParallel,
)
from nanotrain.model.ends import Embedding, Head
from nanotrain.model.gated_block import GatedBlock
from nanotrain.model.hyper_connections import (
    EnterStreams,
    HyperBlock,
    HyperConnection,
    ManifoldConnection,
    SumStreams,
    WeighManifoldStreams,
)
from nanotrain.model.layer_inputs import LayerInputHalf, LayerInputs, layer_input_state
from nanotrain.model.moe import MoELayer
from nanotrain.model.mtp import MTPLayer, Prediction, for_repeated_layer
from nanotrain.model.norm import LearnedScale, build_norm
from nanotrain.model.parallel_block import ParallelBlock
from nanotrain.model.parameters import Parameters
from nanotrain.model.rope import PositionTables
from nanotrain.model.shared_state import StageMessages, State
from nanotrain.model.sublayers import Sublayers
from nanotrain.parallel.tp.loss import (
    Vocabulary,
)
from nanotrain.spec.declaration import Declaration
from nanotrain.spec.parameters import declare_stage
from nanotrain.spec.params import LocalParam
from nanotrain.spec.shape import ModelShape
from nanotrain.spec.stages import StageSpec


class Block(Sublayers):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, S or S/tp, H] -> the same shape."""
        x = x + self.attention_post_norm(self.attention(self.attention_norm(x), context))
        return x + self.mlp_post_norm(self.mlp(self.mlp_norm(x), context))

    def in_halves(self, x: Tensor, context: LayerContext) -> Tensor:
        """`forward` as two functions, for a transform that replaces one of them.

        `forward` itself does not call them: compiled, a block would have more graphs.
        """
        return self.feed_forward(self.attend(x, context), context)

    def attend(self, x: Tensor, context: LayerContext) -> Tensor:
        """x + attention(norm(x)): [B, S or S/tp, H] -> the same shape."""
        return x + self.attention_output(x, context)

    def feed_forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """x + mlp(norm(x)): [B, S or S/tp, H] -> the same shape."""
        return x + self.mlp_output(x, context)


class ExtendedBlock(Block):
    """A block, then an input of its own and a learned factor where the model has them (Gemma 4)."""

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        super().__init__(model_config, params, parallel=parallel, layer=layer)
        self.layer_input: LayerInputHalf | None = None
        if declared := params.submodule("layer_input"):
            self.layer_input = LayerInputHalf(
                model_config, declared, parallel=parallel, layer=layer
            )
        self.layer_scale: nn.Module = nn.Identity()
        if "layer_scale.weight" in params:
            self.layer_scale = LearnedScale(params["layer_scale.weight"])

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, S or S/tp, H] -> the same shape."""
        return self._extend(super().forward(x, context), context)

    def in_halves(self, x: Tensor, context: LayerContext) -> Tensor:
        """`forward` by the halves."""
        return self._extend(super().in_halves(x, context), context)

    def _extend(self, x: Tensor, context: LayerContext) -> Tensor:
        """Add the input of the layer, and scale the hidden states."""
        if self.layer_input is not None:
            x = self.layer_input(x, context)
        scaled: Tensor = self.layer_scale(x)
        return scaled


class ShortcutBlock(Block):
    """A block with experts and a dense block (LongCat-Flash, section 2.2).

        x1 = x + attention(norm(x))        routed experts of norm(x1) ---------------+
        x2 = x1 + shared expert(norm(x1)), through the second block ---------------- + --> out

    Tokens are sent to their experts and back while the shared expert and the second block run.
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
        attended = self.attention(self.attention_norm(x), context)
        x = x + self.attention_post_norm(attended)
        hidden = self.mlp_norm(x)
        finish = self.mlp.start(hidden, context)
        assert self.mlp.shared is not None, "a rule demands a shared expert"
        x = self.second(x + self.mlp_post_norm(self.mlp.shared(hidden, context)), context)
        return x + self.mlp_post_norm(finish())


class HalfBlock(Sublayers):
    """x + attention(norm(x)), or x + mlp(norm(x)): one half of a `Block`, with the same names."""

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, S or S/tp, H] -> the same shape."""
        if hasattr(self, "attention"):
            return x + self.attention_output(x, context)
        return x + self.mlp_output(x, context)


def build_plain_block(
    model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
) -> nn.Module:
    """A block, or a half of one where the layer has one sublayer."""
    is_half = None in ModelShape.of(model_config).kinds(layer)
    kind = HalfBlock if is_half else Block
    return kind(model_config, params, parallel=parallel, layer=layer)


def one_stream(*_: object, **__: object) -> nn.Module:
    """The identity at both ends of one residual stream."""
    return nn.Identity()


@dataclass(frozen=True)
class ResidualModules:
    """The modules of a kind of residual connections."""

    # (model_config, params, *, parallel, layer): forward(x, context)
    block: Callable[..., nn.Module]
    # (model_config): embedding [B, S, H] -> streams
    enter: Callable[..., nn.Module] = one_stream
    # (model_config, params, *, parallel): streams -> [B, S, H] before the final norm
    leave: Callable[..., nn.Module] = one_stream


class Stage(nn.Module):
    """Consecutive layers of a model; the first stage has the embedding, the last one the head.

    With tied embeddings or multi-token prediction the last stage has a replica of the word
    embedding. It is passed to the head at each call: parameters may be replaced by views of a flat
    buffer at any time, so no module keeps a second reference.

    Args:
        model_config: configuration of the model.
        spec: the layers of the stage.
        params: the local shards of the parameters, in declared order.
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
        self.model_config = model_config
        self.spec = spec
        self.params = tuple(params)
        self.parallel = parallel
        shape = ModelShape.of(model_config)
        declared = Parameters.on_meta(params)
        mtp_layers = shape.mtp_layers if spec.has_head else range(0)
        self.embedding: Embedding | None = None
        residual = RESIDUAL_MODULES[model_config.residual_type]
        if embedding := declared.submodule("embedding"):
            self.embedding = Embedding(model_config, embedding, tensor_parallel=parallel.tp)
        self.layer_inputs: LayerInputs | None = None
        if inputs := declared.submodule("layer_inputs"):
            self.layer_inputs = LayerInputs(model_config, inputs, tensor_parallel=parallel.tp)
        self.enter_streams = residual.enter(model_config)
        self.drop_embedded = HiddenDropout(
            model_config.hidden_dropout, 0, DropoutPlace.embedding, parallel.tp
        )
        self.layers = nn.ModuleDict()
        for layer in spec.layers:
            layer_params = declared.submodule(f"layers.{layer}")
            block = build_block(model_config, layer_params, parallel=parallel, layer=layer)
            self.layers[str(layer)] = block
        self.final_norm: nn.Module | None = None
        self.head: Head | None = None
        if spec.has_head:
            end = declared.submodule("leave_streams")
            self.leave_streams = residual.leave(model_config, end, parallel=parallel)
            self.final_norm = build_norm(model_config, declared.submodule("final_norm"))
            vocabulary = Vocabulary(
                shape.vocab_size, model_config.final_logit_softcapping, logits_divisor(model_config)
            )
            self.head = Head(
                declared.get("head.weight"),
                declared.get("head.bias"),
                vocabulary=vocabulary,
                tensor_parallel=parallel.tp,
            )
        self.mtp = nn.ModuleDict()
        block_config = for_repeated_layer(model_config)
        for depth, layer in enumerate(mtp_layers):
            layer_params = declared.submodule(f"mtp.{depth}")
            own_block = layer_params.submodule("block")
            block = build_block(block_config, own_block, parallel=parallel, layer=layer)
            self.mtp[str(depth)] = MTPLayer(
                model_config, layer_params, block=block, tensor_parallel=parallel.tp, layer=layer
            )
        # The layers in order; `transform_blocks` may replace them by functions of one or several
        # layers.
        self.layer_functions: list[Callable[..., Tensor]] = list(self.layers.values())
        self.position_tables = PositionTables.of(model_config)
        self.masks = MaskPlanner.of(model_config, (*spec.layers, *mtp_layers))
        self.messages = StageMessages(shape, spec, tensor_parallel=parallel.tp)
        self.is_tied = not model_config.untie_embeddings_and_output_weights
        registered = [name for name, _ in self.named_parameters()]
        assert registered == [local.spec.name for local in params], (
            "modules register other parameters than declared"
        )

    def forward(self, hidden: Tensor | None, context: BatchContext) -> Tensor:
        """Run the stage on one microbatch.

        Args:
            hidden: [B, S, H] of the previous stage, [B, S/tp, H] with sequence parallelism, or the
                message with state of earlier layers; None on the first stage.
            context: the microbatch, the same on every stage; this cp rank has S tokens of each
                sequence.

        Returns:
            With a head the sum over unmasked target tokens of the cross-entropy, an fp32 scalar;
            else hidden states, or the message with state of layers.
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
            last_only: whether to compute the logits of the last position only, for sampling.
            position_ids: [B, S] int64; None for 0..S-1.

        Returns:
            [B, S, V] or [B, 1, V], without padding, in the dtype of the activations.
        """
        batch = replace(Batch.from_tokens(tokens), position_ids=position_ids)
        hidden = self.transform(None, BatchContext(batch))
        if last_only:
            hidden = hidden[:, -1:]
        return self.project(hidden)

    def transform(self, hidden: Tensor | None, context: BatchContext) -> Tensor:
        """The hidden states after the layers and, on the last stage, the final norm.

        Arguments as for `forward`.
        """
        transformed, _ = self._transform(hidden, context)
        return transformed

    def project(self, hidden: Tensor) -> Tensor:
        """[..., H] after the final norm -> logits [..., V] without padding, of a stage's head."""
        assert self.head is not None, "only a stage with the head has logits"
        return self.head.logits(hidden, tied=self._tied_weight())

    @property
    def mtp_layers(self) -> list[MTPLayer]:
        """The layers of multi-token prediction in order; only the last stage has any."""
        return [layer for layer in self.mtp.values() if isinstance(layer, MTPLayer)]

    def _predict_further(
        self, hidden: Tensor, context: BatchContext, *, layer_context: LayerContext, loss: Tensor
    ) -> Tensor:
        """The loss of the model; its backward also differentiates the losses of further tokens."""
        if not context.mtp_scales:
            return loss
        predictions = iter(self._predictions(context))
        for layer in self.mtp_layers:
            assert self.embedding is not None, "multi-token prediction reads the embedding"
            own = list(islice(predictions, layer.num_predictions))
            # `forward`, not a call: the FSDP hooks of embedding and head must not run, the unit of
            # this layer gathers their parameters
            hidden, *loss_sums = layer(
                hidden, own, context=layer_context, embed=self.embedding.forward
            )
            for prediction, loss_sum in zip(own, loss_sums, strict=True):
                scaled = prediction.scale * loss_sum
                # not `attach_loss`: the step scales both by one gradient
                loss = loss + (scaled - scaled.detach())
        return loss

    def _predictions(self, context: BatchContext) -> list[Prediction]:
        """All further tokens that the layers of multi-token prediction predict, in order."""
        assert self.head is not None, "multi-token prediction reads the head"
        predictions = []
        for batch, scale in zip(context.batch.mtp, context.mtp_scales, strict=True):
            grad_scale: float | Tensor | None = None
            if context.loss_scale is not None:
                grad_scale = context.loss_scale * scale
            sum_losses = partial(self.head.forward, tied=self._tied_weight(), grad_scale=grad_scale)
            predictions.append(Prediction(batch, scale, sum_losses))
        return predictions

    def _transform(
        self, hidden: Tensor | None, context: BatchContext
    ) -> tuple[Tensor, LayerContext]:
        """Run embedding, layers and final norm.

        Returns:
            the hidden states, and the context of the layers.
        """
        dropout = context.dropout()
        state: State = {}
        if self.spec.has_embedding:
            assert self.embedding is not None, "the first stage has the embedding"
            embedded = self.embedding(context.batch.tokens, context.batch.position_ids)
            hidden = self.enter_streams(self.drop_embedded(embedded, dropout))
            if self.layer_inputs is not None:
                inputs = self.layer_inputs(context.batch.tokens, embedded)
                state = layer_input_state(inputs)
        else:
            assert hidden is not None, (
                "a stage without the embedding needs the hidden states of the previous stage"
            )
            hidden, state = self.messages.unpack(hidden, batch_shape=context.batch.tokens.shape)
        layer_context = self._layer_context(context, dropout=dropout, like=hidden)
        layer_context.state.update(state)
        for function in self.layer_functions:
            hidden = function(hidden, layer_context)
        assert hidden is not None
        if self.final_norm is not None:
            return self.final_norm(self.leave_streams(hidden)), layer_context
        return self.messages.pack(hidden, layer_context.state), layer_context

    def _layer_context(
        self, context: BatchContext, *, dropout: DropoutContext | None, like: Tensor
    ) -> LayerContext:
        """The inputs that the layers share, with the device and dtype of `like`."""
        batch = context.batch
        masks = self.masks.plan(batch, self.parallel)
        num_tokens = batch.tokens.shape[1]
        positions: int | Tensor = num_tokens
        length = None
        if batch.position_ids is not None:
            positions = batch.position_ids
        if self.parallel.cp.size > 1:
            length = num_tokens * self.parallel.cp.size
        rotary = self.position_tables.at(positions, like=like, length=length)
        full = AttentionInputs(rotary.full, masks.full)
        windowed = AttentionInputs(rotary.windowed, masks.windowed)
        return LayerContext(
            full=full,
            windowed=windowed,
            query_scale=rotary.query_scale,
            tokens=batch.tokens,
            segment_ids=batch.segment_ids,
            sequence_positions=context.sequence_positions,
            dropout=dropout,
            aux_loss_scale=context.aux_loss_scale,
            is_padding=batch.is_padding,
        )

    def _tied_weight(self) -> nn.Parameter | None:
        if not self.is_tied or self.embedding is None:
            return None
        return self.embedding.word.weight


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


# by the names in `ModelShape.residual`
RESIDUAL_MODULES: dict[str, ResidualModules] = {
    "plain": ResidualModules(build_plain_block),
    "shortcut": ResidualModules(ShortcutBlock),
    "extended": ResidualModules(ExtendedBlock),
    "parallel": ResidualModules(ParallelBlock),
    "gated": ResidualModules(GatedBlock),
    "hyper_connections": ResidualModules(
        partial(HyperBlock, connection=HyperConnection), enter=EnterStreams, leave=SumStreams
    ),
    "attention": ResidualModules(
        partial(HyperBlock, connection=AttentionConnection), enter=EnterBlocks, leave=AttendStreams
    ),
    "mhc": ResidualModules(
        partial(HyperBlock, connection=ManifoldConnection),
        enter=EnterStreams,
        leave=WeighManifoldStreams,
    ),
}


def build_block(
    model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
) -> nn.Module:
    """The block of a layer, by its index in the model."""
    residual = ModelShape.of(model_config).residual(layer)
    build = RESIDUAL_MODULES[residual].block
    block = build(model_config, params, parallel=parallel.for_layer(layer), layer=layer)
    if model_config.has_dropout:
        # outside of compiled graphs, see `DropoutContext.for_layer`
        block.register_forward_pre_hook(lambda _, args: (args[0], args[1].for_layer(layer)))
    return block
