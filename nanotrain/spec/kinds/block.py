"""A transformer block and both ends of a model: operators that all kinds of layers share.

sublayers              mixers and MLPs of a layer
block_operators        a layer: mixer and MLP in their residual connections
embedding_operators    look-up of the tokens
head_operators         final norm, output layer and loss
mtp_operators          a layer of multi-token prediction
model_operators        all of a model
"""

from dataclasses import replace
from functools import lru_cache

from nanotrain.spec.kinds import MIXERS, MLPS
from nanotrain.spec.layer_inputs import input_operators
from nanotrain.spec.layer_sizes import FP32, LayerSizes
from nanotrain.spec.operators import Lookup, Loss, Operator, Operators, Product, Saved
from nanotrain.spec.residuals import RESIDUALS
from nanotrain.spec.residuals.residual import ResidualKind, Sublayer, norm_operator
from nanotrain.spec.shape import ModelShape


def sublayers(shape: ModelShape, layer: int) -> tuple[Sublayer, ...]:
    """The mixers and MLPs of a layer of the model, by its index, in their order."""
    result = []
    for mixer, mlp in shape.blocks(layer):
        if mixer is not None:
            result.append(Sublayer("attention", MIXERS[mixer]))
        if mlp is not None:
            result.append(Sublayer("mlp", MLPS[mlp]))
    return tuple(result)


def block_operators(s: LayerSizes, layer: int) -> tuple[Operator, ...]:
    """The operators of a layer of the model, by its index; layers of one kind share them."""
    first = s.shape.first_like(layer)
    if layer in s.layers_in_bf16:
        s = replace(s, cast_recipe="")
    residual = RESIDUALS[s.shape.residual(first)]
    return _block_operators(s.at(first), residual, sublayers=sublayers(s.shape, first))


@lru_cache(maxsize=1024)  # a search asks for the layers of hundreds of layouts
def _block_operators(
    s: LayerSizes, residual: ResidualKind, *, sublayers: tuple[Sublayer, ...]
) -> tuple[Operator, ...]:
    """Mixers and MLPs with their norms and residual streams."""
    return tuple(residual.operators(s, sublayers))


def embedding_operators(s: LayerSizes) -> Operators:
    """Look-up of the tokens, and a norm of the embeddings where the model has it."""
    saves: tuple[Saved, ...] = ()
    if s.shape.embedding_l2_norm:
        saves = (Saved(s.outside * (s.width + FP32)),)
    return [Lookup(name="embedding", rows=s.tokens, saves=saves)]


def head_operators(s: LayerSizes) -> Operators:
    """Final norm, output layer and loss, which computes the gradients of its inputs at once."""
    hidden = s.shape.hidden_size
    grads = s.tokens * s.width
    if not s.writes_head:
        grads += s.columns * hidden * FP32
    if s.shape.has_head_bias:
        grads += s.columns * FP32
    product = Product(
        name="head",
        weights=("head.weight",),
        rows=s.tokens,
        outputs=s.columns,
        inputs=hidden,
        shard="column",
        saves=(Saved(grads),),
    )
    norm = norm_operator(s, name="final_norm")
    loss = Loss(name="loss", rows=s.tokens, columns=s.columns)
    end = RESIDUALS[s.shape.residual_type].end_operators(s)
    return [*end, norm, product, loss]


def mtp_operators(s: LayerSizes, layer: int) -> Operators:
    """Norms of embeddings and hidden states, the projection of both, a block and the head."""
    hidden = s.shape.hidden_size
    norm = norm_operator(s, name="mtp_norm")
    both = Saved(s.outside * 2 * s.width)
    projection = Product(
        name="eh_proj",
        weights=("eh_proj.weight",),
        rows=s.outside,
        outputs=hidden,
        inputs=2 * hidden,
        saves=(both,),
    )
    return [norm, norm, projection, *block_operators(s, layer), *head_operators(s)]


def model_operators(s: LayerSizes) -> Operators:
    """The operators of a model on one pipeline rank."""
    operators = embedding_operators(s) + input_operators(s)
    for layer in range(s.shape.num_layers):
        operators += block_operators(s, layer)
    operators += head_operators(s)
    for layer in s.shape.mtp_predictions:
        operators += mtp_operators(s, layer)
    return operators
