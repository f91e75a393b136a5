"""Workers change time, never values; interrupts do not reach them; a dead one is an error, not a
hang.
"""

import errno
import multiprocessing.synchronize
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from nanotrain.config.schedules import read_steps
from nanotrain.data.batch import Batch, Sample, split_sequences
from nanotrain.data.blend import BlendedDataset
from nanotrain.data.gpt import SyntheticDataset
from nanotrain.data.loader import GlobalBatchLoader
from nanotrain.data.sampler import SamplerConfig
from nanotrain.errors import DataError, EnvironmentFault, LocalFault
from tests.harness import HANG_S

SAMPLES = SyntheticDataset(vocab_size=1000, seq_length=8, seed=1)
SAMPLER = SamplerConfig(dp_rank=1, dp_size=2, micro_batch_size=2, global_batch_size=12)


@dataclass(frozen=True)
class _BrokenFrom:
    number: int
    samples_per_epoch: int = 100

    def __getitem__(self, sample_number: int) -> Sample:
        if sample_number >= self.number:
            raise DataError("sample is broken", why="it is made so", fix="leave it out")
        return SAMPLES[sample_number]


def _worker_ids(batches: GlobalBatchLoader) -> list[int]:
    return [worker.pid for worker in batches._microbatches._workers]


def _alive(pid: int) -> bool:
    """Whether a process runs; one that ended may stay in the table if the first process of a
    container reaps none.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _wait_for_end(workers: list[int]) -> bool:
    deadline = time.monotonic() + HANG_S
    while any(map(_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(_alive, workers))


def test_a_global_batch_is_this_ranks_microbatches_in_order() -> None:
    with GlobalBatchLoader(SAMPLES, sampler=SAMPLER, consumed_samples=24) as batches:
        step = next(batches)
    assert [batch.tokens.shape for batch in step] == [(2, 8)] * 3
    for batch, first in zip(step, (26, 30, 34), strict=True):
        assert torch.equal(batch.tokens[0], torch.from_numpy(SAMPLES[first].tokens))
        assert torch.equal(batch.tokens[1], torch.from_numpy(SAMPLES[first + 1].tokens))


def test_padding_has_no_target_tokens_and_says_that_it_is_padding() -> None:
    sampler = SamplerConfig(dp_rank=1, dp_size=2, micro_batch_size=2, global_batch_size=6)
    with GlobalBatchLoader(SAMPLES, sampler=sampler, consumed_samples=6) as batches:
        microbatches = next(batches)
    assert [batch.is_padding for batch in microbatches] == [False, True]
    assert [batch.to("cpu").is_padding for batch in microbatches] == [False, True]
    assert [bool(batch.num_target_tokens) for batch in microbatches] == [True, False]
    ids = [batch.sample_ids.tolist() for batch in microbatches if batch.sample_ids is not None]
    assert ids == [[8, 9], [6, 6]], "padding has the dropout of the sample that it repeats"


def test_skipped_samples_move_samples_padding_and_their_corpora_alike() -> None:
    blend = BlendedDataset.by_weight(
        [SAMPLES, SyntheticDataset(1000, 8, seed=2)], [Fraction(2), Fraction(1)]
    )
    sampler = SamplerConfig(dp_rank=0, dp_size=1, micro_batch_size=2, global_batch_size=3)
    with GlobalBatchLoader(
        blend, sampler=sampler, consumed_samples=6, skipped_samples=5
    ) as batches:
        microbatches = next(batches)
    # the last one is padding
    for batch, places in zip(microbatches, ((11, 12), (13, 11)), strict=True):
        assert batch.tokens.tolist() == [blend[place].tokens.tolist() for place in places]
        assert batch.source_ids.tolist() == [blend.locate(place)[0] for place in places]
    assert [batch.is_padding for batch in microbatches] == [False, False], (
        "one of the last two samples is none"
    )
    assert microbatches[1].loss_mask.sum(1).tolist() == [8, 0]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_workers_give_the_same_batches_and_end_when_closed(num_workers: int) -> None:
    with (
        GlobalBatchLoader(SAMPLES, sampler=SAMPLER, consumed_samples=12) as inline,
        GlobalBatchLoader(
            SAMPLES, sampler=SAMPLER, consumed_samples=12, num_workers=num_workers
        ) as batches,
    ):
        workers = _worker_ids(batches)
        assert len(workers) == num_workers
        for _ in range(4):
            for expected, loaded in zip(next(inline), next(batches), strict=True):
                assert torch.equal(loaded.tokens, expected.tokens)
                assert torch.equal(loaded.labels, expected.labels)
    assert _wait_for_end(workers)
    batches.close()


def test_a_rank_that_needs_no_tokens_reads_none_and_starts_no_workers() -> None:
    sampler = replace(SAMPLER, unread_length=8)
    with GlobalBatchLoader(
        _BrokenFrom(0), sampler=sampler, consumed_samples=12, num_workers=2
    ) as batches:
        unread = next(batches)
    with GlobalBatchLoader(SAMPLES, sampler=SAMPLER, consumed_samples=12) as batches:
        for batch, read in zip(unread, next(batches), strict=True):
            assert batch.tokens.shape == read.tokens.shape and not batch.num_target_tokens
            assert (
                torch.equal(batch.sample_ids, read.sample_ids)
                and batch.is_padding == read.is_padding
            )


def test_interrupts_leave_workers_at_work_and_their_parent_unmasked() -> None:
    with GlobalBatchLoader(SAMPLES, sampler=SAMPLER, num_workers=1) as batches:
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGINT, signal.SIGTERM}
        # the fork server of these tests was started elsewhere, so the mask stands once a worker
        # works
        next(batches)
        for worker in _worker_ids(batches):
            os.kill(worker, signal.SIGTERM)
            os.kill(worker, signal.SIGINT)
            os.kill(worker, signal.SIGHUP)
        for _ in range(20):  # more than was loaded ahead
            next(batches)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_error_arrives_as_it_was_raised(num_workers: int) -> None:
    with GlobalBatchLoader(_BrokenFrom(12), sampler=SAMPLER, num_workers=num_workers) as batches:
        next(batches)
        with pytest.raises(DataError) as caught:
            next(batches)
    assert str(caught.value) == "sample is broken: it is made so; leave it out"


KILLED = """
import os, signal, sys
from nanotrain.data.loader import GlobalBatchLoader
from nanotrain.data.sampler import SamplerConfig
from nanotrain.data.gpt import SyntheticDataset

