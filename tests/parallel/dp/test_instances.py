"""Two optimizer instances (HSDP): exact sums, and one order of the collectives of both groups."""

from functools import partial

from nanotrain.parallel.dp import bucket as bucket_module
from nanotrain.parallel.dp.data_parallel import MAX_REDUCTIONS
from tests.harness import run_ranks
from tests.parallel.dp.test_data_parallel import SETTINGS, patterns, reduce_two_steps
from tests.parallel.dp.toys import NUM_BUCKETS, SHAPES, Toy, assert_shards, backward, wrap


def reduce_in_two_instances(ctx):
    """Two optimizer instances of two ranks: reduce-scatter inside each, then all-reduce across both
    (HSDP).
    """
    sent = {}
    for strategy, overlap in SETTINGS:
        for num_microbatches in (1, 3):
            stage = Toy()
            parallel = wrap(ctx, stage, strategy=strategy, overlap=overlap)
            reduce_two_steps(ctx, parallel, stage, num_microbatches=num_microbatches)
            calls = (
                ctx.traffic.calls(parallel.groups.shard.name),
                ctx.traffic.calls(parallel.groups.replicate.name),
            )
            sent[strategy, overlap, num_microbatches] = (parallel.groups.shard.size, *calls)
    return sent


def test_two_instances_of_two_ranks_sum_exactly_and_reduce_across_instances_once_per_step():
    for sent in run_ranks(4, reduce_in_two_instances, strategy="optim", instances=2):
        for overlap in (False, True):
            for num_microbatches in (1, 3):
                # (size of the shard group, reductions inside the instance, reductions across
                # instances)
                assert sent["no_shard", overlap, num_microbatches] == (1, 0, NUM_BUCKETS)
                assert sent["optim", overlap, num_microbatches] == (2, NUM_BUCKETS, NUM_BUCKETS)
                grads = sent["optim_grads", overlap, num_microbatches]
                assert grads == (2, num_microbatches * NUM_BUCKETS, NUM_BUCKETS)


def started_collectives(ctx) -> dict[tuple[str, int], list[str]]:
    """Groups of the started collectives, in order, with gradients ready in another order on every
    rank.
    """
    started: list[str] = []
    starts = {
        name: getattr(bucket_module, name)
        for name in ("start_reduce_scatter_into", "start_all_reduce")
    }

    def record(name: str, *tensors, group, op):
        started.append(group.name)
        return starts[name](*tensors, group=group, op=op)

    bucket_module.start_reduce_scatter_into = partial(record, "start_reduce_scatter_into")
    bucket_module.start_all_reduce = lambda shard, group, op: record(
        "start_all_reduce", shard, group=group, op=op
    )
    orders = {}
    for strategy in ("optim", "optim_grads"):
        for num_microbatches in (1, 3):
            stage = Toy()
            parallel = wrap(ctx, stage, strategy=strategy, overlap=True)
            order = [(index * (ctx.rank + 1) + ctx.rank) % 7 for index in range(7)]
            started.clear()
            parallel.begin_step()
            for microbatch in range(num_microbatches):
                loss = stage(1.0, [index for index in order if index < len(SHAPES)])
                backward(parallel, loss, is_last=microbatch == num_microbatches - 1)
            parallel.finish_grad_reduce()
            assert_shards(parallel, patterns(stage, ctx.topology.world_size * num_microbatches))
            orders[strategy, num_microbatches] = list(started)
    return orders


def test_collectives_of_both_groups_start_in_one_order_in_any_order_of_gradients():
    orders = run_ranks(4, started_collectives, strategy="optim", instances=2, threads=False)
    assert all(order == orders[0] for order in orders)
    for (strategy, num_microbatches), order in orders[0].items():
        num_scatters = NUM_BUCKETS * (num_microbatches if strategy == "optim_grads" else 1)
        assert [order.count(name) for name in ("dp_shard", "dp_replicate")] == [
            num_scatters,
            NUM_BUCKETS,
        ]
        # the first all-reduce does not wait for the last reduce-scatter
        assert order.index("dp_replicate") == num_scatters - NUM_BUCKETS + MAX_REDUCTIONS
