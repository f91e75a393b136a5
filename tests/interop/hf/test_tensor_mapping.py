"""Slices of tensors: a parameter written slice by slice reads back, whichever box is read."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.interop.hf.tensor_mapping import TensorMapping
from nanotrain.spec.boxes import Box

MAPPINGS = [
    TensorMapping("bias", (5,), offset=5, num_outputs=15),
    TensorMapping("matrix", (4, 3)),
    TensorMapping("transposed", (4, 3), transposed=True, offset=4, num_outputs=12),
    TensorMapping("reordered", (6, 3), rows=(0, 1, 2, 4, 3, 5)),
    TensorMapping("expert.{expert}.w1", (3, 4, 2)),
    TensorMapping("fused", (3, 4, 2), offset=4, num_outputs=9),
]


@given(mapping=st.sampled_from(MAPPINGS), data=st.data())
def test_a_box_written_slice_by_slice_reads_back(
    mapping: TensorMapping, data: st.DataObject
) -> None:
    # Given a stored parameter,
    parameter = torch.randn(mapping.shape)
    stored = {
        name: torch.full(shape, float("nan")) for name, shape in mapping.tensor_shapes.items()
    }
    for part in mapping.slices(Box.full(mapping.shape)):
        stored[part.tensor][part.stored.slices()] = part.as_stored(parameter[part.box.slices()])
    # when any box of it is read,
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in mapping.shape]
    box = Box(tuple(start for start, _ in bounds), tuple(stop for _, stop in bounds))
    actual = torch.full(box.shape, float("nan"))
    parts = list(mapping.slices(box))
    for part in parts:
        values = stored[part.tensor][part.stored.slices()]
        actual[part.box.within(box).slices()] = part.as_parameter(values)
    # then it is that box, and no other tensor was read.
    assert torch.equal(actual, parameter[box.slices()])
    if mapping.rows is None:
        assert len(parts) == (box.shape[0] if "{expert}" in mapping.tensor else 1)
    assert sum(part.stored.numel for part in parts) == box.numel
