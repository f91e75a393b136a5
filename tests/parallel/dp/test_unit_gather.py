"""Parameters gathered per unit (`optim_grads_params`): memory, order of collectives, and the bits of `optim_grads`."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.model.context import BatchContext
from nanotrain.parallel.dp import reduction as reduction_module
from nanotrain.parallel.dp import stores
from nanotrain.parallel.dp.data_parallel import DataParallel, DataParallelOptions, gathered
from nanotrain.parallel.dp.layout import LayoutRules, plan_layout
from nanotrain.parallel.dp.stores import ShardedParams
from nanotrain.parallel.dp.strategy import STRATEGIES
from nanotrain.parallel.pp.executor import run_forward
from nanotrain.precision.policy import Precision
from nanotrain.train.run import Run
from nanotrain.train.step import train_step
from tests.harness import ranks, run_ranks
from tests.laws.worlds import Case, Outcome, build_here, train_here
from tests.parallel.dp.toys import backward, groups_of, local_params

STRATEGY = "optim_grads_params"
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
EXPERTS = {"num_experts": 4, "num_layers": 4}


def case_of(strategy: str = STRATEGY, *, overlap: bool = True, **model: Any) -> Case:
    parallel = {"data_parallel_sharding_strategy": strategy} | (OVERLAP if overlap else {})
    return Case(3).but(train={"micro_batch_size": 2}, parallel=parallel, model=model, optim={"clip_grad": 0.0})


def stores_of(run: Run) -> list[ShardedParams]:
    return [bucket.params for dp in run.data_parallel for bucket in dp.buckets]


def bytes_with_storage(run: Run) -> int:
    return sum(store.full.untyped_storage().nbytes() for store in stores_of(run))


def gathered_bytes(ctx: ParallelContext, case: Case) -> dict[str, int]:
    """The most bytes of gathered parameters in a training step, and the planned ones."""
    run = build_here(ctx, case)
    peak = bytes_with_storage(run)
    assert peak == 0, "initialized without storage for all parameters"
    allocate = ShardedParams.allocate

    def measure(store: ShardedParams) -> None:
        nonlocal peak
        allocate(store)
        peak = max(peak, bytes_with_storage(run))

    ShardedParams.allocate = measure
    batch = run.batch_iterator.next()
    assert batch is not None
    train_step(run, batch)
    assert bytes_with_storage(run) == 0
    planned = run.plan.resident_bytes
    full = sum(bucket.layout.numel for dp in run.data_parallel for bucket in dp.buckets) * 4
    return {"peak": peak, "units": planned.units, "params": planned.params, "full": full}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("schedule", [None, "1f1b", "zb-h1"])
def test_no_more_than_two_units_are_gathered(schedule: str | None, overlap: bool) -> None:
    pp = 1 if schedule is None else 2
    pipeline = {"pipeline_schedule": schedule} if schedule else {}
    case = case_of(overlap=overlap, num_layers=8).but(parallel={"pipeline_model_parallel_size": pp} | pipeline)
    for measured in run_ranks(2 * pp, gathered_bytes, case, strategy=STRATEGY, pp=pp):
        assert 0 < measured["peak"] <= measured["units"]
        assert measured["params"] == measured["full"] // 2
        assert measured["peak"] + measured["params"] < measured["full"]


def test_weights_are_those_of_optim_grads_to_the_bit() -> None:
    for model in ({}, EXPERTS, {"untie_embeddings_and_output_weights": True}):
        results: list[list[Outcome]] = [
            run_ranks(2, train_here, case_of(strategy, overlap=overlap, **model), strategy=strategy)
            for strategy, overlap in (("optim_grads", False), (STRATEGY, False), (STRATEGY, True))
        ]
        for other in results[1:]:
            for one, two in zip(results[0], other, strict=True):
                assert one.losses == two.losses
                assert all(torch.equal(one.weights[box], two.weights[box]) for box in one.weights)


@ranks(2, strategy=STRATEGY)
def test_evaluation_leaves_nothing_gathered_and_a_gathered_model_communicates_nothing(ctx: ParallelContext) -> None:
    run = build_here(ctx, case_of())
    batch = run.batch_iterator.next()
    assert batch is not None
    microbatches = [BatchContext.of(part, cp=ctx.group("cp"), aux_loss_scale=0.0) for part in batch.microbatches]
    evaluate = partial(
        run_forward, run.plan.valid_schedule, run.runnable, microbatches=microbatches, pipeline=run.pipeline
    )
    loss = evaluate()
    assert bytes_with_storage(run) == 0
    with gathered(run.data_parallel), gathered(run.data_parallel):
        ctx.traffic.reset()
        assert torch.equal(evaluate(), loss)
        assert ctx.traffic.bytes("dp_shard") == 0
        assert all(store.has_storage for store in stores_of(run))
    assert bytes_with_storage(run) == 0


class Layer(nn.Module):
    """x * weight + bias, the bias only where it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(130)), nn.Parameter(torch.ones(130))

    def forward(self, x: Tensor, *, with_bias: bool) -> Tensor:
        return x * self.weight + self.bias if with_bias else x * self.weight


class Layers(nn.Module):
    """Four layers, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))


@ranks(2, strategy=STRATEGY, timeout_s=30)
def test_collectives_start_in_one_order_where_gradients_are_missing_on_one_rank(ctx: ParallelContext) -> None:
    started: list[str] = []

    def record(name: str, start: Any, *tensors: Tensor, **group: Any) -> Any:
        started.append(f"{name} {tensors[0].numel()}")
        return start(*tensors, **group)

    stores.start_all_gather_into = partial(record, "gather", stores.start_all_gather_into)
    reduction_module.start_reduce_scatter_into = partial(record, "reduce", reduction_module.start_reduce_scatter_into)
    module = Layers()
    params = [
        replace(local, spec=replace(local.spec, unit=local.spec.name.rpartition(".")[0]))
        for local in local_params(module)
    ]
    parallel = DataParallel(
        module,
        plan_layout(params, LayoutRules(num_shards=2, bucket_size=10_000, gathers_by_unit=True)),
        groups=groups_of(ctx, STRATEGY),
        options=DataParallelOptions(STRATEGIES[STRATEGY], overlap_grad_reduce=True, overlap_param_gather=True),
        precision=Precision(params=torch.float32),
        device=torch.device("cpu"),
    )
    parallel.fill_params(lambda local: [p.data.fill_(1.0) for p in module.parameters() if p.untyped_storage().nbytes()])
    parallel.begin_step()
    x = torch.ones(130, requires_grad=True)
    for layer in module.layers:
        x = layer(x, with_bias=ctx.rank == 0)
    backward(parallel, x.sum())
    parallel.finish_grad_reduce()
    # forward gathers 0 to 3; backward gathers 3 to 0, and reduces a layer before the one after the next is gathered
    assert [entry.split()[0] for entry in started] == [*["gather"] * 6, *["reduce", "gather"] * 2, *["reduce"] * 2]
