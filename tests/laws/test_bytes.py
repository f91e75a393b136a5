"""Law L5: the resident and the sent bytes of data parallelism are the planned ones and those of the
closed form.
"""

import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.parallel.dp.bucket import Bucket
from nanotrain.plan.plan import plan_run
from nanotrain.plan.traffic import sent_bytes
from nanotrain.train.run import Run
from nanotrain.train.step import train_step
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.worlds import Case, build_here, config_of

PAGE = Path(__file__).parents[2] / "docs" / "zero.md"
SIZES = (1, 2, 4)
GROUPS = ("dp_shard", "dp_replicate", "expert_dp_shard", "expert_dp_replicate")
ONE_LAYER = {"num_layers": 1, "untie_embeddings_and_output_weights": True}
OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


def measure(ctx: ParallelContext, case: Case) -> dict[str, int]:
    """Elements with padding, resident bytes and bytes sent in one step, of this rank: measured and
    planned.
    """
    run = build_here(ctx, case)
    buckets = [bucket for dp in run.data_parallel for bucket in dp.buckets]
    resident = resident_bytes(run)
    ctx.traffic.reset()
    batch = run.batch_iterator.next()
    assert batch is not None
    train_step(run, batch)
    for dp in run.data_parallel:
        dp.wait_for_params()
    sent = sum(ctx.traffic.bytes(group, op) for group in GROUPS for op in OPS)
    return {
        "elements": sum(bucket.layout.numel for bucket in buckets if not is_expert(bucket)),
        "expert elements": sum(bucket.layout.numel for bucket in buckets if is_expert(bucket)),
        "once": sum(
            bucket.layout.numel for bucket in buckets if bucket.layout.units & {"embedding", "head"}
        ),
        "resident": resident,
        "sent": sent,
        "planned resident": planned_resident_bytes(run),
        "planned sent": sum(
            count for (group, _), count in sent_bytes(run.plan).items() if group in GROUPS
        ),
    }


def resident_bytes(run: Run) -> int:
    """Bytes that are allocated for parameters, gradients and optimizer state between steps."""
    buckets = [bucket for dp in run.data_parallel for bucket in dp.buckets]
    held = [
        tensor
        for bucket in buckets
        for tensor in (bucket.params.full, bucket.params.shard, bucket.grads.shard)
    ]
    held += [bucket.grads.main for bucket in buckets]
    held += run.optimizer.allocated_tensors
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held
    }
    return sum(storages.values())


def planned_resident_bytes(run: Run) -> int:
    """The same by the plan, without what exists only in a step."""
    planned = run.plan.resident_bytes
    return planned.total - planned.grad_buckets - planned.units


def measure_all(ctx: ParallelContext, cases: list[Case]) -> list[dict[str, int]]:
    """`measure` several cases on the same ranks."""
    return [measure(ctx, case) for case in cases]


def is_expert(bucket: Bucket) -> bool:
    return bucket.layout.params[0].param.spec.is_expert


