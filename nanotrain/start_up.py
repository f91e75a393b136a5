"""What a process does around `import torch` and at its end, so that it starts and ends without needless work."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing_torch() -> Iterator[None]:
    """Import in the block without garbage collection, unless torch is imported already.

    Torch and what is built on it are half a million objects of which none is garbage. Collections look at all of them
    again and again: a third of the CPU time of `import torch`. What was imported is then left out of later collections.
    """
    if "torch" in sys.modules:
        yield
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def end_without_collection() -> None:
    """Call it last: the interpreter would look for garbage among all objects before it ends (0.4 s of CPU)."""
    gc.disable()
    gc.freeze()
