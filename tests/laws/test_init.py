"""Law L2: initial weights do not depend on the topology, to the bit."""

import pytest
import torch

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.parallel.dp.param_buffer import gathered
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.worlds import Case, assemble, build_here, train_here


def initial_weights(ctx: ParallelContext, case: Case) -> dict[str, torch.Tensor]:
    run = build_here(ctx, case)
    with gathered(run.data_parallel):
        return {
            name: parameter.detach().clone() for name, parameter in run.stages[0].named_parameters()
        }


def test_initial_weights_do_not_depend_on_data_parallelism() -> None:
    single = run_ranks(1, initial_weights, Case(), shares=True)[0]
    for dp, strategy in (
        (2, "optim"),
        (3, "optim_grads"),
        (4, "no_shard"),
        (2, "optim_grads_params"),
    ):
        case = Case().but(
            parallel={"data_parallel_sharding_strategy": strategy, "ddp_bucket_size": 1000 * dp}
        )
        for values in run_ranks(dp, initial_weights, case, strategy=strategy, shares=True):
            assert values.keys() == single.keys()
            assert all(torch.equal(values[name], single[name]) for name in single)


def test_another_seed_gives_other_initial_weights() -> None:
    single, other = (
        run_ranks(1, initial_weights, Case().but(train={"seed": seed}), shares=True)[0]
        for seed in (1, 2)
    )
    assert not torch.equal(single["layers.0.mlp.up.weight"], other["layers.0.mlp.up.weight"])


@pytest.mark.parametrize(
    ("ranks", "sizes", "options"),
    [
        (4, {"tp": 2, "etp": 1, "ep": 2}, {"sequence_parallel": True}),
        (4, {"pp": 2, "tp": 2, "etp": 2}, {}),
        (
            4,
            {"pp": 2, "cp": 2},
            {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 2},
        ),
    ],
)
def test_initial_weights_of_every_axis_are_shards_of_the_same_tensors(
    ranks: int, sizes: dict[str, int], options: dict[str, object]
) -> None:
    model = {"num_layers": 4, "num_experts": 4, "moe_layer_freq": "2"}
    parallel = {SHORT_NAMES[name]: size for name, size in sizes.items()} | options
    single = assemble(run_ranks(1, train_here, Case(steps=0).but(model=model), shares=True))
    spread = Case(steps=0).but(model=model, parallel=parallel, train={"micro_batch_size": 1})
    values = assemble(run_ranks(ranks, train_here, spread, **sizes, shares=True))
    assert values.keys() == single.keys()
    assert all(torch.equal(values[name], single[name]) for name in single)
