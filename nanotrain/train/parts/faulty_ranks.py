"""The ranks whose numbers are not finite."""

from nanotrain.comm.collectives import all_gather_object
from nanotrain.comm.group import Group
from nanotrain.quantities import named_ranks


def ranks_at_fault(local_fault: int, group: Group) -> str | None:
    """Names of the ranks whose own loss was not finite in a step, else whose gradients were not.

    None if the numbers of every rank are finite and only their sum is not. Every rank calls this.

    Args:
        local_fault: `StepOutput.local_fault` of this rank.
        group: group of all ranks.
    """
    faults = all_gather_object(local_fault, group)
    worst = max(faults)
    if worst == 0:
        return None
    return named_ranks([rank for rank, fault in enumerate(faults) if fault == worst])
