"""Law 2: start values do not know the topology, to the bit."""

import torch

from nanotrain.comm.parallel_context import ParallelContext
from tests.harness import run_ranks
from tests.laws.worlds import Case, build_here


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
