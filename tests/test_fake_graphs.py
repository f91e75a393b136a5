"""The stand-in for CUDA graphs refuses what CUDA refuses, and shows what a replay leaves out."""

import pytest
import torch

from tests.fake_graphs import CaptureError, FakeGraphPool


def test_a_replay_computes_again_from_the_same_memory():
    x, total, calls = torch.ones(3), torch.zeros(3), []
    with FakeGraphPool().capture() as graph:
        calls.append("captured")
        doubled = x * 2
        total += doubled
    assert total.tolist() == [0, 0, 0] and doubled.isnan().all(), "a capture computes nothing"
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert doubled.tolist() == [2 * value] * 3
    assert total.tolist() == [12.0] * 3 and calls == ["captured"]


def test_temporaries_have_other_memory_in_every_replay():
    x = torch.ones(3)
    with FakeGraphPool().capture() as graph:
        out = (x + 1) * (x + 2)
    graph.replay()
    assert out.tolist() == [6.0] * 3
    assert graph.static_bytes == out.nbytes, "sums are temporaries"


def test_memory_that_was_freed_is_not_read():
    x = torch.ones(3)
    with FakeGraphPool().capture() as graph:
        out = x + 1
    graph.replay()
    assert out.tolist() == [2.0] * 3
    del x
    with pytest.raises(CaptureError, match="freed"):
        graph.replay()


def test_what_one_graph_frees_another_does_not_read():
    pool, x = FakeGraphPool(), torch.ones(3)
    with pool.capture():
        doubled = x * 2
    with pool.capture() as second:
        out = doubled + 1
    second.replay()
    del doubled
    with pytest.raises(CaptureError, match="freed"):
        second.replay()
    assert out.isnan().all()


@pytest.mark.parametrize(
    "read", [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: torch.tensor([1.0])]
)
def test_the_host_does_not_wait_in_a_capture(read):
    from nanotrain.kernels.linear import wgrad

    class Product:
        """A tensor's reader that the package calls."""

        def t(self):
            read(torch.ones(3))
            return torch.ones(1, 1)

    with pytest.raises(CaptureError, match="waits"), FakeGraphPool().capture():
        wgrad(Product(), torch.ones(1, 1))
