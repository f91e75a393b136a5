"""Which modules are units, and which buckets they read."""

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.model.context import BatchContext
from nanotrain.model.transformer import build_stage
from nanotrain.parallel.dp import bucket as bucket_module
from nanotrain.parallel.dp import stores
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.parallel.dp.layout import LayoutRules, plan_layout
from nanotrain.parallel.dp.options import STRATEGIES, DataParallelOptions
from nanotrain.parallel.dp.param_buffer import gathered
from nanotrain.parallel.dp.stores import ShardedParams
from nanotrain.parallel.dp.units import child_units, given_units, traced_units, unit_modules
from nanotrain.parallel.pp.executor import run_forward
from nanotrain.plan.gathers import stage_units
from nanotrain.plan.plan import plan_run
from nanotrain.plan.traffic import sent_bytes
from nanotrain.precision.dtypes import Precision
from nanotrain.spec.params import Constant, LocalParam, ParamSpec
from nanotrain.train.run import Run
from nanotrain.train.step import train_step
from tests.harness import ranks, run_ranks
from tests.laws.worlds import Case, build_here, config_of, train_cases, train_here
from tests.parallel.dp.toys import backward, groups_of, local_params


def layout_of(*names: str, bucket_size: int | None = None):
    """One bucket per unit, unless it is larger; the unit is the name up to the last dot."""
    specs = (
        ParamSpec(
            name,
            (200,),
            dtype="fp32",
            init=Constant(0.0),
            weight_decay=True,
            unit=name.rpartition(".")[0],
        )
        for name in names
    )
    return plan_layout(
        [LocalParam.unsharded(spec) for spec in specs],
        LayoutRules(2, bucket_size=bucket_size, gathers_by_unit=True),
    )


def test_unit_modules_are_the_children_and_the_items_of_lists_and_dicts():
    stage = nn.Module()
    stage.embedding, stage.norm = nn.Linear(1, 1), nn.Linear(1, 1)
    stage.layers = nn.ModuleDict({"3": nn.Linear(1, 1), "4": nn.Sequential(nn.Linear(1, 1))})
    assert [name for name, _ in unit_modules(stage)] == [
        "embedding",
        "norm",
        "layers.3",
        "layers.4",
    ]


def test_the_buckets_after_a_unit_are_complete_when_its_backward_begins():
    stage = nn.Module()
    stage.a, stage.b, stage.silent = nn.Linear(1, 1), nn.Linear(1, 1), nn.Identity()
    units = child_units(stage, layout_of("a.weight", "b.weight"))
    # Buckets are in reverse order of registration.
    assert [(unit.first, unit.last, unit.buckets, unit.num_complete) for unit in units] == [
        (stage.a, stage.a, (1,), 1),
        (stage.b, stage.b, (0,), 0),
    ]


def test_final_norm_and_head_are_one_unit_and_the_backward_of_an_embedding_reads_nothing():
    """Of an untied model, and of a tied one, whose head reads the bucket of the embedding."""
    for is_untied, head in ((True, (0,)), (False, (0, 3))):
        case = case_of(untie_embeddings_and_output_weights=is_untied)
        plan = plan_run(config_of(case.but(parallel={"ddp_bucket_size": None})), 2, rank=0)
        stage, layout = build_stage(plan.config.model), plan.buffers[0].layout
        units = child_units(stage, layout)
        assert [unit.first for unit in units] == [
            stage.embedding,
            *stage.layers.values(),
            stage.final_norm,
        ]
        assert [unit.last for unit in units] == [
            stage.embedding,
            *stage.layers.values(),
            stage.head,
        ]
        assert (
            [unit.buckets for unit in units]
            == [(3,), (2,), (1,), head]
            == stage_units(plan.stages[0], layout)
        )
        assert [unit.is_lookup for unit in units] == [True, False, False, False]


