"""How much a pipeline rank sends, in closed form."""

from nanotrain.parallel.pp.actions import PipelineShape


def num_messages(shape: PipelineShape, rank: int, *, is_training: bool = True) -> int:
    """Messages that a rank sends per step: hidden states to the stage after, and gradients to the stage before.

    Args:
        shape: ranks, stages and microbatches.
        rank: of the pipeline.
        is_training: whether backward passes run too.

    >>> [num_messages(PipelineShape(4, 2, 8), rank) for rank in range(4)]
    [24, 32, 32, 24]
    """
    if shape.num_ranks == 1:
        return 0
    stages = shape.stages_of(rank)
    down, up = sum(stage < shape.num_stages - 1 for stage in stages), sum(stage > 0 for stage in stages)
    return shape.num_microbatches * (down + up * is_training)


def sent_bytes(shape: PipelineShape, rank: int, *, message_bytes: int, is_training: bool = True) -> int:
    """Bytes that a rank sends per step over `pp`.

    Args:
        shape: ranks, stages and microbatches.
        rank: of the pipeline.
        message_bytes: of the hidden states between two stages: B x S as held by a rank x H x bytes per element.
        is_training: whether backward passes run too.
    """
    return num_messages(shape, rank, is_training=is_training) * message_bytes
