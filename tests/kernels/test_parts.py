"""Work is divided over threads on which torch computes alone."""

import os
import threading

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from nanotrain.kernels.parts import divide


def parts_of(num_items: int) -> list[tuple[list[int], int, int]]:
    """Items, thread and torch's threads of every part."""
    found: list[tuple[list[int], int, int]] = []
    divide(
        lambda items: found.append((list(items), threading.get_ident(), torch.get_num_threads())),
        range(num_items),
    )
    return sorted(found)


def test_every_thread_takes_a_part_on_one_core(two_threads) -> None:
    first, second = parts_of(5)
    assert (first[0], second[0]) == ([0, 1], [2, 3, 4])
    assert first[2] == second[2] == 1 and torch.get_num_threads() == 2
    assert threading.get_ident() not in (first[1], second[1])


def test_one_thread_too_few_items_and_watched_operators_stay_on_this_thread(two_threads) -> None:
    assert parts_of(1) == [([0], threading.get_ident(), 2)]
    with FlopCounterMode(display=False):
        assert parts_of(2) == [([0, 1], threading.get_ident(), 2)]
    torch.set_num_threads(1)
    assert parts_of(3) == [([0, 1, 2], threading.get_ident(), 1)]


def test_parts_have_no_gradients_and_the_inference_mode_of_the_caller(two_threads) -> None:
    def double(out: Tensor):
        def work(items) -> None:
            assert not torch.is_grad_enabled()
            for item in items:
                out[item].mul_(2)

        return work

    with torch.inference_mode():
        out = torch.ones(4)
        divide(double(out), range(4))
    assert out.tolist() == [2.0] * 4 and out.is_inference()


def test_an_error_of_a_part_is_raised(two_threads) -> None:
    with pytest.raises(ZeroDivisionError):
        divide(lambda items: [1 // item for item in items], range(4))


def test_a_forked_child_starts_threads_of_its_own(two_threads) -> None:
    parts_of(2)
    child = os.fork()
    if child == 0:
        os._exit(0 if len(parts_of(2)) == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
