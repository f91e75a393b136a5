"""Bytes of CUDA graphs: those of the plan are those that captures keep."""

from typing import Any

import pytest
from torch import Tensor

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.memory.cuda_graphs import GraphedPart
from nanotrain.parallel.pp.actions import PipelineShape
from nanotrain.parallel.pp.schedules import build_schedule
from nanotrain.plan.graph_memory import plan_graphs, slots_of
from nanotrain.plan.memory_plan import peak_of, train_schedule
from nanotrain.plan.saved_bytes import SavedBytes
from nanotrain.train.run import Run
from tests import fake_graphs
from tests.harness import run_ranks
from tests.laws.test_cuda_graphs import GRAPHS
from tests.laws.test_every_axis import MODELS
from tests.laws.worlds import Case, build_here, train_steps

SIZES = {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 192}
VPP = {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 2}


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank", "rank", "slots"),
    [("1f1b", 1, 0, {0: 4}), ("1f1b", 1, 3, {3: 1}), ("interleaved", 2, 0, {0: 8, 4: 4})],
)
def test_slots_are_the_microbatches_in_flight(schedule, stages_per_rank, rank, slots) -> None:
    built = build_schedule(schedule, PipelineShape(4, stages_per_rank, 8))
    assert slots_of(built.freeing_first(rank)) == slots


def captured(ctx: ParallelContext, case: Case) -> tuple[int, int, int, int]:
    """Bytes that captures keep and the planned ones, with the peaks without and with graphs."""
    fake_graphs.install()
    with fake_graphs.counting() as pools:
        run = build_here(ctx, case.but(train=GRAPHS))
        train_steps(run, case.steps)
        kept = sum(graph.static_bytes for pool in pools for graph in pool.graphs)
        kept += static_bytes(run)
    plan = run.plan
    schedule = train_schedule(plan.config, ctx.topology.world_size)
    saved = SavedBytes(plan, "cpu")
    graphs = plan_graphs(plan, saved, actions=list(schedule.freeing_first(ctx.coords["pp"])))
    plain = build_here(ctx, case).plan
    peaks = [peak_of(one, SavedBytes(one, "cpu"), schedule=schedule).total for one in (plain, plan)]
    return kept, graphs.saved + graphs.buffers, *peaks


def static_bytes(run: Run) -> int:
    """Bytes of the static inputs and gradients of all graphs."""
    tensors: dict[int, Tensor] = {}
    for part in graphed_parts(run):
        inputs = [slot.hidden for slot in part._slots if not slot._is_linked]
        for tensor in (*inputs, *part.graphs._buffers.values()):
            tensors[tensor.data_ptr()] = tensor
    return sum(tensor.nbytes for tensor in tensors.values())


def graphed_parts(run: Run) -> list[GraphedPart]:
    """The parts of all blocks."""
    parts = []
    for stage in run.stages.values():
        for module in stage.layers.modules():
            parts += [value for value in vars(module).values() if isinstance(value, GraphedPart)]
    return parts


ROWS: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("llama", 1, {}, {}),
    ("llama", 1, {}, {"recompute_granularity": "selective", "recompute_modules": ["pointwise"]}),
    ("gpt2", 2, {"pp": 2}, {}),
]


@pytest.mark.parametrize(("model", "num_ranks", "sizes", "memory"), ROWS, ids=str)
def test_the_plan_has_what_captures_keep(model, num_ranks, sizes, memory) -> None:
    case = Case(4).but(
        model=MODELS[model] | SIZES,
        train={"micro_batch_size": 4, "global_batch_size": 8},
        memory=memory,
    )
    case = case.but(parallel={"pipeline_model_parallel_size": sizes.get("pp", 1)})
    for kept, planned, plain, graphed in run_ranks(num_ranks, captured, case, **sizes):
        assert kept == planned
        assert graphed > plain


def test_the_plan_of_experts_is_an_upper_bound() -> None:
    """What eager experts save counts as if graphs kept it."""
    case = Case(4).but(
        model=MODELS["biased"] | SIZES, train={"micro_batch_size": 4, "global_batch_size": 8}
    )
    ((kept, planned, plain, graphed),) = run_ranks(1, captured, case)
    assert 0.3 * planned < kept < planned
    assert graphed > plain
