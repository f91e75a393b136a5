"""Parameters as plans see them: global shape, sharding and initialization, without storage.

ParamSpec    a parameter over all ranks: name, shape, how it is sharded and initialized
LocalParam   what one rank holds of it: a box and a replica id
localize     the LocalParam of a rank
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from math import prod
from typing import Self

from nanotrain.errors import TopologyError
from nanotrain.spec.boxes import Box, TensorBox
from nanotrain.topology.groups import GroupName


@dataclass(frozen=True)
class Shard:
    """Ranks along `axis` hold equal consecutive shards of `dim`."""

    dim: int
    axis: GroupName


@dataclass(frozen=True)
class Normal:
    """Initial values from a normal distribution with mean 0."""

    std: float


@dataclass(frozen=True)
class Uniform:
    """Initial values from a uniform distribution, or a function of them."""

    low: float
    high: float
    function: str = ""  # "log", or "inverse_softplus_of_exp"; empty: the values themselves


@dataclass(frozen=True)
class Constant:
    """The same initial value for every element."""

    value: float


@dataclass(frozen=True)
class ParamSpec:
    """A parameter over all ranks.

    >>> shards = (Shard(0, "tp"),)
    >>> spec = ParamSpec(
    ...     "up.weight", (8, 4), dtype="bf16", init=Normal(0.02), weight_decay=True, shards=shards
    ... )
    >>> spec.box({"tp": 1}, {"tp": 2})
    Box(start=(4, 0), stop=(8, 4))
    """

    name: str  # global name, the same in every topology ("layers.3.mlp.up.weight")
    shape: tuple[int, ...]  # global shape
    _: KW_ONLY
    dtype: str  # "fp32", "bf16" or "fp16"
    init: Normal | Uniform | Constant  # distribution of the initial values
    weight_decay: bool  # whether weight decay applies
    # the axis that shards each sharded dim; two shards of one dim nest, the first is the outer one
    shards: tuple[Shard, ...] = ()
    # axes over which the gradient is summed besides data parallelism
    grad_sum_axes: tuple[str, ...] = ()
    stage: int = 0  # pipeline stage
    unit: str = ""  # FSDP unit: "embedding", "layers.3", "head" or "mtp.0"
    # of the layers it belongs to: "embedding", "attention", "mlp", "experts", "norms", "head",
    # "mtp"
    group: str = ""
    is_expert: bool = False  # data-parallel over expert_dp instead of dp_cp
    # several units read it: a tied word embedding; with multi-token prediction word embedding and
    # head
    is_shared: bool = False
    # the word embedding or the output layer: `--decoupled-lr` applies
    is_embedding_or_output: bool = False
    in_fp8: bool = False  # a weight whose products are in fp8 if the run and the layer use fp8
    # a matrix rule (Muon) updates it and needs all of its elements; False for embeddings and the
    # head
    needs_whole_matrix: bool = False
    width_multiplier: float = 1.0  # with muP: of its model
    # with muP: whether its learning rate follows the width, as of matrices but embeddings and head
    follows_width: bool = False
    # rows of the slices of one head (queries: one; MLA: without and with position); they repeat for
    # every head, and a matrix rule may update each apart; empty: no heads
    head_rows: tuple[int, ...] = ()
    is_trainable: bool = True  # False: frozen, without gradient and optimizer state

    @property
    def is_last_stage_replica(self) -> bool:
        """Whether it is the word embedding of the last stage, a replica of the first stage's."""
        return self.unit == "embedding" and self.stage > 0

    @property
    def numel(self) -> int:
        """Elements over all ranks."""
        return prod(self.shape)

    def box(self, coords: Mapping[str, int], sizes: Mapping[str, int]) -> Box:
        """The box of one rank, from its coordinate and the number of ranks per axis that shards
        this parameter.

        Raises:
            TopologyError: a dim that an axis does not divide.
        """
        start = [0] * len(self.shape)
        stop = list(self.shape)
        for shard in self.shards:
            length = stop[shard.dim] - start[shard.dim]
            size = sizes[shard.axis]
            if length % size:
                raise self._uneven_shard(shard, length=length, size=size)
            local_length = length // size
            start[shard.dim] += coords[shard.axis] * local_length
            stop[shard.dim] = start[shard.dim] + local_length
        return Box(tuple(start), tuple(stop))

    def _uneven_shard(self, shard: Shard, *, length: int, size: int) -> TopologyError:
        """The error of a dim that an axis does not divide."""
        axis = shard.axis
        return TopologyError(
            f"{self.name} of shape {self.shape} cannot be sharded over {axis}={size}",
            why=f"dim {shard.dim} has {length} elements and {size} does not divide {length}",
            fix=f"choose {axis} among the divisors of {length}, or a model whose sizes {size} "
            "divides",
        )


@dataclass(frozen=True)
class LocalParam:
    """The part of a parameter that one rank holds.

    `replica_id` numbers the ranks of one data-parallel replica that hold the same box. Replicas
    come from an axis that does not shard the parameter, and for a word embedding from the last
    stage. Replica 0 counts in the gradient norm and is saved.
    """

    spec: ParamSpec
    box: Box  # the elements that this rank holds
    replica_id: int = 0

    @property
    def is_first_replica(self) -> bool:
        """Whether this is replica 0."""
        return self.replica_id == 0

    @property
    def tensor_box(self) -> TensorBox:
        """The box with the parameter's global name and shape, as checkpoints and Hugging Face files
        are read by it.
        """
        return TensorBox(self.spec.name, self.spec.shape, self.box)

    @classmethod
    def unsharded(cls, spec: ParamSpec) -> Self:
        """All of a parameter, without model parallelism."""
        return cls(spec, Box.full(spec.shape))


def localize(spec: ParamSpec, *, coords: Mapping[str, int], sizes: Mapping[str, int]) -> LocalParam:
    """The part of a parameter that a rank of its stage holds, from its coordinate and the number of
    ranks per axis.

    Raises:
        TopologyError: a dim that an axis does not divide.
    """
    # inside one model replica, this one may leave a parameter unsharded
    axis = "etp" if spec.is_expert else "tp"
    is_sharded = any(shard.axis == axis for shard in spec.shards)
    replica_id = 0 if is_sharded else coords[axis]
    if spec.is_last_stage_replica:
        replica_id += 1 if is_sharded else sizes[axis]
    return LocalParam(spec, spec.box(coords, sizes), replica_id)