def test_of_given_units_nothing_is_known_to_be_complete():
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    layout = layout_of("x.weight", "y.weight", "y.bias", "z.weight")
    units = given_units(
        [(first, {"y.weight", "y.bias"}), (second, {"x.weight", "z.weight"})], layout
    )
    assert [(unit.buckets, unit.num_complete) for unit in units] == [((1,), 0), ((0, 2), 0)]


def test_graphs_write_gradients_of_units_that_borrow_one_bucket():
    # a bucket for each
    layout = layout_of("x.weight", "y.weight", "y.bias", "z.weight", bucket_size=200)
    assert traced_units(layout, is_transient=False, num_blocks=0) == {"x", "y", "z"}
    assert traced_units(layout, is_transient=True, num_blocks=0) == {"x", "z"}
    # Units in the same memory cannot be told apart by the memory of a weight.
    assert traced_units(layout, is_transient=True, num_blocks=2) == set()


STRATEGY = "optim_grads_params"
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
EXPERTS = {"num_experts": 4, "num_layers": 4}
# overlap, and options of the gathers
OPTIONS: list[tuple[bool, dict[str, Any]]] = [
    (False, {}),
    (True, {}),
    (True, {"fsdp_prefetch_depth": 3}),
    (False, {"reshard_after_forward": False}),
    (True, {"reshard_after_forward": False}),
    (False, {"fsdp_double_buffer": True}),
    (True, {"fsdp_double_buffer": True}),
    (True, {"fsdp_double_buffer": True, "fsdp_prefetch_depth": 2}),
]


def case_of(strategy: str = STRATEGY, *, overlap: bool = True, **model: Any) -> Case:
    parallel = {"data_parallel_sharding_strategy": strategy} | (OVERLAP if overlap else {})
    train = {"micro_batch_size": 2, "global_batch_size": 8}
    return Case(2).but(train=train, parallel=parallel, model=model, optim={"clip_grad": 0.0})


def one_step(strategy: str = STRATEGY, *, overlap: bool, **model: Any) -> Case:
    return replace(case_of(strategy, overlap=overlap, **model), steps=1)


def stores_of(run: Run) -> list[ShardedParams]:
    return [bucket.params for dp in run.data_parallel for bucket in dp.buckets]


def bytes_with_storage(run: Run) -> int:
    return sum(store.full.untyped_storage().nbytes() for store in stores_of(run))


def record_gathered(run: Run) -> list[int]:
    """Bytes of parameters with storage after each allocation from now on."""
    gathered = [bytes_with_storage(run)]

    def allocate(store: ShardedParams) -> None:
        type(store).allocate(store)
        gathered.append(bytes_with_storage(run))

    for store in stores_of(run):
        store.allocate = partial(allocate, store)  # type: ignore[method-assign]
    return gathered


@pytest.mark.parametrize(
    "model", [{}, EXPERTS, {"untie_embeddings_and_output_weights": True}], ids=str
)
def test_weights_are_those_of_optim_grads_to_the_bit(model: dict[str, Any]) -> None:
    cases = [
        case_of(overlap=overlap, **model).but(parallel=options) for overlap, options in OPTIONS
    ]
    reference = run_ranks(
        2,
        train_here,
        case_of("optim_grads", overlap=False, **model),
        strategy="optim_grads",
        shares=True,
    )
    for expected, outcomes in zip(
        reference, run_ranks(2, train_cases, cases, strategy=STRATEGY, shares=True), strict=True
    ):
        for case, actual in zip(cases, outcomes, strict=True):
            assert expected.losses == actual.losses, case
            assert all(
                torch.equal(expected.weights[box], actual.weights[box]) for box in expected.weights
            ), case


