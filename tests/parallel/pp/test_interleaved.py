"""The order of interleaved 1F1B, and counts of microbatches that are no multiple of the ranks."""

from hypothesis import given
from hypothesis import strategies as st

from nanotrain.parallel.pp.actions import ActionKind, PipelineShape
from nanotrain.parallel.pp.interleaved import alternate, backwards_of, forwards_of, interleaved, num_warmup

shapes = st.builds(PipelineShape, st.integers(1, 6), st.integers(2, 4), st.integers(1, 13))


@given(shapes)
def test_after_the_warmup_forwards_and_backwards_alternate(shape: PipelineShape) -> None:
    if shape.num_microbatches % shape.num_ranks:
        return
    for rank, actions in enumerate(interleaved(shape).actions):
        warmup = min(num_warmup(shape, rank), len(actions) // 2)
        kinds = [action.kind for action in actions]
        assert kinds[:warmup] == [ActionKind.forward] * warmup
        steady = kinds[warmup : len(kinds) - warmup]
        assert steady == [ActionKind.forward, ActionKind.full_backward] * (len(steady) // 2)


@given(shapes)
def test_extra_microbatches_are_left_out_of_the_next_multiple(shape: PipelineShape) -> None:
    multiple = -(-shape.num_microbatches // shape.num_ranks) * shape.num_ranks
    full = interleaved(PipelineShape(shape.num_ranks, shape.num_stages_per_rank, multiple))
    kept = tuple(tuple(a for a in actions if a.microbatch < shape.num_microbatches) for actions in full.actions)
    assert interleaved(shape).actions == kept


@given(shapes, st.data())
def test_a_rank_runs_rounds_of_microbatches_through_its_stages(shape: PipelineShape, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, shape.num_ranks - 1))
    forwards, backwards = forwards_of(shape, rank), backwards_of(shape, rank)
    stages = [action.stage for action in forwards[:: min(shape.num_ranks, shape.num_microbatches)]]
    assert stages[: shape.num_stages_per_rank] == list(shape.stages_of(rank))
    assert {(a.stage, a.microbatch) for a in forwards} == {(a.stage, a.microbatch) for a in backwards}


def test_a_warmup_longer_than_the_forwards_runs_them_all_first() -> None:
    shape = PipelineShape(1, 1, 2)
    actions = alternate(forwards_of(shape, 0), backwards_of(shape, 0), warmup=5)
    assert " ".join(map(str, actions)) == "F0.0 F0.1 B0.0 B0.1"
