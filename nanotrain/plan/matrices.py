"""Hidden matrices of a plan: the ranks that share them, and the bytes of their state."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from nanotrain.config.config import OptimConfig
from nanotrain.optim.matrices import OwnedMatrix
from nanotrain.optim.matrix_routes import GridGroups, grid_groups, plan_matrices
from nanotrain.optim.rule import MatrixRule
from nanotrain.optim.whole_matrix_state import whole_matrix_bytes
from nanotrain.plan.buffers import BufferPlan
from nanotrain.topology.groups import GroupName, GroupSpec

MatrixGrid = tuple[GridGroups, tuple[OwnedMatrix, ...]]


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