def test_units_are_gathered_again_where_a_backward_recomputes_several_layers() -> None:
    """With a double buffer the layers of a chunk share blocks with the one whose backward has
    begun.
    """
    model = {"num_layers": 6}
    chunks = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 3,
    }
    sizes = {"global_batch_size": 4}  # a microbatch
    cases = [
        one_step(overlap=on, **model).but(parallel=options, memory=chunks, train=sizes)
        for on, options in OPTIONS
    ]
    plain = one_step("optim_grads", overlap=False, **model).but(train=sizes)
    reference = run_ranks(2, train_here, plain, strategy="optim_grads", shares=True)
    for expected, outcomes in zip(
        reference, run_ranks(2, train_cases, cases, strategy=STRATEGY, shares=True), strict=True
    ):
        for case, actual in zip(cases, outcomes, strict=True):
            assert all(
                torch.equal(expected.weights[box], actual.weights[box]) for box in expected.weights
            ), case
    for (row,) in run_ranks(2, measure_options, cases[:1], strategy=STRATEGY, shares=True):
        assert 0 < row["peak"] <= row["units"]


@pytest.mark.parametrize(
    ("pp", "parallel"),
    [
        (1, {}),
        (2, {"pipeline_schedule": "1f1b"}),
        (2, {"pipeline_schedule": "zb-h1"}),
        (2, {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 2}),
    ],
    ids=str,
)
def test_options_of_gathers_change_planned_memory_and_traffic_and_no_bit(
    pp: int, parallel: dict[str, Any]
) -> None:
    """Stages of several units, tied and untied ends, accumulation: sent bytes are exact, and so is
    a fixed pool.
    """
    num_layers = {1: 5, 2: 4}[pp] + 2 * ("num_virtual_stages_per_pipeline_rank" in parallel)
    for model in ({}, {"untie_embeddings_and_output_weights": True}):
        cases = [
            case_of(overlap=overlap, num_layers=num_layers, **model).but(
                parallel={"pipeline_model_parallel_size": pp} | parallel | options
            )
            for overlap, options in OPTIONS
        ]
        for measured in run_ranks(
            2 * pp, measure_options, cases, strategy=STRATEGY, pp=pp, shares=True
        ):
            for case, row in zip(cases, measured, strict=True):
                assert row["sent"] == row["planned sent"], case
                assert (
                    row["weights"] == measured[0]["weights"] and row["loss"] == measured[0]["loss"]
                ), case
                assert row["params"] == row["full"] // 2, case
                if case.overrides["parallel"].get("fsdp_double_buffer"):
                    assert row["pool"] == row["units"], case
                else:
                    assert 0 < row["peak"] <= row["units"] and row["outside steps"] == [0, 0], case
            assert pp > 1 or all(row["peak"] + row["params"] < row["full"] for row in measured[:2])


def measure_options(ctx: ParallelContext, cases: list[Case]) -> list[dict[str, Any]]:
    """Bytes gathered at once and sent in one step, and hashes of what was computed."""
    rows = []
    for case in cases:
        run = build_here(ctx, case)
        outside, peaks = [bytes_with_storage(run)], record_gathered(run)
        batch = run.batch_iterator.next()
        assert batch is not None
        ctx.traffic.reset()
        loss = train_step(run, batch).loss
        outside.append(bytes_with_storage(run))
        sent = sum(ctx.traffic.bytes("dp_shard", op) for op in ("all_gather", "reduce_scatter"))
        weights = [
            bucket.params.shard.double().sum().item()
            for dp in run.data_parallel
            for bucket in dp.buckets
        ]
        fulls = [store.full.untyped_storage() for store in stores_of(run)]
        rows.append(
            {
                "peak": max(peaks),
                "pool": sum(
                    {full.data_ptr(): full.nbytes() for full in fulls if full.nbytes()}.values()
                ),
                "outside steps": outside,
                "units": run.plan.resident_bytes.units,
                "params": run.plan.resident_bytes.params,
                "full": sum(
                    bucket.layout.numel for dp in run.data_parallel for bucket in dp.buckets
                )
                * 4,
                "sent": sent,
                "planned sent": sum(
                    n for (group, _), n in sent_bytes(run.plan).items() if group == "dp_shard"
                ),
                "loss": loss,
                "weights": weights,
            }
        )
    return rows


