"""Every parameter of a GPT, declared once: pure functions.

    declare_stage        the parameters of a pipeline stage, in registration order
    declare_model        those of an unsharded model
    embedding, layer, mtp_layer   the parameters of one layer, named relative to it

Allocation, counting, FLOPs, buffer layouts, checkpoints, initialization and Hugging Face names read
these declarations. What attention and MLPs declare are the rows of spec/kinds; what all share is
spec/declaration.py.
"""

from dataclasses import replace
from functools import lru_cache

from nanotrain.spec.declaration import Declaration, Specs, grouped, nest, norm
from nanotrain.spec.kinds import MIXERS, MLPS
from nanotrain.spec.shape import ModelShape
from nanotrain.spec.stages import StageSpec


@lru_cache(maxsize=256)  # a search plans hundreds of layouts of one model: a fifth of its time
def declare_stage(declare: Declaration, stage: StageSpec) -> Specs:
    """Every parameter of a pipeline stage, in registration order.

    A word embedding that is tied, or read by multi-token prediction, is declared on the first and
    on the last stage. The final norm belongs to the unit of the head, which runs next.
    """
    shape = declare.shape
    units: dict[str, Specs] = {}
    if stage.has_embedding or (stage.has_head and shape.has_embedding_at_end):
        units["embedding"] = embedding(declare, has_positions=stage.has_embedding)
    kinds = {i: (*shape.kinds(i), shape.has_window(i)) for i in stage.layers}
    of_kinds = {
        kind: layer(declare, i) for kind, i in {kind: i for i, kind in kinds.items()}.items()
    }
    units |= {f"layers.{index}": of_kinds[kind] for index, kind in kinds.items()}
    if stage.has_head:
        units["final_norm"] = norm(declare, shape.hidden_size)
    if stage.has_head and not shape.is_tied:
        units["head"] = grouped("head", [declare.vocab_parallel()])
    if stage.has_head:
        units |= {
            f"mtp.{depth}": mtp_layer(declare, index)
            for depth, index in enumerate(shape.mtp_layers)
        }
    return tuple(
        replace(
            spec,
            name=f"{unit}.{spec.name}",
            unit="head" if unit == "final_norm" else unit,
            stage=stage.index,
        )
        for unit, specs in units.items()
        for spec in specs
    )


def declare_model(shape: ModelShape, *, dtype: str = "fp32") -> Specs:
    """Every parameter of an unsharded model, in registration order."""
    return declare_stage(Declaration(shape, dtype), StageSpec.single(shape.num_layers))


def embedding(declare: Declaration, *, has_positions: bool) -> Specs:
    """The word embedding, and learned positions if the model has them and this is the first stage."""
    shape = declare.shape
    is_at_end = shape.has_embedding_at_end
    word = replace(declare.vocab_parallel(), is_shared=is_at_end)
    specs = nest("word", [replace(word, grad_sum_axes=("embed",) if is_at_end else ())])
    if has_positions and shape.num_positions is not None:
        table = declare.weight(shape.num_positions, shape.hidden_size)
        table = replace(table, grad_sum_axes=declare.sequence_axes, needs_whole_matrix=False)
        specs += nest("position", [table])
    return grouped("embedding", specs)


def layer(declare: Declaration, index: int) -> Specs:
    """A layer, by its index in the model: norm and attention, norm and MLP; or one of the two, or
    both twice.
    """
    shape = declare.shape
    declare = replace(declare, shape=shape.of_layer(index))
    before, after = (
        (norm(declare, shape.hidden_size) if has else ()) for has in shape.norms_of(index)
    )
    specs: Specs = ()
    for block, (mixer, mlp) in zip(("", "second."), shape.blocks(index), strict=False):
        for name, kinds, kind in (("attention", MIXERS, mixer), ("mlp", MLPS, mlp)):
            if kind is not None:
                specs += nest(f"{block}{name}_norm", before)
                specs += nest(f"{block}{name}", grouped(name, kinds[kind].declare(declare)))
                specs += nest(f"{block}{name}_post_norm", after)
    return specs


def mtp_layer(declare: Declaration, index: int) -> Specs:
    """One layer of multi-token prediction, by its index after those of the model; embedding and
    head are the model's.

    Every tp rank has the projection, outside the tensor-parallel region, like MLA's
    down-projections.
    """
    size = declare.shape.hidden_size
    return (
        *nest("enorm", norm(declare, size)),
        *nest("hnorm", norm(declare, size)),
        *nest("eh_proj", grouped("mtp", declare.replicated_linear(size, 2 * size))),
        *nest("block", layer(declare, index)),
        *nest("final_norm", norm(declare, size)),
    )
