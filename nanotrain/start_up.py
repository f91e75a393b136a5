"""What a process does around `import torch` and at its end, which saves 0.4 s and more of garbage collection."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing_torch() -> Iterator[None]:
    """Import in the block without garbage collection, unless torch is imported already.

    Torch and what is built on it are half a million objects of which none is garbage. Collections visit all of them
    repeatedly: a third of the CPU time of `import torch`. What was imported is then left out of later collections.
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
    """Skip the last collection of the interpreter, which visits all objects (0.4 s of CPU); call it last."""
    gc.disable()
    gc.freeze()
