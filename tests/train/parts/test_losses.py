"""Losses by corpus are those of its samples by hand, in every layout, over the steps between two
logged ones.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import DataConfig
from nanotrain.data.batch import Batch, collate
from nanotrain.data.blend import BlendedDataset
from nanotrain.data.build import build_data, source_names
from nanotrain.model.context import BatchContext
from nanotrain.parallel.tp import loss
from nanotrain.prepare.token_writer import TokenWriter
from nanotrain.train.parts.losses import SourceLosses
from nanotrain.train.run import Run
from nanotrain.train.step import train_step
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.worlds import GLOBAL_BATCH, Case, UnevenDataset, build_here

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2, "sequence_parallel": True}),
    (2, {"cp": 2, "strategy": "optim"}),
    (2, {"pp": 2, "strategy": "optim_grads"}),
    # the first rank of a V has the last stage too
    (2, {"pp": 2, "vpp": 2, "schedule": "zb-v"}),
    (2, {"pp": 2, "vpp": 2, "schedule": "interleaved"}),
]


@dataclass(frozen=True)
class From(UnevenDataset):
    """Samples from a number on."""

    first: int = 0

    def __getitem__(self, sample_number: int) -> Any:
        return super().__getitem__(self.first + sample_number)


DATA = BlendedDataset.by_weight([From(first=0), From(first=500)], [Fraction(2), Fraction(1)])


def read_blend(ctx: ParallelContext, run: Run) -> None:
    """Let a run read the blend, with several chunks of the loss per microbatch on all ranks of this
    process.
    """
    loss.CHUNK_ELEMENTS["cpu"], loss.MIN_CHUNK_TOKENS = 1, 10
    run.batches.dataset = DATA
    run.batches.restart(consumed_samples=0, skipped_samples=0)
    run.parts.by_name["source_losses"] = SourceLosses(replace(run, dataset=DATA))


def losses_of(ctx: ParallelContext, case: Case) -> list[dict[str, float] | None]:
    """What two steps report, of which the second is logged, and on one rank the first losses by
    hand.
    """
    run = build_here(ctx, case)
    read_blend(ctx, run)
    losses: list[dict[str, float] | None] = []
    sums = np.zeros((2, 2))
    for step in range(2):
        if ctx.topology.world_size == 1:
            sums += by_hand(run.stages[0], range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH))
        batch = run.batch_iterator.next()
        assert batch is not None
        losses.append(train_step(run, batch, is_logged=step == 1).metrics.get("source_losses"))
    if ctx.topology.world_size == 1:
        losses.append(dict(zip(source_names(DATA), sums[0] / sums[1], strict=True)))
    return losses


def by_hand(stage: Any, samples: range) -> np.ndarray:
    """[2, 2] summed losses and target tokens by corpus, one sample at a time."""
    sums = np.zeros((2, 2))
    for index in samples:
        batch: Batch = collate([DATA[index]])
        with torch.no_grad():
            sums[:, DATA.locate(index)[0]] += (
                float(stage(None, BatchContext(batch))),
                float(batch.loss_mask.sum()),
            )
    return sums


def test_every_layout_has_the_losses_by_hand() -> None:
    four_layers = {"num_layers": 4}
    one_rank = Case(2).but(train={"micro_batch_size": 4}, model=four_layers)
    ((unlogged, single, expected),) = run_ranks(1, losses_of, one_rank, threads=True)
    assert unlogged is None and single == pytest.approx(expected, rel=1e-5)
    assert single["0"] != pytest.approx(single["1"], rel=1e-4)
    for num_ranks, sizes in LAYOUTS:
        parallel = {SHORT_NAMES.get(name, name): value for name, value in sizes.items()}
        axes = {name: value for name, value in sizes.items() if name != "sequence_parallel"}
        train = {"micro_batch_size": 2 if "vpp" in sizes else 3}
        case = Case(2).but(train=train, parallel=parallel, model=four_layers)
        for reported in run_ranks(num_ranks, losses_of, case, threads=True, **axes):
            assert reported[1] == pytest.approx(single, rel=1e-5), sizes


def test_names_are_the_ends_of_paths_that_differ(tmp_path) -> None:
    paths = [
        tmp_path / folder / name for folder, name in (("a", "web"), ("b", "web"), ("b", "code"))
    ]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        with TokenWriter(path, np.dtype("uint16")) as writer:
            writer.add_documents([np.arange(200)])

    def names(*chosen: Any) -> tuple[str, ...]:
        data = DataConfig(data_path=list(map(str, chosen)), split="1", seq_length=8)
        train = build_data(data, vocab_size=300, seed=1, required=["train"]).train
        assert train is not None
        return source_names(train)

    assert names(*paths) == ("a/web", "b/web", "b/code") and names(paths[0], paths[2]) == (
        "web",
        "code",
    )
    assert names(paths[0]) == ()
