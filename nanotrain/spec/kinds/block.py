"""A transformer block and both ends of a model: operators that all kinds of layers share.

block_operators        norms, residual additions, the mixer and the MLP of a layer
embedding_operators    look-up of the tokens
head_operators         final norm, output layer and loss
mtp_operators          a layer of multi-token prediction
model_operators        all of a model
"""

from dataclasses import replace
from functools import lru_cache

from nanotrain.spec.declaration import LayerKind
from nanotrain.spec.kinds import MIXERS, MLPS
from nanotrain.spec.layer_sizes import FP32, LayerSizes
from nanotrain.spec.operators import (
    NORM_MODULES,
    Lookup,
    Loss,
    Norm,
    Operator,
    Operators,
    Product,
    Residual,
    Saved,
)


def block_operators(s: LayerSizes, layer: int) -> tuple[Operator, ...]:
    """The operators of a layer of the model, by its index; layers of one kind share them."""
    first = s.shape.first_like(layer)
    if layer in s.layers_in_bf16:
        s = replace(s, cast_recipe="")
    kinds: list[LayerKind] = []
    for mixer, mlp in s.shape.blocks(first):
        if mixer is not None:
            kinds.append(MIXERS[mixer])
        if mlp is not None:
            kinds.append(MLPS[mlp])
    return _block_operators(s.at(first), tuple(kinds))


@lru_cache(maxsize=1024)  # a search asks for the layers of hundreds of layouts
def _block_operators(s: LayerSizes, kinds: tuple[LayerKind, ...]) -> tuple[Operator, ...]:
    """Mixers and MLPs, in their order, with what is around them."""
    operators: Operators = []
    for kind in kinds:
        operators += _in_residual(s, kind.operators(s))
    if s.shape.layer_scale:
        numel = s.outside * s.shape.hidden_size
        saves = (Saved(s.outside * s.width),)  # for the gradient of the factor
        operators.append(Residual(name="layer_scale", numel=numel, saves=saves))
    return tuple(operators)


def _in_residual(s: LayerSizes, inner: Operators) -> Operators:
    """A mixer or an MLP with its norms and the addition to the residual stream."""
    has_pre, has_post = s.shape.norms_of(s.layer)
    modules = NORM_MODULES if has_pre else ()
    first = _norm(s, modules=modules)
    if has_pre and isinstance(inner[0], Product) and inner[0].casts_norm:
        first = replace(first, is_cast=True)
    add = Residual(name="add", numel=s.outside * s.shape.hidden_size)
    if has_pre and has_post:  # the second norm is never recomputed
        second = _norm(s)
        return [first, *inner, second, add]
    if has_pre:
        return [first, *inner, add]
    return [*inner, first, add]


def _norm(s: LayerSizes, *, name: str = "layernorm", modules: tuple[str, ...] = ()) -> Norm:
    """A norm of hidden states.

    Args:
        s: sizes of the layer.
        name: name of the norm.
        modules: recompute modules that keep the input of the norm alone and run it again.
    """
    hidden = s.shape.hidden_size
    norm_input = Saved(s.outside * s.width)
    extra = Saved(s.outside * s.norm_extra(hidden), dropped_by=modules)
    saves = (norm_input, extra)
    return Norm(name=name, recomputed_by=modules, numel=s.outside * hidden, saves=saves)


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
    product = Product(
        name="head",
        weights=("head.weight",),
        rows=s.tokens,
        outputs=s.columns,
        inputs=hidden,
        shard="column",
        saves=(Saved(grads),),
    )
    norm = _norm(s, name="final_norm")
    loss = Loss(name="loss", rows=s.tokens, columns=s.columns)
    return [norm, product, loss]


def mtp_operators(s: LayerSizes, layer: int) -> Operators:
    """Norms of embeddings and hidden states, the projection of both, a block and the head."""
    hidden = s.shape.hidden_size
    norm = _norm(s, name="mtp_norm")
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
    operators = embedding_operators(s)
    for layer in range(s.shape.num_layers):
        operators += block_operators(s, layer)
    operators += head_operators(s)
    for layer in s.shape.mtp_layers:
        operators += mtp_operators(s, layer)
    return operators