@ranks(2, strategy=STRATEGY, shares=True)
def test_evaluation_leaves_nothing_gathered_and_a_gathered_model_communicates_nothing(
    ctx: ParallelContext,
) -> None:
    run = build_here(ctx, case_of())
    batch = run.batch_iterator.next()
    assert batch is not None
    microbatches = [
        BatchContext.of(part, cp=ctx.group("cp"), aux_loss_scale=0.0) for part in batch.microbatches
    ]
    evaluate = partial(
        run_forward,
        run.plan.valid_schedule,
        run.runnable,
        microbatches=microbatches,
        pipeline=run.pipeline,
    )
    loss = evaluate()
    assert bytes_with_storage(run) == 0
    with gathered(run.data_parallel), gathered(run.data_parallel):
        ctx.traffic.reset()
        assert torch.equal(evaluate(), loss)
        assert ctx.traffic.bytes("dp_shard") == 0
        assert all(store.has_storage for store in stores_of(run))
    assert bytes_with_storage(run) == 0
    with suppress(KeyError), gathered(run.data_parallel):
        raise KeyError
    assert bytes_with_storage(run) == 0
    with gathered(run.data_parallel):
        assert torch.equal(evaluate(), loss), "gathered again after an error inside"


@ranks(2, strategy=STRATEGY, shares=True)
def test_a_forward_without_a_backward_leaves_nothing_gathered_in_the_next_step(
    ctx: ParallelContext,
) -> None:
    """Units that stay gathered for their backward would hold the weights of before the update."""
    run = build_here(ctx, case_of().but(parallel={"reshard_after_forward": False}))
    batch = run.batch_iterator.next()
    assert batch is not None
    context = BatchContext.of(batch.microbatches[0], cp=ctx.group("cp"), aux_loss_scale=0.0)
    run.stages[0](None, context)
    assert bytes_with_storage(run) > 0
    for dp in run.data_parallel:
        dp.begin_step()
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


@ranks(2, threads=False, strategy=STRATEGY)
def test_collectives_start_in_one_order_where_gradients_are_missing_on_one_rank(
    ctx: ParallelContext,
) -> None:
    started: list[str] = []

    def record(name: str, start: Any, *tensors: Tensor, **group: Any) -> Any:
        started.append(f"{name} {tensors[0].numel()}")
        return start(*tensors, **group)

    stores.start_all_gather_into = partial(record, "gather", stores.start_all_gather_into)
    bucket_module.start_reduce_scatter_into = partial(
        record, "reduce", bucket_module.start_reduce_scatter_into
    )
    module = Layers()
    params = [
        replace(local, spec=replace(local.spec, unit=local.spec.name.rpartition(".")[0]))
        for local in local_params(module)
    ]
    parallel = DataParallel(
        module,
        plan_layout(params, LayoutRules(num_shards=2, bucket_size=10_000, gathers_by_unit=True)),
        groups=groups_of(ctx, STRATEGY),
        options=DataParallelOptions(
            STRATEGIES[STRATEGY],
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            num_prefetched_units=1,
        ),
        precision=Precision(params=torch.float32),
        device=torch.device("cpu"),
    )
    parallel.fill_params(
        lambda local: [
            p.data.fill_(1.0) for p in module.parameters() if p.untyped_storage().nbytes()
        ]
    )
    parallel.begin_step()
    x = torch.ones(130, requires_grad=True)
    for layer in module.layers:
        x = layer(x, with_bias=ctx.rank == 0)
    backward(parallel, x.sum())
    parallel.finish_grad_reduce()
    # forward gathers 0 to 3; backward gathers 3 to 0, and reduces a layer before the one after the
    # next is gathered
    assert [entry.split()[0] for entry in started] == [
        *["gather"] * 6,
        *["reduce", "gather"] * 2,
        *["reduce"] * 2,
    ]
