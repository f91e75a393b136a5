"""Law 2: start values do not know the topology, to the bit."""

import pytest
import torch

from nanotrain.comm.parallel_context import ParallelContext
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.worlds import Case, assemble, build_here, train_here


def start_values(ctx: ParallelContext, case: Case) -> dict[str, torch.Tensor]:
    run = build_here(ctx, case)
    return {name: parameter.detach().clone() for name, parameter in run.stages[0].named_parameters()}


def test_start_values_do_not_know_the_topology() -> None:
    alone = run_ranks(1, start_values, Case())[0]
    for dp, strategy in ((2, "optim"), (3, "optim_grads"), (4, "no_shard")):
        case = Case().but(parallel={"data_parallel_sharding_strategy": strategy, "ddp_bucket_size": 1000 * dp})
        for values in run_ranks(dp, start_values, case, strategy=strategy):
            assert values.keys() == alone.keys()
            assert all(torch.equal(values[name], alone[name]) for name in alone)


def test_another_seed_gives_other_start_values() -> None:
    alone, other = (run_ranks(1, start_values, Case().but(train={"seed": seed}))[0] for seed in (1, 2))
    assert not torch.equal(alone["layers.0.mlp.up.weight"], other["layers.0.mlp.up.weight"])


@pytest.mark.parametrize(
    ("ranks", "sizes", "options"),
    [
        (4, {"tp": 2, "etp": 1, "ep": 2}, {"sequence_parallel": True}),
        (4, {"pp": 2, "tp": 2, "etp": 2}, {}),
        (4, {"pp": 2, "cp": 2}, {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 2}),
    ],
)
def test_start_values_of_every_axis_are_pieces_of_the_same_tensors(
    ranks: int, sizes: dict[str, int], options: dict[str, object]
) -> None:
    model = {"num_layers": 4, "num_experts": 4, "moe_layer_freq": "2"}
    parallel = {SHORT_NAMES[name]: size for name, size in sizes.items()} | options
    alone = assemble(run_ranks(1, train_here, Case(steps=0).but(model=model)))
    spread = Case(steps=0).but(model=model, parallel=parallel, train={"micro_batch_size": 1})
    found = assemble(run_ranks(ranks, train_here, spread, **sizes))
    assert found.keys() == alone.keys()
    assert all(torch.equal(found[name], alone[name]) for name in alone)
