"""Law L7: forwards and backwards in turns (`--overlap-moe-expert-parallel-comm`) change no bit, and
hide transfers.

The layouts of L1 have rows with it in `test_every_axis.py`.
"""

from typing import Any

import pytest
import torch

from nanotrain.comm import all_to_all
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.parallel.tp import loss
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.test_every_axis import BIASED, OPTIM, SP
from tests.laws.worlds import Case, Outcome, train_here

OVERLAP = {"overlap_moe_expert_parallel_comm": True}
MODEL = BIASED | {"hidden_dropout": 0.1, "mtp_num_layers": 1}
FULL, SOME = (
    {"recompute_granularity": "full"},
    {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
)
# name -> ranks, sizes, options, fields of the memory section
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "one stage": (2, {"ep": 2}, {"overlap_grad_reduce": True}, SOME),
    "recomputed": (2, {"ep": 2, "strategy": "optim_grads"}, {"moe_hierarchical_dispatch": 1}, FULL),
    "interleaved": (
        4,
        {"pp": 2, "ep": 2, "vpp": 2, "schedule": "interleaved", "strategy": "optim_grads"},
        {},
        {},
    ),
    "dualpipev": (
        4,
        {"tp": 2, "etp": 1, "pp": 2, "ep": 2, "vpp": 2, "schedule": "dualpipev"},
        SP,
        {},
    ),
}
Event = tuple[str, bool]  # started or arrived, and whether gradients travel


START, FINISH = all_to_all._Transfer.start, all_to_all._Transfer.finish
EVENTS: dict[int, list[Event]] = {}  # by rank, each of which is several threads


def train_both(ctx: ParallelContext, case: Case) -> tuple[Outcome, Outcome, list[Event]]:
    """Train without and with turns, and the transfers of tokens in the second run."""
    # the forward of the loss writes no gradients of the head in turns, which sums them in another
    # order
    loss._Buffer.of = lambda *_: None
    all_to_all._Transfer.start, all_to_all._Transfer.finish = recorded_start, recorded_finish
    EVENTS[ctx.rank] = []
    plain = train_here(ctx, case)
    EVENTS[ctx.rank] = []
    return plain, train_here(ctx, case.but(parallel=OVERLAP)), EVENTS[ctx.rank]


def recorded_start(trip: Any, x: torch.Tensor, *, is_backward: bool = False) -> torch.Tensor:
    trip.is_backward = is_backward
    EVENTS[trip.group.rank].append(("started", is_backward))
    return START(trip, x, is_backward=is_backward)


def recorded_finish(trip: Any) -> torch.Tensor:
    output = FINISH(trip)
    EVENTS[trip.group.rank].append(("arrived", trip.is_backward))
    return output


@pytest.mark.parametrize("name", LAYOUTS)
def test_turns_change_no_bit_and_hide_transfers_in_one_order_on_all_ranks(name: str) -> None:
    ranks, sizes, options, memory = LAYOUTS[name]
    num_layers = 2 * sizes.get("pp", 1)
    case = Case(2).but(
        train={"micro_batch_size": 1, "global_batch_size": 4 if "tp" in sizes else 8},
        optim=OPTIM,
        parallel={SHORT_NAMES[key]: value for key, value in sizes.items()} | options,
        model=MODEL | {"num_layers": num_layers, "moe_layer_freq": f"[1]*{num_layers}"},
        memory=memory,
    )
    results = run_ranks(ranks, train_both, case, **sizes)
    for rank, (plain, overlapped, events) in enumerate(results):
        assert overlapped.losses == plain.losses and overlapped.grad_norms == plain.grad_norms
        assert overlapped.moe == plain.moe, "tokens per expert, whose mean moves the expert bias"
        assert all(
            torch.equal(plain.weights[box], overlapped.weights[box]) for box in plain.weights
        )
        hidden = num_started = 0
        # direction, and transfers that the rank had started by then
        travelling: list[tuple[bool, int]] = []
        for what, is_backward in events:
            if what == "started":
                travelling.append((is_backward, num_started := num_started + 1))
            else:
                index = next(
                    i for i, (direction, _) in enumerate(travelling) if direction == is_backward
                )
                hidden += num_started > travelling.pop(index)[1]
        share = 1 / 2 if ranks == 2 else 1 / 8  # pipelines have few pairs of 4 and 8 microbatches
        assert hidden > num_started * share, (
            f"{hidden} of {num_started} transfers are beside the other computation"
        )
        peer = rank ^ (2 if "tp" in sizes else 1)
        assert events == results[rank ^ 1][2] or events == results[peer][2]
