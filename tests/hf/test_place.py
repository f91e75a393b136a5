"""Places: a box of a parameter and its pieces in the files' tensors."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.hf.place import Place
from nanotrain.topology.boxes import Box

PLACES = [
    Place("bias", (5,), offset=5, outputs=15),
    Place("plain", (4, 3)),
    Place("transposed", (4, 3), transposed=True, offset=4, outputs=12),
    Place("expert.{expert}.w1", (3, 4, 2)),
    Place("fused", (3, 4, 2), offset=4, outputs=8),
]


@given(place=st.sampled_from(PLACES), data=st.data())
def test_a_box_written_piece_by_piece_reads_back(place: Place, data: st.DataObject) -> None:
    # Given a parameter stored whole, as its place says.
    whole = torch.randn(place.shape)
    stored = {name: torch.full(shape, float("nan")) for name, shape in place.tensor_shapes.items()}
    for piece in place.pieces(Box.full(place.shape)):
        stored[piece.tensor][piece.stored.slices()] = piece.as_stored(whole[piece.box.slices()])
    # When any box of it is read.
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in place.shape]
    box = Box(tuple(start for start, _ in bounds), tuple(stop for _, stop in bounds))
    found = torch.full(box.shape, float("nan"))
    pieces = list(place.pieces(box))
    for piece in pieces:
        part = stored[piece.tensor][piece.stored.slices()]
        found[piece.box.within(box).slices()] = piece.as_parameter(part)
    # Then it is that box, and no tensor but those it lies in was touched.
    assert torch.equal(found, whole[box.slices()])
    assert len(pieces) == (box.shape[0] if "{expert}" in place.tensor else 1)
    assert sum(piece.stored.numel for piece in pieces) == box.numel
