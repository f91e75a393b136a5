"""The choice of a token dispatcher."""

from nanotrain.comm.group import Group
from nanotrain.parallel.ep.deep_ep import DeepEPTokenDispatcher
from nanotrain.parallel.ep.hierarchical import HierarchicalTokenDispatcher
from nanotrain.parallel.ep.token_dispatcher import (
    AllToAllTokenDispatcher,
    DispatchOptions,
    LocalTokenDispatcher,
    PaddedTokenDispatcher,
)

TokenDispatcher = (
    LocalTokenDispatcher
    | AllToAllTokenDispatcher
    | HierarchicalTokenDispatcher
    | DeepEPTokenDispatcher
)


def build_token_dispatcher(
    num_experts: int, *, ep: Group, etp: Group, options: DispatchOptions | None = None
) -> TokenDispatcher:
    """The dispatcher for experts sharded over `ep`, with matrices sharded over `etp`."""
    if options is None:
        options = DispatchOptions()
    if ep.size * etp.size == 1:
        return LocalTokenDispatcher(num_experts, may_drop=options.may_drop)
    if options.uses_deep_ep and ep.size > 1:
        return DeepEPTokenDispatcher(num_experts, ep=ep, etp=etp, options=options)
    if options.rank_capacity_factor is not None or ep.size == 1:
        return PaddedTokenDispatcher(num_experts, ep=ep, etp=etp, options=options)
    if options.ranks_per_node is not None and options.ranks_per_node < ep.size:
        return HierarchicalTokenDispatcher(num_experts, ep=ep, etp=etp, options=options)
    return AllToAllTokenDispatcher(num_experts, ep=ep, etp=etp, options=options)