if __name__ == "__main__":
    batches = GlobalBatchLoader(SyntheticDataset(10, 8, 1), sampler=SamplerConfig(0, 1, 1, 2), num_workers=2)
    next(batches)
    print(*[worker.pid for worker in batches._microbatches._workers], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_do_not_outlive_a_killed_trainer(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    done = subprocess.run(
        [sys.executable, tmp_path / "killed.py"],
        stdout=subprocess.PIPE,
        timeout=HANG_S,
        check=False,
    )
    workers = [int(word) for word in done.stdout.split()]
    assert len(workers) == 2
    assert _wait_for_end(workers)


# no half-made iterator prints one
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_workers_without_shared_memory_are_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "__init__", refuse)
    with pytest.raises(
        LocalFault,
        match="2 data workers could not be started: No space left on device; .*--shm-size",
    ):
        GlobalBatchLoader(SAMPLES, sampler=SAMPLER, num_workers=2)


def test_a_killed_worker_is_one_clear_error() -> None:
    with GlobalBatchLoader(SAMPLES, sampler=SAMPLER, num_workers=1) as batches:
        next(batches)
        os.kill(_worker_ids(batches)[0], signal.SIGKILL)
        with pytest.raises(
            EnvironmentFault, match="data worker process died.*: SIGKILL ended it.*--num-workers 0"
        ):
            for _ in range(100):
                next(batches)


class _WithoutSharedMemory(SyntheticDataset):
    """Its files in shared memory may not grow, as in a full /dev/shm."""

    def __getitem__(self, index: int):
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, resource.RLIM_INFINITY))
        return super().__getitem__(index)


def test_full_shared_memory_is_one_error_not_a_hang() -> None:
    with (
        GlobalBatchLoader(
            _WithoutSharedMemory(10, 8, 1), sampler=SAMPLER, num_workers=1
        ) as batches,
        pytest.raises(
            EnvironmentFault,
            match="no shared memory for a batch: .* bytes free in .*--num-workers 0",
        ),
    ):
        next(batches)


class Places:
    """Token i of the data is i; each sample has the eight after those of the one before."""

    samples_per_epoch = 1000

    def __getitem__(self, index: int) -> Sample:
        stream = np.arange(8 * index, 8 * index + 9)
        return Sample(stream[:-1], stream[1:], loss_mask=np.ones(8, dtype=np.float32))


def test_all_ranks_together_read_every_token_once_through_a_change_of_length() -> None:
    lengths = read_steps(["0:2", "90:4", "140:8"], seq_length=8)
    tokens, shapes = [], []
    for rank in range(2):
        sampler = SamplerConfig(rank, 2, micro_batch_size=1, global_batch_size=6, lengths=lengths)
        loader = GlobalBatchLoader(Places(), sampler=sampler)
        for microbatches in (next(loader) for _ in range(4)):
            for batch in microbatches:
                assert torch.equal(batch.labels, batch.tokens + 1), (
                    "a sequence ends with the first token of the next"
                )
                tokens += batch.tokens.flatten().tolist()
            shapes.append(tuple(microbatches[0].tokens.shape))
    assert sorted(tokens) == [*range(4 * 6 * 8)]
    assert shapes == 2 * [(4, 2), (4, 2), (2, 4), (1, 8)]


def test_positions_restart_with_a_sequence_and_with_a_document() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0], [0, 0, 1, 2, 3, 4, 0, 1]])
    segments = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1, 2, 2]], dtype=torch.int32)
    numbers = torch.arange(16).reshape(2, 8)
    batch = Batch(
        numbers, numbers, numbers.float(), positions.clone(), segments, torch.tensor([3, ~3])
    )
    split = split_sequences(batch, 4)
    assert (
        split.position_ids is not None
        and split.segment_ids is not None
        and split.sample_ids is not None
    )
    assert split.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 0], [0, 0, 1, 2], [0, 1, 0, 1]]
    assert split.segment_ids.tolist() == [[0, 0, 0, 0], [1, 1, 1, 2], [0, 1, 1, 1], [1, 1, 2, 2]]
    assert len(set(split.sample_ids.tolist())) == 4, "each sequence has dropout of its own"
    assert split.sample_ids[[0, 2]].tolist() == [3, ~3]


def test_the_corpus_of_a_sample_is_that_of_its_sequences() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    batch = Batch(tokens, tokens, tokens.float(), source_ids=torch.tensor([5, 7]))
    split = split_sequences(batch, 2)
    assert split.source_ids is not None and split.source_ids.tolist() == [5, 5, 5, 5, 7, 7, 7, 7]
    assert split_sequences(batch, 8) is split_sequences(batch, None) is batch
