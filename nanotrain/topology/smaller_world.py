"""`--inprocess-min-ranks`: on how many ranks a run goes on in its layout after some have left.

The layout keeps its sizes along all axes but data parallelism.
"""

from nanotrain.config.config import Config
from nanotrain.config.rules.check import validate_for_world
from nanotrain.errors import ConfigError, NanotrainError
from nanotrain.quantities import count_of
from nanotrain.topology.replays import require_replicas
from nanotrain.topology.topology import Topology


def largest_world(config: Config, at_most: int) -> int:
    """The largest number of ranks of at least `inprocess_min_ranks` that forms the layout.

    Args:
        config: a validated configuration.
        at_most: ranks that are left.

    Returns:
        The number of ranks; 0 where none of them forms the layout, or none may leave.
    """
    least = config.train.inprocess_min_ranks
    if least is None:
        return 0
    for num_ranks in range(at_most, least - 1, -1):
        if not reason_against(config, num_ranks):
            return num_ranks
    return 0


def require_smaller_world(config: Config, world_size: int) -> None:
    """Check that a rank may leave a run.

    Args:
        config: a validated configuration.
        world_size: ranks of the run.

    Raises:
        ConfigError: no smaller number of ranks forms the layout.
    """
    least = config.train.inprocess_min_ranks
    if least is None or largest_world(config, world_size - 1):
        return
    ranks = count_of(world_size, "rank")
    if world_size == 1:
        why = "nobody would go on"
        fix = "leave --inprocess-min-ranks out, or start several ranks"
    elif least >= world_size:
        why = f"a run of {ranks} has fewer once one has left"
        fix = f"set --inprocess-min-ranks to at most {world_size - 1}, or leave it out"
    else:
        why = f"on {count_of(least, 'rank')}: {reason_against(config, least)}"
        fix = "set --inprocess-min-ranks to ranks that form the layout, or leave it out"
    raise ConfigError(
        f"inprocess_min_ranks {least}: no rank of {ranks} can leave the run", why=why, fix=fix
    )


def reason_against(config: Config, num_ranks: int) -> str:
    """Why a run cannot go on with so many ranks; empty if it can."""
    try:
        validate_for_world(config, num_ranks)
        has_experts = config.model.moe is not None
        topology = Topology.of(config.parallel, num_ranks, has_experts=has_experts)
        require_replicas(topology, replay_interval=config.train.replay_interval)
    except NanotrainError as error:
        return f"{error.what}: {error.why}" if error.why else error.what
    return ""
