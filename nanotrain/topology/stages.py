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


def split_layers(
    num_layers: int, num_stages: int, *, first: int | None = None, last: int | None = None
) -> tuple[StageSpec, ...]:
    """Split a model into stages of equal length, or one layer longer in the front where it does not come out even.

    The longer stages stand in the front because the last one computes the head and the loss as well.

    Args:
        num_layers: transformer blocks of the model.
        num_stages: stages on all ranks.
        first: layers of the first stage; None: an even share.
        last: layers of the last stage; None: an even share. The stages between share the rest evenly.

    Raises:
        TopologyError: fewer layers than stages, or ends that leave the others too few or too many.

    >>> [(stage.first_layer, stage.last_layer) for stage in split_layers(5, 2)]
    [(0, 3), (3, 5)]
    >>> [len(stage.layers) for stage in split_layers(13, 4, first=4, last=2)]
    [4, 4, 3, 2]
    """
    if num_layers < num_stages:
        raise TopologyError(
            f"{num_layers} layers cannot fill {num_stages} pipeline stages",
            why="every stage holds at least one layer",
            fix=f"set --pipeline-model-parallel-size to at most {num_layers} or --num-layers to at least {num_stages}",
        )
    front, back = [[size] if size is not None else [] for size in (first, last)]
    num_between, left = num_stages - len(front) - len(back), num_layers - sum(front) - sum(back)
    if num_between < 0 or (left != 0 if num_between == 0 else left < num_between):
        raise _misfit(num_layers, num_stages, first=first, last=last)
    lengths = [*front, *even_shares(left, num_between), *back]
    return tuple(
        StageSpec(
            index=index,
            first_layer=sum(lengths[:index]),
            last_layer=sum(lengths[: index + 1]),
            has_embedding=index == 0,
            has_head=index == num_stages - 1,
        )
        for index in range(num_stages)
    )


def even_shares(total: int, count: int) -> list[int]:
    """`total` in `count` shares that differ by at most one, the larger ones in the front.

    >>> even_shares(8, 3)
    [3, 3, 2]
    """
    return [total // count + (index < total % count) for index in range(count)]


def _misfit(num_layers: int, num_stages: int, *, first: int | None, last: int | None) -> TopologyError:
    """The error for ends that cannot stand with the other stages."""
    flags = {"--decoder-first-pipeline-num-layers": first, "--decoder-last-pipeline-num-layers": last}
    given = {flag: size for flag, size in flags.items() if size is not None}
    num_between, taken = num_stages - len(given), sum(given.values())
    asked = " and ".join(f"{flag} {size}" for flag, size in given.items())
    if num_between > 0:
        why = f"they leave {num_layers - taken} for {num_between} other stages, which hold at least one each"
        fix = f"let them take at most {num_layers - num_between} together"
    elif num_between == 0:
        why, fix = f"they take {taken} and no other stage is there", f"let them take {num_layers} together"
    else:
        why, fix = "one stage cannot have a first and a last length", "leave one of them out"
    return TopologyError(f"{asked} do not split {num_layers} layers into {num_stages} stages", why=why, fix=fix)
