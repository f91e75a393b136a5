"""The two grids a configuration asks for, or the error that says why the ranks cannot form them.

    dense   tp + TP*(cp + CP*(dp + DP*pp))                        order tp-cp-ep-dp-pp
    expert  etp + ETP*(ep + EP*(expert_dp + EXPERT_DP*pp))

Data parallelism is what the other axes leave over. `--use-tp-pp-dp-mapping` swaps dp and pp in both grids.
"""

from dataclasses import dataclass
from math import lcm, prod

from nanotrain.config.config import ParallelConfig
from nanotrain.config.option import flag_of
from nanotrain.errors import TopologyError
from nanotrain.topology.grid import Grid

# the axes a user sizes, in the order in which a smaller one is offered as a cure
FIELDS = {
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "tp": "tensor_model_parallel_size",
}


@dataclass(frozen=True)
class Grids:
    """One grid for everything but experts and one for experts, over the same ranks."""

    dense: Grid
    expert: Grid


def arrange(parallel: ParallelConfig, world_size: int, *, is_sharded: bool) -> Grids:
    """Arrange ranks along the axes of a configuration.

    Args:
        parallel: the sizes asked for.
        world_size: number of ranks.
        is_sharded: whether data-parallel ranks share optimizer state.

    Raises:
        TopologyError: ranks that cannot form the groups; says the numbers and a cure.
    """
    if world_size < 1:
        raise TopologyError(f"{world_size} ranks cannot run anything", fix="run on at least 1 rank")
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    pp, ep = parallel.pipeline_model_parallel_size, parallel.expert_model_parallel_size
    etp = parallel.expert_tensor_parallel_size or tp
    _check_divides({"tp": tp, "cp": cp, "pp": pp}, world_size, beside=etp * ep * pp)
    _check_divides({"etp": etp, "ep": ep, "pp": pp}, world_size, beside=tp * cp * pp)
    dense = {"tp": tp, "cp": cp, "dp": world_size // (tp * cp * pp), "pp": pp}
    expert = {"etp": etp, "ep": ep, "expert_dp": world_size // (etp * ep * pp), "pp": pp}
    _check_instances(parallel.num_distributed_optimizer_instances, dense, expert, is_sharded=is_sharded)
    if not parallel.use_tp_pp_dp_mapping:
        return Grids(_grid(dense, tuple(dense)), _grid(expert, tuple(expert)))
    _check_same_stages(dense, expert)
    return Grids(_grid(dense, ("tp", "cp", "pp", "dp")), _grid(expert, ("etp", "ep", "pp", "expert_dp")))


def _grid(sizes: dict[str, int], axes: tuple[str, ...]) -> Grid:
    return Grid(axes, tuple(sizes[axis] for axis in axes))


def _check_divides(sizes: dict[str, int], world_size: int, *, beside: int) -> None:
    """Axes of a grid must fit the ranks; `beside` is the product that the other grid needs of them."""
    product = prod(sizes.values())
    if world_size % product == 0:
        return
    cures = [
        f"set {flag_of(FIELDS[axis])} {smaller}"
        for axis in FIELDS
        if axis in sizes
        for smaller in range(sizes[axis] - 1, 0, -1)
        if world_size % (product // sizes[axis] * smaller) == 0
    ]
    unit = lcm(product, beside)
    enough = unit * -(-world_size // unit)
    shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
    raise TopologyError(
        f"{world_size} ranks cannot form {shown}",
        why=f"{'*'.join(sizes)} = {product} must divide the world size",
        fix=" or ".join([*cures[:1], f"run on {enough} ranks"]),
    )


def _check_same_stages(dense: dict[str, int], expert: dict[str, int]) -> None:
    """With pp before dp a rank's stage is the same in both grids only where both put pp at the same stride."""
    if dense["pp"] == 1 or dense["dp"] == expert["expert_dp"]:
        return
    flag = flag_of("use_tp_pp_dp_mapping")
    raise TopologyError(
        f"{flag} cannot arrange dp={dense['dp']} and expert_dp={expert['expert_dp']} with pp={dense['pp']}",
        why=f"tp*cp = {dense['tp'] * dense['cp']} and etp*ep = {expert['etp'] * expert['ep']} differ, "
        "so a rank would hold the experts of one stage and the rest of another",
        fix=f"drop {flag} or choose sizes with tp*cp = etp*ep",
    )


def _check_instances(instances: int, dense: dict[str, int], expert: dict[str, int], *, is_sharded: bool) -> None:
    """Optimizer instances must cut the data-parallel ranks of both grids into equal parts."""
    flag = flag_of("num_distributed_optimizer_instances")
    if instances > 1 and not is_sharded:
        raise TopologyError(
            f"{flag} {instances} has no effect with no_shard",
            why="no_shard keeps the whole optimizer state on every rank, so there is nothing to split into instances",
            fix=f"set {flag_of('data_parallel_sharding_strategy')} optim or {flag} 1",
        )
    dp_cp, expert_dp = dense["cp"] * dense["dp"], expert["expert_dp"]
    for name, ranks in (("dp*cp", dp_cp), ("expert_dp", expert_dp)):
        if ranks % instances:
            fitting = max(n for n in range(1, instances) if dp_cp % n == 0 and expert_dp % n == 0)
            raise TopologyError(
                f"{instances} optimizer instances cannot share {name} = {ranks} ranks",
                why=f"{flag} must divide dp*cp = {dp_cp} and expert_dp = {expert_dp}",
                fix=f"set {flag} {fitting}",
            )
