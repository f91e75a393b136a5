"""Law L1 for gradient groups: the gradient of rank r is 2**r, so the reduced sum identifies the
ranks in it.

No model runs. A sum of distinct powers of two shows exactly which ranks were summed, and which of
them twice.
"""

from dataclasses import dataclass

import pytest
import torch

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.spec.params import ParamSpec
from nanotrain.topology.topology import Topology
from nanotrain.train.step import finalize_grads
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.worlds import Case, build_here

MODEL = {
    "num_layers": 4,
    "qk_layernorm": True,
    "add_bias_linear": True,
    "num_query_groups": 1,  # fewer than tp ranks: keys and values are shared
    "num_experts": 4,
    "moe_layer_freq": "2",
    "moe_shared_expert_intermediate_size": 16,
}


@dataclass(frozen=True)
class ReducedGradient:
    """The distinct values of the reduced gradient of a parameter on one rank."""

    spec: ParamSpec
    values: set[float]


def probe(ctx: ParallelContext, case: Case) -> list[ReducedGradient]:
    """Reduce the gradient 2**rank of every parameter."""
    run = build_here(ctx, case)
    named = {
        name: parameter
        for stage in run.stages.values()
        for name, parameter in stage.named_parameters()
    }
    for layer in run.data_parallel:
        layer.begin_step()
        layer.backward_begins(is_last=True)
        for name in layer.params:
            torch.autograd.backward(named[name], torch.full_like(named[name], 2.0**ctx.rank))
        layer.backward_ended()
        layer.finish_grad_reduce()
    finalize_grads(run.data_parallel, ctx)
    return [found for layer in run.data_parallel for found in values_of(layer)]


def values_of(layer: DataParallel) -> list[ReducedGradient]:
    return [
        ReducedGradient(
            part.param.spec,
            set(bucket.grads.shard[part.elements].tolist()),
        )
        for bucket in layer.buckets
        for part in bucket.layout.update_ranges(layer.groups.shard.index)
    ]


def expected_sum(topology: Topology, rank: int, spec: ParamSpec) -> float:
    """The sum over all ranks with a gradient of the same elements."""
    members = set(topology.members(rank, "expert_dp" if spec.is_expert else "dp_cp"))
    for axis in spec.grad_sum_axes:
        members = {
            other for member in members for other in (topology.members(member, axis) or (member,))
        }
    return sum(2.0**member for member in members)


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
@pytest.mark.parametrize(
    ("ranks", "sizes", "options"),
    [
        (4, {}, {}),
        (4, {"tp": 2, "etp": 1, "ep": 2}, {"sequence_parallel": True}),
        (8, {"tp": 2, "pp": 2, "etp": 2, "ep": 2}, {}),
        (8, {"cp": 2, "pp": 2, "ep": 2}, {"overlap_grad_reduce": True}),
        (8, {"tp": 2, "pp": 2, "cp": 2, "etp": 1, "ep": 4}, {"sequence_parallel": True}),
    ],
)
def test_every_gradient_is_summed_over_exactly_its_ranks(
    strategy: str, ranks: int, sizes: dict[str, int], options: dict[str, object]
) -> None:
    short = sizes | {"strategy": strategy}
    parallel = {SHORT_NAMES[name]: value for name, value in short.items()} | options
    case = Case().but(
        train={"micro_batch_size": 1, "global_batch_size": 8}, parallel=parallel, model=MODEL
    )
    for rank, found in enumerate(run_ranks(ranks, probe, case, **short, shares=True)):
        topology = topology_of(ranks, case)
        assert {one.spec.weight_decay for one in found} == {True, False} or strategy != "no_shard"
        for one in found:
            expected = expected_sum(topology, rank, one.spec)
            assert one.values == {expected}, (
                f"rank {rank}: {one.spec.name} has {one.values}, not {expected}"
            )


def topology_of(ranks: int, case: Case) -> Topology:
    from tests.harness import parallel_config

    options = {
        name: value
        for name, value in case.overrides["parallel"].items()
        if name != "overlap_grad_reduce"
    }
    return Topology.of(parallel_config(**options), ranks)
