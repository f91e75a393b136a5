"""The recorder finds races by storage and bytes, and counts the storages of the meta device."""

import pytest
import torch

from nanotrain.comm.recorder import Race, Recorder


def test_storages_are_counted_in_blocks_until_they_are_freed() -> None:
    with Recorder() as recorder:
        first = torch.empty(100, device="meta")
        view, copy = first[10:], first.clone()
        assert recorder.allocated == recorder.peak == 2 * 512
        del first
        assert recorder.allocated == 1024, "a view keeps the storage"
        del view, copy
        assert (recorder.allocated, recorder.peak) == (0, 1024)


def test_a_resized_storage_has_its_new_size() -> None:
    with Recorder() as recorder:
        tensor = torch.empty(1000, device="meta")
        tensor.untyped_storage().resize_(0)
        assert recorder.allocated == 0
        tensor.untyped_storage().resize_(4000)
        assert recorder.allocated == 4096


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + 1,
        lambda x: x.mul_(2),
        lambda x: x[:, 1].sum(),
        lambda x: x.untyped_storage().resize_(0),
    ],
)
def test_an_output_in_flight_is_not_used(use: object) -> None:
    with Recorder() as recorder:
        buffer = torch.empty(8, 8, device="meta")
        flight = recorder.start("all_gather", outputs=[buffer[2:4]])
        with pytest.raises(Race, match="all_gather started at the test"):
            use(buffer)  # type: ignore[operator]
            recorder.complete(flight)


def test_other_bytes_of_the_storage_may_be_used() -> None:
    with Recorder() as recorder:
        buffer = torch.empty(8, 8, device="meta")
        flight = recorder.start("reduce_scatter", inputs=[buffer[2:4]], outputs=[buffer[2]])
        assert buffer[:2].sum().is_meta and buffer[4:].mul_(2).is_meta
        recorder.complete(flight)
        assert buffer.sum().is_meta and recorder.num_operators == 2
        recorder.finish()


def test_a_wait_that_never_came_is_found() -> None:
    with Recorder() as recorder:
        kept = torch.empty(8, device="meta")
        recorder.start("send", inputs=[kept])
        with pytest.raises(Race, match="never waited for: send"):
            recorder.finish()


def test_a_buffer_freed_in_flight_is_found() -> None:
    with Recorder() as recorder:
        flight = recorder.start("send", inputs=[torch.empty(8, device="meta")])
        with pytest.raises(Race, match="freed or resized"):
            recorder.complete(flight)


def test_known_shapes_give_the_same_results() -> None:
    x, out = (
        torch.empty(4, 6, device="meta", dtype=torch.bfloat16),
        torch.empty(4, 4, device="meta"),
    )
    shapes: dict[object, object] = {}
    for _ in range(2):
        with Recorder(shapes) as recorder:
            assert (x * 2.0).dtype is torch.bfloat16 and (x.float() + x).dtype is torch.float32
            assert x.mul_(2) is x
            assert torch.mm(x, x.t(), out_dtype=torch.float32, out=out) is out
            values, indices = x.topk(2)
            assert values.shape == indices.shape == (4, 2) and indices.dtype is torch.int64
            assert x.t().contiguous().stride() == (4, 1)
            assert torch.empty(0, device="meta").set_(x.untyped_storage()).numel() == 24 * 2 // 4
            assert recorder.calls == []
    assert shapes
