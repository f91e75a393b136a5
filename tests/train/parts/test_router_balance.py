"""Routers of all stages: their statistics are one vector on the device, and expert biases move with
them.
"""

import torch

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.parallel import ParallelConfig
from nanotrain.topology.topology import Topology
from nanotrain.train.step import train_step
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.worlds import Case, build_here

EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}


def routed(ctx, case):
    """The metrics of the second step, which do not count the first, and the biases of this rank
    after it.
    """
    run = build_here(ctx, case)
    _, metrics = (train_step(run, run.batch_iterator.next()).metrics["moe"] for _ in range(2))
    biases = {
        name: bias.tolist() for stage in run.stages.values() for name, bias in stage.named_buffers()
    }
    return metrics, {name: bias for name, bias in biases.items() if name.endswith("expert_bias")}


def test_every_pipeline_rank_gets_the_metrics_of_all_stages_and_moves_its_own_biases():
    case = Case(steps=2).but(model=EXPERTS | BIAS)
    parallel = {SHORT_NAMES["pp"]: 2}
    expected, biases = routed(ParallelContext.attach(Topology.of(ParallelConfig(), 1)), case)
    (first, of_first), (second, of_second) = run_ranks(2, routed, case.but(parallel=parallel), pp=2)
    names = [f"layers.{layer}.mlp.router" for layer in range(2)]
    assert list(expected["load"]) == names and first == second
    assert first["load"] == expected["load"]
    assert sum(expected["load"][names[0]]) == 12 * 24 * 2, "K pairs of every token"
    assert of_first | of_second == biases and len(of_first) == len(of_second) == 1
    assert any(abs(value) > 0 for value in torch.tensor(list(biases.values())).flatten().tolist())


def test_the_mean_balance_loss_is_over_routers_that_have_one():
    balance = {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [1e-2]}
    case = Case(steps=2).but(model=EXPERTS | balance | {"moe_hash_layers": "[1,0]"})
    metrics, _ = routed(ParallelContext.attach(Topology.of(ParallelConfig(), 1)), case)
    # 1 is perfect balance; the experts of the first layer are those of a table, with no loss
    assert metrics["balance_loss"] > 0.8
