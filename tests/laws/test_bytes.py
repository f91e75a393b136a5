"""Law 5, what stands of it: resident bytes and moved bytes are those of the closed form, to the byte."""

import pytest

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.train.step import train_step
from tests.harness import run_ranks
from tests.laws.worlds import Case, build_here

SIZES = (1, 2, 4)


def measure(ctx: ParallelContext, case: Case) -> dict[str, int]:
    """Elements with padding, resident bytes and bytes sent in one step, of this rank."""
    run = build_here(ctx, case)
    (layer,), optimizer = run.data_parallel, run.optimizer
    storages = {}
    for bucket in layer.buckets:
        for tensor in (bucket.params.full, bucket.grads.shard):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    for tensor in optimizer.state_tensors().values():
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    ctx.traffic.reset()
    batch = run.batch_iterator.next()
    assert batch is not None
    train_step(run, batch)
    sent = sum(
        ctx.traffic.bytes(group, op)
        for group in ("dp_shard", "dp_replicate")
        for op in ("all_reduce", "reduce_scatter", "all_gather")
    )
    elements = sum(bucket.numel for bucket in (b.layout for b in layer.buckets))
    return {"elements": elements, "resident": sum(storages.values()), "sent": sent}


@pytest.mark.parametrize("d", SIZES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_resident_and_moved_bytes_are_the_closed_form(strategy: str, dtype: str, d: int) -> None:
    microbatches = 3
    case = Case(steps=1).but(
        train={"micro_batch_size": 1, "global_batch_size": microbatches * d},
        parallel={"data_parallel_sharding_strategy": strategy},
        precision={"params_dtype": dtype},
    )
    for measured in run_ranks(d, measure, case, strategy=strategy):
        elements = measured["elements"]
        assert measured["resident"] == resident_bytes(strategy, dtype, elements, d)
        assert measured["sent"] == moved_bytes(strategy, dtype, elements, d=d, m=microbatches)


def resident_bytes(strategy: str, dtype: str, elements: int, d: int) -> int:
    """Parameters, gradients, main weights and moments; fp32 parameters are their own main weights."""
    param, main = (2, 4) if dtype == "bf16" else (4, 0)
    cut_optim = 1 if strategy == "no_shard" else d
    cut_grads = d if strategy == "optim_grads" else 1
    return param * elements + 4 * elements // cut_grads + (main + 8) * elements // cut_optim


def moved_bytes(strategy: str, dtype: str, elements: int, *, d: int, m: int) -> int:
    """Sent per rank and step."""
    param = 2 if dtype == "bf16" else 4
    per_element = {"no_shard": 2 * 4, "optim": 4 + param, "optim_grads": 4 * m + param}[strategy]
    return per_element * elements * (d - 1) // d
