"""Exposed transfers of products in pieces: simulated streams beside the planner's formula."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.tp_overlap import (
    Pieces,
    both,
    exposed_gather_s,
    exposed_scatter_s,
    exposed_share,
)
from nanotrain.planner.parts import Part, Streams


@given(st.integers(2, 8), st.floats(0.1, 9.0), st.floats(0.1, 9.0))
def test_the_planner_exposes_what_two_streams_do(
    num_pieces: int, product_s: float, transfer_s: float
) -> None:
    part = Part("x", product_s, group="tp", before=transfer_s, hides="tiles", pieces=num_pieces)
    streams = Streams()
    part.run_forward(streams)
    planned = streams.exposed["tp"]
    pieces = Pieces(num_pieces, product_s, transfer_s)
    for simulated in (exposed_gather_s(pieces), exposed_scatter_s(pieces)):
        # the last piece of a sum, and the first that is received, may be exposed on their own
        assert planned - 1e-9 <= simulated <= planned + transfer_s / (num_pieces - 1) + 1e-9


def test_a_piece_that_takes_less_than_its_product_is_hidden() -> None:
    assert exposed_gather_s(Pieces(4, 8.0, 3.0)) == 0.0
    assert exposed_scatter_s(Pieces(4, 8.0, 3.0)) == 0.0
    assert exposed_gather_s(Pieces(4, 4.0, 9.0)) == pytest.approx(9.0 - 3.0)
    assert exposed_scatter_s(Pieces(4, 4.0, 9.0)) == pytest.approx(1.0 + 9.0 - 4.0)


def test_llama70b_on_512_exposes_at_most_four_percent_and_gives_1180_tokens_per_second() -> None:
    before, after = both("llama70b_512", 512, "h100")
    assert exposed_share(after) <= 0.04 < exposed_share(before)
    assert after.time.tokens_per_s_per_gpu >= 1180 > before.time.tokens_per_s_per_gpu