@pytest.mark.parametrize("d", SIZES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_resident_and_sent_bytes_are_planned_and_the_closed_form(
    strategy: str, dtype: str, d: int
) -> None:
    microbatches = 2
    case = Case(steps=1).but(
        train={"micro_batch_size": 1, "global_batch_size": microbatches * d},
        parallel={"data_parallel_sharding_strategy": strategy},
        precision={"params_dtype": dtype},
        model=ONE_LAYER,
    )
    for measured in run_ranks(d, measure, case, strategy=strategy, shares=True):
        elements = measured["elements"]
        form = Form(strategy, dtype, elements, d, once=measured["once"])
        assert measured["resident"] == measured["planned resident"] == form.resident
        assert measured["sent"] == measured["planned sent"] == form.moved(microbatches)


@pytest.mark.parametrize(("ranks", "ep", "instances"), [(4, 1, 2), (4, 1, 4), (8, 2, 2)])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
def test_bytes_of_optimizer_instances(strategy: str, ranks: int, ep: int, instances: int) -> None:
    """HSDP: the closed form with the ranks of one instance, and once per step a reduction of the
    shard.

    With 1 and 2 microbatches, and with optimizer state that is sharded across instances too.
    """
    sizes = {"strategy": strategy, "ep": ep, "instances": instances}
    variants = [(1, "no_shard"), (2, "no_shard"), (2, "optim")]
    cases = [
        Case(steps=1).but(
            train={"micro_batch_size": 1, "global_batch_size": m * ranks},
            parallel={SHORT_NAMES[name]: value for name, value in sizes.items()}
            | {"outer_dp_sharding_strategy": outer},
            precision={"params_dtype": "bf16"},
            model=ONE_LAYER | ({"num_experts": 4} if ep > 1 else {}),
        )
        for m, outer in variants
    ]
    for by_case in run_ranks(ranks, measure_all, cases, **sizes, shares=True):
        for measured, (m, outer) in zip(by_case, variants, strict=True):
            num_outer = instances if outer == "optim" else 1
            resident = moved = 0
            for name, num_ranks, once in (
                ("elements", ranks, measured["once"]),
                ("expert elements", ranks // ep, 0),
            ):
                d, instanced = (
                    num_ranks // instances,
                    {"n": instances, "outer": num_outer, "once": once},
                )
                form = Form(strategy, "bf16", measured[name], d, **instanced)
                resident += form.resident
                moved += form.moved(m)
            assert measured["resident"] == measured["planned resident"] == resident
            assert measured["sent"] == measured["planned sent"] == moved


@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_bytes_of_low_precision_gradients(strategy: str, instances: int) -> None:
    """bf16 reduction with fp32 and bf16 main gradients, and as an all-to-all; 1 and 2 microbatches."""
    if strategy == "no_shard" and instances > 1:
        return
    sizes = {"strategy": strategy, "instances": instances}
    outer = {"outer_dp_sharding_strategy": "optim"} if instances > 1 else {}
    to_all = {"reduce_scatter_with_fp32_accumulation": strategy != "no_shard"}
    variants = [
        (m, main, options)
        for m, main, options in ((1, 4, outer), (2, 2, {}), (2, 4, to_all | outer))
    ]
    cases = [
        Case(steps=1).but(
            train={"micro_batch_size": 1, "global_batch_size": m * 4},
            parallel={SHORT_NAMES[name]: value for name, value in sizes.items()} | options,
            precision={
                "params_dtype": "bf16",
                "grad_reduce_in_bf16": True,
                "main_grads_dtype": "fp32" if main == 4 else "bf16",
            },
            model=ONE_LAYER,
        )
        for m, main, options in variants
    ]
    for by_case in run_ranks(4, measure_all, cases, **sizes, shares=True):
        for measured, (m, main, options) in zip(by_case, variants, strict=True):
            num_outer = instances if "outer_dp_sharding_strategy" in options else 1
            form = Form(
                strategy,
                "bf16",
                measured["elements"],
                d=4 // instances,
                n=instances,
                outer=num_outer,
                grad=2,
                main=main,
                once=measured["once"],
            )
            assert measured["resident"] == measured["planned resident"] == form.resident
            assert measured["sent"] == measured["planned sent"] == form.moved(m)


def test_bytes_of_gradients_that_every_rank_gets_in_full() -> None:
    """All-reduced inside an instance and across, whether or not optimizer state is sharded across
    instances.
    """
    sizes = {"strategy": "optim", "instances": 2}
    cases = [
        Case(steps=1).but(
            train={"micro_batch_size": 1, "global_batch_size": 4},
            parallel={SHORT_NAMES[name]: value for name, value in sizes.items()}
            | {"force_all_reduce": True, "outer_dp_sharding_strategy": outer},
        )
        for outer in ("no_shard", "optim")
    ]
    for by_case in run_ranks(4, measure_all, cases, **sizes, shares=True):
        for measured, params in zip(by_case, (4 / 2, 4 / 2 + 4 / 4), strict=True):
            assert (
                measured["sent"]
                == measured["planned sent"]
                == measured["elements"] * (4 + 4 + params)
            )


DOCUMENTED = [("no_shard", 1), *product(("optim", "optim_grads", "optim_grads_params"), (1, 2))]


@pytest.mark.parametrize(("strategy", "instances"), DOCUMENTED)
def test_the_plan_has_the_bytes_of_the_documented_tables(strategy: str, instances: int) -> None:
    """The cells of docs/zero.md, read as formulas, for eight ranks."""
    ranks, microbatches = 8, 3
    case = Case().but(
        train={"micro_batch_size": 1, "global_batch_size": microbatches * ranks},
        parallel={SHORT_NAMES["strategy"]: strategy, SHORT_NAMES["instances"]: instances},
        precision={"params_dtype": "bf16"},
        model={"untie_embeddings_and_output_weights": True},
    )
    plan = plan_run(config_of(case), ranks, rank=0)
    elements = sum(bucket.numel for buffer in plan.buffers for bucket in buffer.layout.buckets)
    buckets = [bucket for buffer in plan.buffers for bucket in buffer.layout.buckets]
    once = sum(bucket.numel for bucket in buckets if bucket.units & {"embedding", "head"})
    sizes = {"P": elements, "E": once, "d": ranks // instances, "m": microbatches, "n": instances}
    resident, *sent = (
        round(value_of_cell(cell, sizes)) for cell in documented(strategy)[instances - 1]
    )
    assert (
        plan.resident_bytes.total - plan.resident_bytes.grad_buckets - plan.resident_bytes.units
        == resident
    )
    planned = sent_bytes(plan)
    moved = [
        sum(planned.get((group, op), 0) for op in OPS) for group in ("dp_shard", "dp_replicate")
    ]
    assert sent == (moved if instances > 1 else [sum(moved)])


def documented(strategy: str) -> list[list[str]]:
    """The cells of a strategy in each of the tables of bytes: without and with instances."""
    rows = [
        line.strip("| ").split(" | ")
        for line in PAGE.read_text().splitlines()
        if line.startswith("| `")
    ]
    return [
        [cell.strip() for cell in cells]
        for name, *cells in rows
        if f"`{strategy}`" in name and " P" in cells[0]
    ]


def value_of_cell(cell: str, sizes: dict[str, int]) -> float:
    """The value of "(2 + 16/d) P + 2 buckets", without buckets and units."""
    formula = re.sub(r" \+ 2 (buckets|units)", "", cell).replace(" x ", " * ")
    value: float = eval(re.sub(r"(?<=[\w)]) ?(?=[a-zA-Z(])", "*", formula), {}, sizes)
    return value


def test_a_tied_embedding_is_gathered_for_both_ends_of_the_model() -> None:
    strategy = "optim_grads_params"
    case = Case(steps=1).but(
        train={"micro_batch_size": 1, "global_batch_size": 4},
        parallel={"data_parallel_sharding_strategy": strategy, "overlap_param_gather": True},
        # in the same unit, but not read by the head
        model={"position_embedding_type": "learned_absolute"},
    )
    for measured in run_ranks(2, measure, case, strategy=strategy, shares=True):
        assert measured["sent"] == measured["planned sent"]


FULL, AHEAD = (
    {"recompute_granularity": "full", "recompute_method": "uniform"},
    {"overlap_param_gather": True},
)
# options of recomputation and of gathers; five layers, so the last group may be smaller
RECOMPUTED = [
    ({"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}, AHEAD),
    (FULL, {}),
    (FULL | {"recompute_num_layers": 2}, {}),
    (FULL | {"recompute_num_layers": 3}, AHEAD),
    (FULL | {"recompute_num_layers": 3}, AHEAD | {"fsdp_double_buffer": True}),
    (FULL | {"recompute_num_layers": 2}, AHEAD | {"fsdp_prefetch_depth": 2}),
    (FULL | {"recompute_num_layers": 5}, {"reshard_after_forward": False}),
]


@pytest.mark.parametrize("model", ["untied", "experts"])
def test_gathers_of_recomputed_layers_are_planned(model: str) -> None:
    """ZeRO-3: without groups as without recomputation; the layers of a group are gathered for their
    second run too.
    """
    experts = {"num_experts": 2, "moe_layer_freq": "[1]*2+[0]*2+[1]*1"}
    sizes = {"num_layers": 5} | (
        {"untie_embeddings_and_output_weights": True} if model == "untied" else experts
    )
    strategy = {"data_parallel_sharding_strategy": "optim_grads_params"}
    train = {"micro_batch_size": 1, "global_batch_size": 4}
    cases = [
        Case(steps=1).but(train=train, model=sizes, parallel=strategy | options, memory=memory)
        for memory, options in RECOMPUTED
    ]
    for by_case in run_ranks(2, measure_all, cases, strategy="optim_grads_params", shares=True):
        for measured, (memory, options) in zip(by_case, RECOMPUTED, strict=True):
            assert measured["sent"] == measured["planned sent"], (memory, options)
            if model == "untied" and "recompute_num_layers" not in memory:
                form = Form(
                    "optim_grads_params", "fp32", measured["elements"], d=2, once=measured["once"]
                )
                assert measured["sent"] == form.moved(2)


@dataclass(frozen=True)
class Form:
    """The closed form of one buffer."""

    strategy: str
    dtype: str  # of parameters
    elements: int  # with padding
    d: int  # shard ranks
    n: int = 1  # optimizer instances
    outer: int = 1  # instances that optimizer state is sharded over
    grad: int = 4  # bytes of a gradient as it is reduced
    main: int = 4  # bytes of a gradient as the optimizer reads it
    # elements that are gathered for the forward only: of the embedding, and of final norm and head
    once: int = 0

    @property
    def resident(self) -> int:
        """Params, grads, main params and moments; fp32 params are their own main params."""
        param, main_param = (4, 0) if self.dtype == "fp32" else (2, 4)
        grad_shards = self.d if self.strategy.startswith("optim_grads") else 1
        update_shards = self.outer * (1 if self.strategy == "no_shard" else self.d)
        grads = self.main * self.elements // grad_shards
        if grad_shards == 1 and self.strategy in ("no_shard", "optim"):
            grads = self.grad * self.elements
            grads += self.main * self.elements // update_shards if self.main != self.grad else 0
        param_shards = self.d if self.strategy == "optim_grads_params" else 1
        return (
            param * self.elements // param_shards
            + grads
            + (main_param + 8) * self.elements // update_shards
        )

    def moved(self, m: int) -> int:
        """Sent per rank and step of `m` microbatches: inside the instance and across."""
        param = 4 if self.dtype == "fp32" else 2
        per_element = {
            "no_shard": 2 * self.grad,
            "optim": self.grad + param,
            "optim_grads": self.grad * m + param,
            "optim_grads_params": self.grad * m + 2 * m * param,
        }[self.strategy]
        inside = per_element * self.elements * (self.d - 1) // self.d
        if self.strategy == "optim_grads_params":
            inside -= param * m * self.once * (self.d - 1) // self.d
        across = self.grad + param if self.outer > 1 else 2 * self.grad
        return inside + across * self.elements // self.d * (self.n - 1) // self.n
