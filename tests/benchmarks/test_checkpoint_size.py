"""Planned metadata is that of a real save, and the table in docs/checkpoint.md is computed."""

from pathlib import Path

import pytest

from benchmarks import checkpoint_size as sizes
from nanotrain.checkpoint.write import plan_writes
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.load import load
from nanotrain.plan.plan import plan_run
from tests.harness import run_ranks
from tests.train.small_run import small_run

PAGE = Path(__file__).parents[2] / "docs" / "checkpoint.md"


def saved_and_planned(ctx: ParallelContext, folder: Path, flags: str) -> tuple[int, int]:
    """The chunks that this rank would write, equal to the planned ones, and those planned for all
    ranks.
    """
    with small_run(folder / str(ctx.rank), *flags.split(), context=ctx) as run:
        written = plan_writes(run.optimizer.tensors_to_save())
        planned = sizes.planned_shard(plan_run(run.config, ctx.topology.world_size, rank=ctx.rank))
        entries = {
            (name, chunk.box, entry.dtype, chunk.key, chunk.nbytes)
            for name, entry in planned.tensors.items()
            for chunk in entry.chunks
        }
        assert entries == {
            (one.source.name, one.box, one.dtype, one.key, one.nbytes) for one in written
        }
        assert (
            len({bucket.stop for buffer in run.plan.buffers for bucket in buffer.layout.buckets})
            > 1
        )
        return len(entries), sizes.metadata_size(run.config, ctx.topology.world_size).num_chunks


@pytest.mark.parametrize(
    "flags", ["no_shard --bf16 --ema-decay 0.9", "optim_grads --exp-avg-dtype fp16"]
)
def test_every_rank_saves_the_planned_chunks(tmp_path: Path, flags: str) -> None:
    flags = f"--tensor-model-parallel-size 2 --data-parallel-sharding-strategy {flags}"
    if "exp-avg" in flags:
        flags += " --use-precision-aware-optimizer"
    counts = run_ranks(4, saved_and_planned, tmp_path, flags, tp=2, strategy=flags.split()[3])
    assert {planned for _, planned in counts} == {sum(saved for saved, _ in counts)}


def test_one_rank_sends_nothing() -> None:
    size = sizes.metadata_size(load(["+config=llama1b"], to_train=False).config, 1)
    assert (size.received_at_save, size.received_at_load) == ((0, 0), 0)


@pytest.mark.parametrize("recipe", list(sizes.RUNS))
@pytest.mark.parametrize("num_ranks", [1024, 16384])
def test_the_table_of_the_page_is_computed(recipe: str, num_ranks: int) -> None:
    config = load([f"+config={recipe}", *sizes.RUNS[recipe].split()], to_train=False).config
    row = f"| {recipe} | {sizes.row(sizes.metadata_size(config, num_ranks), num_ranks)}"
    assert f"| model | {sizes.HEADER} |" in PAGE.read_text()
    assert row in PAGE.read_text(), row
