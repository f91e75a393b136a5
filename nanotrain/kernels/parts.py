"""Work divided over torch's threads as a whole, where it is many operators that are too small to be divided each.

torch divides every operator over its threads, and waits for all of them after each. Here a Python thread computes a
part of the work, all its operators on one core, and the threads meet at the end. Operators release the GIL while they
compute; what Python does between them is done by one thread at a time.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import TypeVar

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

Item = TypeVar("Item")


def divide(work: Callable[[Sequence[Item]], None], items: Sequence[Item]) -> None:
    """Call `work` with consecutive parts of the items, on as many threads as torch has, or with all on this thread.

    Args:
        work: computes items without gradients; calls must not write the same memory.
        items: as many as torch has threads, or more, else this thread computes them; also where a
            `TorchDispatchMode` watches its operators.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1 or len(items) < num_threads or is_in_torch_dispatch_mode():  # other threads are outside of it
        work(items)
        return
    is_inference = torch.is_inference_mode_enabled()  # modes are a thread's own

    def compute(part: Sequence[Item]) -> None:
        with torch.inference_mode(is_inference), torch.no_grad():
            work(part)

    ends = [len(items) * number // num_threads for number in range(num_threads + 1)]
    for _ in _threads(num_threads).map(compute, (items[start:stop] for start, stop in pairwise(ends))):
        pass


@cache
def _threads(num_threads: int) -> ThreadPoolExecutor:
    """Threads on which torch divides no operator."""
    all_started = threading.Barrier(num_threads)

    def start(_: int) -> None:
        torch.get_num_threads()  # the first call sets the number of a thread, and would replace the one set here
        torch.set_num_threads(1)  # of this thread, and the first number of later ones
        all_started.wait()  # so that every thread of the pool takes one call

    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="kernels")
    list(pool.map(start, range(num_threads)))
    torch.set_num_threads(num_threads)
    return pool


os.register_at_fork(after_in_child=_threads.cache_clear)  # a child has none of the threads
