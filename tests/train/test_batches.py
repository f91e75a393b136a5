"""Global batches: the same token count on every rank, and all ranks stop or fail together."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanotrain.comm.group import Group
from nanotrain.config.config import Config, TrainConfig
from nanotrain.config.model import ModelConfig
from nanotrain.data.batch import Batch
from nanotrain.errors import DataError, EnvironmentFault
from nanotrain.optim.lr import LRSchedule
from nanotrain.train.batches import BatchIterator, BatchOptions, StepSettings
from tests.harness import HANG_S, ranks

CPU = torch.device("cpu")


def microbatch(num_targets: int) -> Batch:
    tokens, mask = torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 8)
    mask[0, :num_targets] = 1.0
    return Batch(tokens, tokens, mask)


def together(ctx, batches, options: BatchOptions | None = None) -> BatchIterator:
    return BatchIterator(
        batches, ctx.group("world"), control=ctx.control, device=CPU, options=options
    )


def on_one_rank(batches, options: BatchOptions | None = None) -> BatchIterator:
    group = Group.single_rank("world")
    return BatchIterator(batches, group, control=group, device=CPU, options=options)


def failing(error: Exception):
    raise error
    yield


@ranks(3, shares=True)
def test_target_tokens_are_counted_over_microbatches_and_ranks(ctx):
    # Given ranks with 1 + 4, 2 + 4 and 3 + 4 targets,
    batch_iterator = together(ctx, iter([[microbatch(ctx.rank + 1), microbatch(4)]]))
    batch = batch_iterator.next()
    # then every rank divides by the same 18 and keeps its own microbatches.
    assert batch.num_target_tokens == 18
    assert [int(part.loss_mask.sum()) for part in batch.microbatches] == [ctx.rank + 1, 4]


def test_ranks_that_read_the_same_sample_count_it_once():
    batch_iterator = on_one_rank(iter([[microbatch(6)]]), BatchOptions(readers_per_sample=2))
    assert batch_iterator.next().num_target_tokens == 3


@ranks(3, shares=True)
def test_one_rank_that_wants_to_stop_stops_all(ctx):
    batch_iterator = together(ctx, iter([[microbatch(1)], [microbatch(1)]]))
    assert batch_iterator.next() is not None
    assert batch_iterator.next(wants_stop=ctx.rank == 2) is None


@ranks(3, shares=True)
def test_one_rank_that_is_asked_to_save_saves_on_all(ctx):
    batch_iterator = together(ctx, iter([[microbatch(1)], [microbatch(1)]]))
    assert [batch_iterator.next(wants_save=ctx.rank == rank).wants_save for rank in (1, None)] == [
        True,
        False,
    ]


@ranks(3, shares=True)
def test_data_that_fails_on_one_rank_is_the_same_error_on_all(ctx):
    for error in (
        DataError("sample 7", why="is broken", fix="mend it"),
        EnvironmentFault("a worker", why="died"),
    ):
        batch_iterator = BatchIterator(
            failing(error) if ctx.rank == 1 else iter([[microbatch(1)]]),
            ctx.group("world"),
            control=ctx.control,
            device=CPU,
        )
        with pytest.raises(type(error)) as caught:
            batch_iterator.next(wants_stop=ctx.rank == 0)
        assert (caught.value.what, caught.value.why, caught.value.fix) == (
            error.what,
            error.why,
            error.fix,
        )


@ranks(2, shares=True)
def test_of_two_failures_all_ranks_raise_the_first(ctx):
    batch_iterator = together(ctx, failing(DataError(f"from rank {ctx.rank}")))
    with pytest.raises(DataError, match="from rank 0"):
        batch_iterator.next()


def test_the_wait_for_data_is_measured():
    def slow():
        time.sleep(0.05)
        yield [microbatch(1)]

    assert 0.05 <= on_one_rank(slow()).next().wait_s < HANG_S


class Source:
    """Microbatches of n, n + 1, ... targets; counts those that were read."""

    def __init__(self, first: int, *, fails_at: int | None = None) -> None:
        self.first, self.num_read, self.fails_at = first, 0, fails_at

    def __iter__(self):
        return self

    def __next__(self) -> list[Batch]:
        if self.num_read == self.fails_at:
            raise DataError("sample 7")
        self.num_read += 1
        return [microbatch(self.first + self.num_read - 1)]


AHEAD = BatchOptions(is_ahead=True)


@ranks(2, shares=True)
def test_a_vote_ahead_counts_the_same_and_takes_effect_one_step_later(ctx):
    source = Source(1 + ctx.rank)
    ahead = together(ctx, source, AHEAD)
    batches = [ahead.next(wants_save=number == 1 and ctx.rank == 1) for number in range(3)]
    assert [batch.num_target_tokens for batch in batches] == [3, 5, 7]
    assert [int(part.loss_mask.sum()) for batch in batches for part in batch.microbatches] == [
        1 + ctx.rank + n for n in range(3)
    ]
    assert source.num_read == 4, "the batch after the returned one is read and voted on"
    assert [batch.wants_save for batch in batches] == [False, False, True], (
        "asked for in the second call"
    )
    assert ahead.next(wants_stop=ctx.rank == 0) is not None and ahead.next() is None

    # Data that fails is an error before its own step; another failure one step later. Both on all
    # ranks.
    ahead = together(ctx, Source(1, fails_at=2 if ctx.rank == 1 else None), AHEAD)
    assert ahead.next() is not None and ahead.next() is not None
    with pytest.raises(DataError, match="sample 7"):
        ahead.next()
    ahead = together(ctx, Source(1), AHEAD)
    first = ahead.next()
    ahead.discard()
    assert (first.num_target_tokens, ahead.next().num_target_tokens) == (2, 6), (
        "the second batch is not used"
    )
    ahead = together(ctx, Source(1), AHEAD)
    own = DataError("a hook broke") if ctx.rank == 0 else None
    assert ahead.next() is not None and ahead.next(failure=own) is not None
    with pytest.raises(DataError, match="a hook broke"):
        ahead.next(failure=own)


@pytest.mark.parametrize(("attention", "hidden"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.1)])
def test_a_step_has_a_seed_where_anything_is_dropped(attention: float, hidden: float):
    model = ModelConfig(attention_dropout=attention, hidden_dropout=hidden)
    config = Config(model=model, train=TrainConfig(seed=7))
    sampler = SimpleNamespace(size_at=lambda consumed: 4, length_at=lambda consumed: None)
    plan: Any = SimpleNamespace(
        config=config, sampler=sampler, hidden_shape_of=lambda length: (1, length, 8)
    )
    schedule = LRSchedule(config.optim, samples_per_step=4, train_samples=8)
    settings = StepSettings.at(0, plan=plan, lr_schedule=schedule)
    assert settings.dropout_seed == (7 if attention or hidden else None)
