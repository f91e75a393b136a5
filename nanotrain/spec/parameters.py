"""Every parameter of a GPT, declared once: pure functions.

    declare_stage        the parameters of a pipeline stage, in registration order
    declare_model        the parameters of an unsharded model
    embedding, layer, mtp_layer   the parameters of one layer, named relative to it

Allocation, counting, buffer layouts, checkpoints, initialization and Hugging Face names read these
declarations. Token mixers and MLPs are in spec/kinds, residual connections in spec/residuals,
linear layers in spec/declaration.py.
"""

from dataclasses import replace
from functools import lru_cache

from nanotrain.spec.declaration import Declaration, Specs, grouped, nest, norm
from nanotrain.spec.kinds.block import sublayers
from nanotrain.spec.layer_inputs import declare_inputs
from nanotrain.spec.residuals import RESIDUALS
from nanotrain.spec.shape import ModelShape
from nanotrain.spec.stages import StageSpec


@lru_cache(maxsize=256)  # a search plans hundreds of layouts of one model: a fifth of its time
def declare_stage(declare: Declaration, stage: StageSpec) -> Specs:
    """Every parameter of a pipeline stage, in registration order.

    A word embedding that is tied, or read by multi-token prediction, is declared on the first and
    on the last stage.
    """
    specs: Specs = ()
    if stage.has_embedding or (stage.has_head and declare.shape.has_embedding_at_end):
        word = embedding(declare, has_positions=stage.has_embedding)
        specs += _in_unit("embedding", word)
    if stage.has_embedding and declare.shape.layer_input_size:
        specs += _in_unit("layer_inputs", declare_inputs(declare))
    specs += _layers(declare, stage)
    if stage.has_head:
        specs += _head_and_mtp(declare)
    return tuple(replace(spec, stage=stage.index) for spec in specs)


def _in_unit(unit: str, specs: Specs) -> Specs:
    """The parameters of an FSDP unit, named after it."""
    return tuple(replace(spec, unit=unit) for spec in nest(unit, specs))


def _layers(declare: Declaration, stage: StageSpec) -> Specs:
    """The parameters of the layers of a stage; layers of one structure declare the same."""
    specs_of_first: dict[int, Specs] = {}
    specs: Specs = ()
    for index in stage.layers:
        first = declare.shape.first_like(index)
        if first not in specs_of_first:
            specs_of_first[first] = layer(declare, first)
        specs += _in_unit(f"layers.{index}", specs_of_first[first])
    return specs


def _head_and_mtp(declare: Declaration) -> Specs:
    """Final norm, head and multi-token prediction; the final norm is in the unit of the head."""
    shape = declare.shape
    end = RESIDUALS[shape.residual_type].declare_end(declare)
    end_specs = nest("leave_streams", end)
    end_specs += nest("final_norm", norm(declare, shape.hidden_size))
    specs = tuple(replace(spec, unit="head") for spec in end_specs)
    if not shape.is_tied:
        specs += _in_unit("head", grouped("head", [declare.vocab_parallel()]))
    if shape.has_head_bias:
        specs += _in_unit("head", grouped("head", [declare.vocab_bias()]))
    for depth, index in enumerate(shape.mtp_layers):
        specs += _in_unit(f"mtp.{depth}", mtp_layer(declare, index))
    return specs


def declare_model(shape: ModelShape, *, dtype: str = "fp32") -> Specs:
    """Every parameter of an unsharded model, in registration order."""
    return declare_stage(Declaration(shape, dtype), StageSpec.single(shape.num_layers))


def embedding(declare: Declaration, *, has_positions: bool) -> Specs:
    """The word embedding, and on the first stage learned positions if the model has them."""
    shape = declare.shape
    is_at_end = shape.has_embedding_at_end
    word = replace(declare.vocab_parallel(), is_shared=is_at_end)
    specs = nest("word", [replace(word, grad_sum_axes=("embed",) if is_at_end else ())])
    if has_positions and shape.num_positions is not None:
        table = declare.weight(shape.num_positions, shape.hidden_size, std=shape.embedding_std)
        table = replace(table, needs_whole_matrix=False, follows_width=False)
        table = replace(table, grad_sum_axes=declare.sequence_axes)
        specs += nest("position", [table])
    return grouped("embedding", specs)


def layer(declare: Declaration, index: int) -> Specs:
    """A layer, by its index in the model: a mixer, an MLP or both, once or twice."""
    shape = declare.shape
    declare = replace(declare, shape=shape.for_layer(index))
    residual = RESIDUALS[shape.residual(index)]
    return residual.declare(declare, sublayers(shape, index), index=index)


def mtp_layer(declare: Declaration, index: int) -> Specs:
    """A layer of multi-token prediction, by its index after the layers of the model.

    Every tp rank has the projection, outside the tensor-parallel region, like MLA's
    down-projections.
    """
    size = declare.shape.hidden_size
    norm_specs = norm(declare, size)
    projection = declare.replicated_linear(size, 2 * size)
    specs = nest("enorm", norm_specs)
    specs += nest("hnorm", norm_specs)
    specs += nest("eh_proj", grouped("mtp", projection))
    specs += nest("block", layer(declare, index))
    return specs + nest("final_norm", norm_specs)
