"""Which layers a pipeline stage holds."""

from dataclasses import dataclass

from nanotrain.errors import TopologyError


@dataclass(frozen=True)
class StageSpec:
    """A consecutive part of the model.

    Args:
        index: place in the pipeline, from 0.
        first_layer: first transformer block.
        last_layer: the block after the last one held.
        has_embedding: whether tokens enter here.
        has_head: whether the loss is computed here.
    """

    index: int
    first_layer: int
    last_layer: int
    has_embedding: bool
    has_head: bool

    @property
    def layers(self) -> range:
        """Global indices of the transformer blocks held."""
        return range(self.first_layer, self.last_layer)


def split_layers(num_layers: int, num_stages: int) -> tuple[StageSpec, ...]:
    """Split a model into stages of equal length, or one layer longer in the front where it does not come out even.

    The longer stages stand in the front because the last one computes the head and the loss as well.

    Raises:
        TopologyError: fewer layers than stages.

    >>> [(stage.first_layer, stage.last_layer) for stage in split_layers(5, 2)]
    [(0, 3), (3, 5)]
    """
    if num_layers < num_stages:
        raise TopologyError(
            f"{num_layers} layers cannot fill {num_stages} pipeline stages",
            why="every stage holds at least one layer",
            fix=f"set --pipeline-model-parallel-size to at most {num_layers} or --num-layers to at least {num_stages}",
        )
    firsts = [-(-stage * num_layers // num_stages) for stage in range(num_stages + 1)]
    return tuple(
        StageSpec(
            index=index,
            first_layer=firsts[index],
            last_layer=firsts[index + 1],
            has_embedding=index == 0,
            has_head=index == num_stages - 1,
        )
        for index in range(num_stages)
    )
