"""Law L5: the resident and the sent bytes of data parallelism are the planned ones and those of the closed form."""

import pytest

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.parallel.dp.bucket import Bucket
from nanotrain.train.step import train_step
from nanotrain.train.traffic import sent_bytes
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.worlds import Case, build_here

SIZES = (1, 2, 4)
GROUPS = ("dp_shard", "dp_replicate", "expert_dp_shard", "expert_dp_replicate")
OPS = ("all_reduce", "reduce_scatter", "all_gather")


def measure(ctx: ParallelContext, case: Case) -> dict[str, int]:
    """Elements with padding, resident bytes and bytes sent in one step, of this rank: measured and planned."""
    run = build_here(ctx, case)
    buckets = [bucket for dp in run.data_parallel for bucket in dp.buckets]
    held = [tensor for bucket in buckets for tensor in (bucket.params.full, bucket.params.shard, bucket.grads.shard)]
    # not `state_tensors`, which leaves out a shard of padding only
    held += [tensor for state in run.optimizer._states for tensor in (state.main, *state.state.values())]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    ctx.traffic.reset()
    batch = run.batch_iterator.next()
    assert batch is not None
    train_step(run, batch)
    for dp in run.data_parallel:
        dp.wait_for_params()
    sent = sum(ctx.traffic.bytes(group, op) for group in GROUPS for op in OPS)
    planned = run.plan.resident_bytes
    return {
        "elements": sum(bucket.layout.numel for bucket in buckets if not is_expert(bucket)),
        "expert elements": sum(bucket.layout.numel for bucket in buckets if is_expert(bucket)),
        "resident": sum(storages.values()),
        "sent": sent,
        "planned resident": planned.total - planned.grad_buckets - planned.units,
        "planned sent": sum(count for (group, _), count in sent_bytes(run.plan).items() if group in GROUPS),
    }


def is_expert(bucket: Bucket) -> bool:
    return bucket.layout.params[0].param.spec.is_expert


@pytest.mark.parametrize("d", SIZES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_resident_and_sent_bytes_are_planned_and_the_closed_form(strategy: str, dtype: str, d: int) -> None:
    microbatches = 3
    case = Case(steps=1).but(
        train={"micro_batch_size": 1, "global_batch_size": microbatches * d},
        parallel={"data_parallel_sharding_strategy": strategy},
        precision={"params_dtype": dtype},
        model={"untie_embeddings_and_output_weights": True},
    )
    for measured in run_ranks(d, measure, case, strategy=strategy):
        elements = measured["elements"]
        assert measured["resident"] == measured["planned resident"] == resident_bytes(strategy, dtype, elements, d)
        assert (
            measured["sent"] == measured["planned sent"] == moved_bytes(strategy, dtype, elements, d=d, m=microbatches)
        )


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(("ranks", "ep", "instances"), [(4, 1, 2), (4, 1, 4), (4, 2, 2), (8, 2, 2)])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
def test_bytes_of_optimizer_instances(strategy: str, ranks: int, ep: int, instances: int, microbatches: int) -> None:
    """HSDP: the closed form with the ranks of one instance, and once per step an all-reduce of the shard."""
    sizes = {"strategy": strategy, "ep": ep, "instances": instances}
    case = Case(steps=1).but(
        train={"micro_batch_size": 1, "global_batch_size": microbatches * ranks},
        parallel={SHORT_NAMES[name]: value for name, value in sizes.items()},
        precision={"params_dtype": "bf16"},
        model={"untie_embeddings_and_output_weights": True} | ({"num_experts": 4} if ep > 1 else {}),
    )
    for measured in run_ranks(ranks, measure, case, **sizes):
        resident = moved = 0
        for name, num_ranks in {"elements": ranks, "expert elements": ranks // ep}.items():
            elements, d = measured[name], num_ranks // instances
            resident += resident_bytes(strategy, "bf16", elements, d)
            moved += moved_bytes(strategy, "bf16", elements, d=d, m=microbatches)
            moved += 2 * 4 * elements // d * (instances - 1) // instances
        assert measured["resident"] == measured["planned resident"] == resident
        assert measured["sent"] == measured["planned sent"] == moved


def test_a_tied_embedding_is_gathered_for_both_ends_of_the_model() -> None:
    strategy = "optim_grads_params"
    case = Case(steps=1).but(
        train={"micro_batch_size": 1, "global_batch_size": 4},
        parallel={"data_parallel_sharding_strategy": strategy, "overlap_param_gather": True},
        model={"position_embedding_type": "learned_absolute"},  # in the same unit, but not read by the head
    )
    for measured in run_ranks(2, measure, case, strategy=strategy):
        assert measured["sent"] == measured["planned sent"]


def resident_bytes(strategy: str, dtype: str, elements: int, d: int) -> int:
    """Params, grads, main params and moments; fp32 params are their own main params."""
    param, main = (2, 4) if dtype == "bf16" else (4, 0)
    optim_shards = 1 if strategy == "no_shard" else d
    grad_shards = d if strategy.startswith("optim_grads") else 1
    param_shards = d if strategy == "optim_grads_params" else 1
    return param * elements // param_shards + 4 * elements // grad_shards + (main + 8) * elements // optim_shards


def moved_bytes(strategy: str, dtype: str, elements: int, *, d: int, m: int) -> int:
    """Sent per rank and step."""
    param = 2 if dtype == "bf16" else 4
    per_element = {
        "no_shard": 2 * 4,
        "optim": 4 + param,
        "optim_grads": 4 * m + param,
        "optim_grads_params": 4 * m + 2 * m * param,
    }[strategy]
    return per_element * elements * (d - 1) // d
