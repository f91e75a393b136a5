"""Classes of ranks that run the same program."""

from nanotrain.dry_run.rank_classes import RankClasses
from nanotrain.topology.topology import Topology
from tests.dry_run.test_agreement import config_of


def classes_of(flags: str, world_size: int) -> RankClasses:
    config = config_of(f"--global-batch-size {world_size} {flags}")
    return RankClasses(config, Topology.of(config.parallel, world_size))


def test_a_class_is_a_stage_a_context_parallel_rank_and_a_share_of_the_vocabulary() -> None:
    flags = (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2"
    )
    whole = classes_of(f"{flags} --vocab-size 2048", 32)
    assert len(whole.bounds) == 2 * 2
    padded = classes_of(f"{flags} --vocab-size 2000", 32)
    assert len(padded.bounds) == 2 * 2 * 2, "the last tp rank has fewer rows"
    for classes in (whole, padded):
        topology = classes.topology
        for rank in range(32):
            other = classes.stand_in(rank)
            ours, theirs = topology.coords(rank), topology.coords(other)
            assert (ours["pp"], ours["cp"]) == (theirs["pp"], theirs["cp"])
            assert other in {each for bounds in classes.bounds.values() for each in bounds}
            assert classes.stand_in(other) == other
    assert [classes_of("--vocab-size 2048", 8).stand_in(rank) for rank in range(8)] == [*range(8)]


def test_of_many_context_parallel_ranks_three_are_run() -> None:
    assert len(classes_of("--context-parallel-size 8 --vocab-size 2048", 8).bounds) == 8
    assert len(classes_of("--context-parallel-size 16 --vocab-size 2048", 16).bounds) == 3
