"""Times of routing tokens to experts.

router_part           scores, choice and losses of the router
dispatch_part         tokens to their experts, or back
hide_behind_shared    a dispatch while the shared expert computes
"""

from dataclasses import replace
from math import comb

from nanotrain.parallel.ep.fp8_dispatch import row_bytes
from nanotrain.planner.collectives import collective_s
from nanotrain.planner.graph_time import captures_router
from nanotrain.planner.kernels import matmul_s
from nanotrain.planner.parts import Part, Parts
from nanotrain.planner.rank_clock import RankClock
from nanotrain.precision.fp8 import RECIPES
from nanotrain.spec.operators import Dispatch, Router

# launches that are left with CUDA graphs, which cannot hold the dispatch to experts
GRAPH_LAUNCHES = 0.1
# bf16 matrices that the fp32 gradient of the logits is split into (kernels/router_logits.py)
GRADIENT_TERMS = 2
ROUTER_LAUNCHES = 20  # scores, top k, losses, counts and their sums
ROUTER_BYTES = 40  # per token and expert, forward: scores, probabilities and losses in fp32


def router_part(clock: RankClock, router: Router) -> Part:
    """Scores of the experts in fp32, and the choice of the top k."""
    num_bytes = router.rows * router.num_choices * ROUTER_BYTES + router.rows * clock.sizes.width
    launches = (ROUTER_LAUNCHES, ROUTER_LAUNCHES)
    part = clock.memory("moe", num_bytes, backward=2 * num_bytes, launches=launches)
    part = replace(
        part,
        forward=part.forward + _router_product_s(clock, router, num_terms=1),
        dgrad=part.dgrad + 2 * _router_product_s(clock, router, num_terms=GRADIENT_TERMS),
    )
    is_graphed = clock.scenario.cuda_graphs or captures_router(clock.scenario.config.train)
    return _at_host_pace(clock, part, is_graphed=is_graphed)


def _router_product_s(clock: RankClock, router: Router, *, num_terms: int) -> float:
    """Seconds of a product of the router; an fp32 operand is a sum of bf16 terms."""
    shape = (router.rows, num_terms * router.num_choices, router.inputs)
    if clock.dtype == "bf16":
        return matmul_s(clock.gpu, shape, dtype="bf16")
    return matmul_s(clock.gpu, (router.rows, router.num_choices, router.inputs), dtype="fp32")


def _at_host_pace(clock: RankClock, part: Part, *, is_graphed: bool = False) -> Part:
    """A part that takes at least as long as its launches, because the host waits for counts."""
    launch_s = clock.engine.launches.operator_s
    if is_graphed:
        launch_s *= GRAPH_LAUNCHES
    forward, dgrad, _ = part.launches
    return replace(
        part,
        forward=max(part.forward, forward * launch_s),
        dgrad=max(part.dgrad, dgrad * launch_s),
    )


def dispatch_part(clock: RankClock, dispatch: Dispatch) -> Part:
    """A permutation, and an all-to-all over ep with a gather over etp."""
    width = clock.sizes.width
    permuted = (dispatch.rows + dispatch.tokens) * width
    if _is_reordered(clock):
        permuted *= 2
    part = clock.memory("moe", permuted, backward=permuted, launches=(4, 4))
    gathered = dispatch.rows * clock.sizes.etp * width
    gather_s = clock.collective("etp", "all_gather", num_bytes=gathered)
    last = _transfer_s(clock, dispatch, row_size=width) + gather_s
    before = last
    if dispatch.name == "dispatch":
        before = _transfer_s(clock, dispatch, row_size=_sent_width(clock)) + gather_s
    return replace(_at_host_pace(clock, part), group="ep", before=before, last=last)


def _is_reordered(clock: RankClock) -> bool:
    """Whether tokens that arrive are brought into the order of their experts."""
    # rows that are sent once per rank are permuted there, and lie in order already
    is_once_per_rank = clock.scenario.config.parallel.dispatch_ranks_per_node == 1
    return clock.scenario.dispatcher != "flex" and not is_once_per_rank


def _sent_width(clock: RankClock) -> int:
    """Bytes of a token on its way to an expert: fewer if it is sent in fp8."""
    config = clock.scenario.config
    fp8 = config.precision.fp8
    if fp8 is None or config.parallel.moe_dispatch_fwd_dtype == "bf16":
        return clock.sizes.width
    return row_bytes(clock.sizes.shape.hidden_size, RECIPES[fp8.recipe].block)


def _transfer_s(clock: RankClock, dispatch: Dispatch, *, row_size: int) -> float:
    """Seconds of the transfer of rows of `row_size` bytes over ep."""
    sizes = clock.sizes
    dispatcher = clock.scenario.dispatcher
    sent = dispatch.rows * row_size
    if dispatcher == "allgather":
        gathered = dispatch.tokens * sizes.ep * sizes.width
        return clock.collective("ep", "all_gather", num_bytes=gathered)
    if dispatcher not in ("flex", "hierarchical"):
        return clock.collective("ep", "all_to_all", num_bytes=sent)
    num_nodes = sizes.ep * sizes.etp // clock.gpu.gpus_per_node
    if num_nodes <= 1:
        num_bytes = sent * _distinct_share(clock, sizes.ep)
        return clock.collective("ep", "all_to_all", num_bytes=num_bytes)
    # a token goes to a node once, and on to its ranks while others arrive
    across = sent * _distinct_share(clock, num_nodes)
    inside = sent * _distinct_share(clock, sizes.ep)
    across_s = clock.collective("ep", "all_to_all", num_bytes=across)
    node = range(clock.gpu.gpus_per_node)
    return max(across_s, collective_s(clock.gpu, "all_to_all", num_bytes=inside, ranks=node))


def _distinct_share(clock: RankClock, num_targets: int) -> float:
    """Share of the copies of a token that have different targets, of equally likely ones."""
    moe = clock.sizes.shape.moe
    assert moe is not None, "a dense model has no experts"
    groups = moe.router_num_groups or 1
    chosen = moe.router_group_topk or 1
    reached = float(num_targets)
    if chosen < groups and groups % num_targets == 0:  # whole groups of experts per target
        missed = comb(groups - groups // num_targets, chosen) / comb(groups, chosen)
        reached *= 1 - missed
    return reached * (1 - (1 - 1 / reached) ** moe.router_topk) / moe.router_topk


def hide_behind_shared(clock: RankClock, dispatch: Part, *, shared: Parts) -> Part:
    """A dispatch of tokens, and of their gradients, while the shared expert computes."""
    if not clock.engine.overlap.shared_expert:
        return dispatch
    share = clock.engine.operators.time_factor * (1 - clock.engine.overlap.contention)
    forward = share * sum(part.forward for part in shared)
    backward = share * sum(part.dgrad for part in shared)
    return replace(
        dispatch,
        before=max(0.0, dispatch.before - forward),
        last=max(0.0, dispatch.last - backward),
    )
