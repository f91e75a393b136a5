"""The flat buffers of a stage: which parameters lie in one buffer, and the groups of its buckets.

BufferPlan           one buffer
plan_buffers         the buffers of a stage
with_fp8_products    the weights of fp8 products
matrix_grids         the hidden matrices in them that a rule updates, and the ranks that share them
per_matrix_bytes     bytes of the state of these matrices
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from nanotrain.config.config import Config, OptimConfig
from nanotrain.kernels.fp8.layer import layers_in_bf16
from nanotrain.optim.matrices import OwnedMatrix
from nanotrain.optim.matrix_routes import GridGroups, grid_groups, plan_matrices
from nanotrain.optim.rule import MatrixRule
from nanotrain.optim.whole_matrix_state import whole_matrix_bytes
from nanotrain.parallel.dp.layout import BufferLayout, plan_layout
from nanotrain.parallel.dp.options import layout_rules
from nanotrain.precision.dtypes import Precision
from nanotrain.precision.fp8 import RECIPES, WEIGHT_DTYPE
from nanotrain.spec.params import LocalParam
from nanotrain.topology.groups import GroupName, GroupSpec

MatrixGrid = tuple[GridGroups, tuple[OwnedMatrix, ...]]


class BufferKind(NamedTuple):
    """Properties that all parameters of one buffer share."""

    is_trainable: bool  # they have gradients
    is_expert: bool  # data-parallel over expert_dp
    is_fp8: bool  # gathered in fp8


@dataclass(frozen=True)
class BufferPlan:
    """One flat buffer of a stage: dense or expert parameters of one dtype, trained or frozen."""

    shard: GroupSpec  # ranks that share the buckets
    replicate: GroupSpec  # ranks with the same shard
    layout: BufferLayout  # buckets and the range of every parameter
    is_fp8: bool = False  # weights that are gathered in fp8

    def param_size(self, precision: Precision) -> int:
        """Bytes per parameter element in the all-gather: 1 for fp8 weights."""
        return WEIGHT_DTYPE.itemsize if self.is_fp8 else precision.params.itemsize


def plan_buffers(
    params: Sequence[LocalParam], config: Config, *, groups: Mapping[GroupName, GroupSpec]
) -> Iterator[BufferPlan]:
    """The buffers of a stage that have parameters.

    Dense, dense in fp8, experts, experts in fp8; then frozen ones, dense and experts.
    """
    fp8_names = set(fp8_gathered(params, config))
    is_outer_sharded = config.parallel.outer_dp_sharding_strategy == "optim"
    kinds: dict[BufferKind, list[LocalParam]] = {}
    for is_trainable, is_expert, is_fp8 in product((True, False), (False, True), (False, True)):
        kinds[BufferKind(is_trainable, is_expert, is_fp8)] = []
    for param in params:
        spec = param.spec
        kinds[BufferKind(spec.is_trainable, spec.is_expert, spec.name in fp8_names)].append(param)
    for (_, is_expert, is_fp8), chosen in kinds.items():
        if not chosen:
            continue
        shard = groups["expert_dp_shard" if is_expert else "dp_shard"]
        replicate = groups["expert_dp_replicate" if is_expert else "dp_replicate"]
        rules = layout_rules(
            config.parallel,
            num_shards=shard.size,
            num_outer_shards=replicate.size if is_outer_sharded else 1,
            is_expert=is_expert,
        )
        yield BufferPlan(shard, replicate, plan_layout(chosen, rules), is_fp8)


def fp8_gathered(params: Sequence[LocalParam], config: Config) -> Iterator[str]:
    """The names of the weights that are gathered in fp8.

    Frozen weights are gathered in params_dtype. With one scale per block, replicated key and value
    projections are left out: a rank multiplies only with the rows of its heads, and its blocks
    begin at the first of these rows.
    """
    fp8 = config.precision.fp8
    if fp8 is None or not fp8.param_gather:
        return
    is_per_tensor = RECIPES[fp8.recipe].is_per_tensor
    for param in with_fp8_products(params, config):
        spec = param.spec
        has_rows_of_ranks = "tp" in spec.grad_sum_axes and not is_per_tensor
        is_gathered = spec.is_trainable and spec.unit.startswith("layers.")
        if is_gathered and not has_rows_of_ranks:
            yield spec.name


def with_fp8_products(params: Sequence[LocalParam], config: Config) -> list[LocalParam]:
    """The weights of fp8 products."""
    fp8 = config.precision.fp8
    if fp8 is None:
        return []
    in_bf16 = {f"layers.{layer}" for layer in layers_in_bf16(fp8, config.model.num_layers)}
    return [param for param in params if param.spec.in_fp8 and param.spec.unit not in in_bf16]


def matrix_grids(
    buffers: Sequence[BufferPlan],
    rule: MatrixRule | None,
    *,
    config: OptimConfig,
    groups: Mapping[GroupName, GroupSpec],
) -> Iterator[MatrixGrid]:
    """The grids of ranks of dense and of expert matrices, and the matrices of each.

    Args:
        buffers: trained buffers of the rank.
        rule: rule for matrices; None: there are no grids.
        config: options of the rule.
        groups: groups of the rank.
    """
    if rule is None:
        return
    for name in dict.fromkeys(buffer.shard.name for buffer in buffers):
        chosen = [buffer for buffer in buffers if buffer.shard.name == name]
        grid = grid_groups(
            chosen[0].shard,
            chosen[0].replicate,
            groups=groups,
            config=config,
            shards_across=chosen[0].layout.num_outer_shards > 1,
        )
        layouts = [buffer.layout for buffer in chosen]
        yield grid, plan_matrices(layouts, rule, config=config, groups=grid)


def per_matrix_bytes(grids: Iterable[MatrixGrid], rule: MatrixRule | None) -> int:
    """Bytes of state per matrix on the rank."""
    if rule is None or rule.state is None:
        return 0
    total = 0
    for groups, owned in grids:
        total += whole_matrix_bytes(owned, rule.state, rank=groups.rank)
    return total
