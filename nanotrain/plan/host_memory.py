"""Memory of the host that checkpoints in memory take (`checkpoint/memory_checkpointer.py`)."""

from nanotrain.config.config import Config
from nanotrain.quantities import describe_bytes


def memory_checkpoint_bytes(config: Config, world_size: int, *, state: int) -> int:
    """Bytes in the memory of the host of a rank for memory checkpoints, at most.

    The copy from which a save is written, and two checkpoints: the last one and the one that is
    being written, each with the shard of a rank of another host.

    Args:
        config: configuration of the run.
        world_size: ranks of the run; one rank has no partner.
        state: bytes that the rank saves.
    """
    if not config.checkpoint.memory_checkpoint_interval:
        return 0
    num_copies = 2 if world_size > 1 else 1
    return state + 2 * num_copies * state


def describe_host_memory(nbytes: int) -> list[str]:
    """A line below the table of planned memory; none for no bytes."""
    if not nbytes:
        return []
    return [f"  {'host memory':<14}{describe_bytes(nbytes):>12}  at most, per rank"]
