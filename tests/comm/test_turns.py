"""Two computations take turns where they hand over, in one order, and fail together."""

import threading
from collections.abc import Callable

import pytest
import torch

from nanotrain.comm.turns import Turns


def writing(turns: Turns, events: list[str], name: str, *, parts: int) -> Callable[[], None]:
    def run() -> None:
        for index in range(parts):
            events.append(f"{name}{index}")
            turns.hand_over()
        events.append(f"{name} ends")

    return run


def test_the_second_begins_and_the_longer_one_goes_on_alone() -> None:
    turns, events = Turns(), []
    for _ in range(2):
        turns.run([writing(turns, events, "f", parts=3), writing(turns, events, "b", parts=1)])
    assert events == ["b0", "f0", "b ends", "f1", "f2", "f ends"] * 2
    turns.run([writing(turns, events, "g", parts=2)])
    assert events[12:] == ["g0", "g1", "g ends"]
    turns.run([])


@pytest.mark.parametrize("fails_first", [True, False])
def test_a_failure_of_one_ends_both(fails_first: bool) -> None:
    turns, events = Turns(), []

    def fails() -> None:
        turns.hand_over()
        raise ValueError("lost")

    both = [writing(turns, events, "f", parts=9), fails]
    with pytest.raises(ValueError, match="lost"):
        turns.run(both[::-1] if fails_first else both)
    assert "f8" not in events
    turns.run([writing(turns, events, "f", parts=9), writing(turns, events, "b", parts=9)])
    assert events[-1] == "f ends"


def test_a_backward_in_turns_has_its_own_gradient_mode_and_the_modes_of_the_caller() -> None:
    turns, seen = Turns(), []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append((function.__name__, threading.current_thread().name))
            return function(*args, **(kwargs or {}))

    with Mode(), torch.no_grad():
        turns.run(
            [
                lambda: turns.hand_over(),
                lambda: seen.append((torch.is_grad_enabled(), torch.ones(2).sum())),
            ]
        )
    assert any(name == "sum.default" and thread.startswith("turns") for name, thread in seen[:-1])
    assert seen[-1][0] is True
