"""The clock of parts: what computes, and what waits."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.planner.parts import Part, Streams

SECONDS = st.floats(0.0, 10.0)


def test_collectives_hide_behind_products_as_far_as_the_engine_overlaps() -> None:
    part = Part("x", 4.0, 4.0, 2.0, group="tp", before=1.0, again=1.0, last=3.0, pieces=4)
    for hides, forward, backward in (("none", 1.0, 4.0), ("wgrad", 1.0, 1.0), ("tiles", 0.0, 0.0)):
        streams, again = Streams(), Streams()
        moved = Part(**{**part.__dict__, "hides": hides})
        moved.run_forward(streams)
        moved.run_backward(again)
        assert (streams.exposed["tp"], again.exposed["tp"]) == (forward, backward)
        assert (streams.compute, again.compute) == (4.0, 6.0)


@given(
    transfer=SECONDS,
    compute=SECONDS,
    contention=st.floats(0.0, 1.0),
    factor=st.floats(0.5, 2.0),
)
def test_a_transfer_is_exposed_by_what_operators_do_not_hide(
    transfer: float, compute: float, contention: float, factor: float
) -> None:
    streams = Streams(contention=contention, factor=factor)
    streams.wait("dp", transfer, overlapped_s=compute)
    exposed = streams.exposed["dp"]
    hidden = min(transfer, factor * compute)
    assert exposed == pytest.approx(transfer - hidden + contention * hidden)
    assert 0 <= exposed <= transfer + 1e-12
    plain = Streams(contention=contention, factor=factor)
    plain.wait("dp", transfer)
    assert plain.exposed["dp"] == transfer, "nothing runs beside it"
    assert streams.collectives == plain.collectives == int(transfer > 0)


def test_tiles_of_the_forward_hide_nothing_of_the_first_wait_of_the_backward() -> None:
    part = Part("x", 4.0, 8.0, 2.0, group="tp", before=9.0, first=9.0, pieces=4)
    part = replace(part, hides="forward tiles")
    forward, backward = Streams(), Streams()
    part.run_forward(forward)
    part.run_backward(backward)
    assert forward.exposed["tp"] == pytest.approx(9.0 - 3.0)
    assert backward.exposed["tp"] == pytest.approx(9.0)


@pytest.mark.parametrize("pieces", [1, 2, 8])
def test_tiles_hide_all_but_one_piece(pieces: int) -> None:
    part = Part("x", 4.0, 8.0, 2.0, group="tp", before=9.0, last=9.0, hides="tiles", pieces=pieces)
    forward, backward = Streams(), Streams()
    part.run_forward(forward)
    part.run_backward(backward)
    assert forward.exposed["tp"] == pytest.approx(9.0 - 4.0 * (1 - 1 / pieces))
    hidden = max(8.0 * (1 - 1 / pieces), 2.0)  # by the own product, or by that of the weights
    assert backward.exposed["tp"] == pytest.approx(9.0 - hidden)
