"""The clock of parts: what computes, and what waits."""

from nanotrain.planner.parts import Part, Streams


def test_collectives_hide_behind_products_as_far_as_the_engine_overlaps() -> None:
    part = Part("x", 4.0, 4.0, 2.0, group="tp", before=1.0, again=1.0, last=3.0, pieces=4)
    for hides, forward, backward in (("none", 1.0, 4.0), ("wgrad", 1.0, 1.0), ("tiles", 0.0, 0.0)):
        streams, again = Streams(), Streams()
        moved = Part(**{**part.__dict__, "hides": hides})
        moved.run_forward(streams)
        moved.run_backward(again)
        assert (streams.exposed["tp"], again.exposed["tp"]) == (forward, backward)
        assert (streams.compute, again.compute) == (4.0, 6.0)
