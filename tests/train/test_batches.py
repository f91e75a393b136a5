"""Global batches: the same token count on every rank, and all ranks stop or fail together."""

import time

import pytest
import torch

from nanotrain.comm.group import Group
from nanotrain.data.batch import Batch
from nanotrain.errors import DataError, EnvironmentFault
from nanotrain.train.batches import BatchIterator
from tests.harness import ranks

CPU = torch.device("cpu")


def microbatch(num_targets: int) -> Batch:
    tokens, mask = torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 8)
    mask[0, :num_targets] = 1.0
    return Batch(tokens, tokens, mask)


def failing(error: Exception):
    raise error
    yield


@ranks(3)
def test_target_tokens_are_counted_over_microbatches_and_ranks(ctx):
    # Given ranks with 1 + 4, 2 + 4 and 3 + 4 targets,
    batch_iterator = BatchIterator(iter([[microbatch(ctx.rank + 1), microbatch(4)]]), ctx.control, device=CPU)
    batch = batch_iterator.next()
    # then every rank divides by the same 18 and keeps its own microbatches.
    assert batch.num_target_tokens == 18
    assert [int(part.loss_mask.sum()) for part in batch.microbatches] == [ctx.rank + 1, 4]


def test_ranks_that_read_the_same_sample_count_it_once():
    batch_iterator = BatchIterator(
        iter([[microbatch(6)]]), Group.single_rank("world"), device=CPU, readers_per_sample=2
    )
    assert batch_iterator.next().num_target_tokens == 3


@ranks(3)
def test_one_rank_that_wants_to_stop_stops_all(ctx):
    batch_iterator = BatchIterator(iter([[microbatch(1)], [microbatch(1)]]), ctx.control, device=CPU)
    assert batch_iterator.next() is not None
    assert batch_iterator.next(wants_stop=ctx.rank == 2) is None


@ranks(3)
def test_one_rank_that_is_asked_to_save_saves_on_all(ctx):
    batch_iterator = BatchIterator(iter([[microbatch(1)], [microbatch(1)]]), ctx.control, device=CPU)
    assert [batch_iterator.next(wants_save=ctx.rank == rank).wants_save for rank in (1, None)] == [True, False]


@ranks(3, timeout_s=20)
def test_data_that_fails_on_one_rank_is_the_same_error_on_all(ctx):
    for error in (DataError("sample 7", why="is broken", fix="mend it"), EnvironmentFault("a worker", why="died")):
        batch_iterator = BatchIterator(
            failing(error) if ctx.rank == 1 else iter([[microbatch(1)]]), ctx.control, device=CPU
        )
        with pytest.raises(type(error)) as caught:
            batch_iterator.next(wants_stop=ctx.rank == 0)
        assert (caught.value.what, caught.value.why, caught.value.fix) == (error.what, error.why, error.fix)


@ranks(2)
def test_of_two_failures_all_ranks_raise_the_first(ctx):
    batch_iterator = BatchIterator(failing(DataError(f"from rank {ctx.rank}")), ctx.control, device=CPU)
    with pytest.raises(DataError, match="from rank 0"):
        batch_iterator.next()


def test_the_wait_for_data_is_measured():
    def slow():
        time.sleep(0.05)
        yield [microbatch(1)]

    assert 0.05 <= BatchIterator(slow(), Group.single_rank("world"), device=CPU).next().wait_s < 5
