"""What is known of a parameter without allocating it.

A `ParamSpec` says how large the parameter is over all ranks and which axis cuts which dim; `box` then says which
piece a rank holds. Init, buffers, optimizer, checkpoints and the planner read the same spec.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from math import prod
from typing import Self

from nanotrain.errors import TopologyError
from nanotrain.topology.boxes import Box


class ParamKind(str, Enum):
    """What a parameter is for; decides its start value."""

    embedding = "embedding"
    matrix = "matrix"
    output_matrix = "output_matrix"  # writes into the residual stream: std / sqrt(2 * num_layers)
    bias = "bias"
    norm = "norm"


@dataclass(frozen=True)
class Shard:
    """Ranks along `axis` hold equal consecutive pieces of `dim`."""

    dim: int
    axis: str


@dataclass(frozen=True)
class ParamSpec:
    """A parameter of the whole model.

    Args:
        name: global name, the same in every topology ("layers.3.mlp.up.weight").
        shape: shape over all ranks.
        dtype: "fp32", "bf16" or "fp16".
        kind: what it is for.
        cuts: which axis cuts which dim; two cuts of one dim nest, the first is the outer one.
        reduce_axes: axes over which the gradient is summed besides data parallelism.
        stage: pipeline stage that holds it.
        is_expert: replicated over expert_dp in place of dp_cp.
        is_tied: one weight used in two places (the word embedding that is also the head).

    >>> spec = ParamSpec("layers.0.mlp.up.weight", (8, 4), dtype="bf16", kind=ParamKind.matrix, shards=(Shard(0, "tp"),))
    >>> spec.box({"tp": 1}, {"tp": 2})
    Box(start=(4, 0), stop=(8, 4))
    """

    name: str
    shape: tuple[int, ...]
    _: KW_ONLY
    dtype: str
    kind: ParamKind
    shards: tuple[Shard, ...] = ()
    grad_sum_axes: tuple[str, ...] = ()
    stage: int = 0
    is_expert: bool = False
    is_tied: bool = False

    @property
    def numel(self) -> int:
        """Elements over all ranks."""
        return prod(self.shape)

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: not to biases and other 1-D parameters."""
        return len(self.shape) >= 2

    def box(self, coords: Mapping[str, int], sizes: Mapping[str, int]) -> Box:
        """The piece that one rank holds.

        Args:
            coords: the rank's place per axis; only the axes that cut this parameter are read.
            sizes: ranks per axis.

        Raises:
            TopologyError: a dim that an axis cannot cut into equal pieces.
        """
        start, stop = [0] * len(self.shape), list(self.shape)
        for cut in self.shards:
            length, size = stop[cut.dim] - start[cut.dim], sizes[cut.axis]
            if length % size:
                raise TopologyError(
                    f"{self.name} of shape {self.shape} cannot be cut over {cut.axis}={size}",
                    why=f"dim {cut.dim} has {length} elements to share and {size} does not divide {length}",
                    fix=f"choose {cut.axis} among the divisors of {length}, or a model whose sizes {size} divides",
                )
            piece = length // size
            start[cut.dim] += coords[cut.axis] * piece
            stop[cut.dim] = start[cut.dim] + piece
        return Box(tuple(start), tuple(stop))


@dataclass(frozen=True)
class LocalParam:
    """A parameter as one rank holds it.

    Args:
        spec: the whole parameter.
        box: the piece that lies on this rank.
        is_first_copy: whether, of the ranks of one data-parallel replica that hold this piece, this is the first: it
            counts in the gradient norm and is saved. Copies are made by an axis that does not cut the parameter, and
            of a tied embedding by the last stage.
    """

    spec: ParamSpec
    box: Box
    is_first_replica: bool = True

    @classmethod
    def whole(cls, spec: ParamSpec) -> Self:
        """All of a parameter, as a rank without model parallelism holds it."""
        return cls(spec, Box.whole(spec.shape))


# The axes inside one replica of the model that may leave a parameter uncut: (dense, expert).
_COPYING_AXES = {False: ("tp",), True: ("etp",)}


def localize(spec: ParamSpec, *, coords: Mapping[str, int], sizes: Mapping[str, int]) -> LocalParam:
    """What a rank holds of a parameter of its stage.

    Args:
        spec: the parameter; `spec.stage` is the stage on this rank.
        coords: the rank's place per axis.
        sizes: ranks per axis.

    Raises:
        TopologyError: a dim that an axis cannot cut into equal pieces.
    """
    cut_axes = {cut.axis for cut in spec.shards}
    is_first = all(axis in cut_axes or coords[axis] == 0 for axis in _COPYING_AXES[spec.is_expert])
    is_tied_copy = spec.is_tied and spec.stage > 0
    return LocalParam(spec, spec.box(coords, sizes), is_first and not is_tied_copy)
