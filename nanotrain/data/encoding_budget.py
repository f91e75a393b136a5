"""A limit on the time and the memory of an encoding.

A tokenizer.json holds regular expressions, some of which take time exponential in the text, and
replacements, which multiply it. The library cannot be interrupted, so the caller stops waiting, and
the program ends with an error.
"""

import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanotrain.errors import DataError

BUDGET_S = 60.0
BYTES_PER_S = 20_000  # the slowest encoding that is waited for; usual are 1,000,000 and more
BUDGET_BYTES = 4 << 30  # of memory, and BYTES_PER_CHARACTER more; usual are 400 per character
BYTES_PER_CHARACTER = 4096
LOOK_S = 0.1  # between two looks at the memory
_STATUS = Path("/proc/self/statm")


def within_budget(encode: Callable[[], Any], *, num_characters: int) -> Any:
    """The result of an encoding, computed on a thread.

    Args:
        encode: the encoding; the library releases the interpreter's lock meanwhile.
        num_characters: length of its texts.

    Raises:
        DataError: the library reports an error, or takes too much time or memory.
    """
    outcome: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(encode())
        # bare Exception, and panics, which are none
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="encoding", daemon=True)
    before = resident_bytes()
    thread.start()
    _wait(thread, before=before, num_characters=num_characters)
    if errors:
        raise DataError(
            "a text cannot be encoded",
            why=f"the tokenizer reports: {errors[0]}",
            fix="add an unknown token to the tokenizer, leave the text out, or use another one",
        )
    return outcome[0]


def _wait(thread: threading.Thread, *, before: int, num_characters: int) -> None:
    """Wait for an encoding, and look at the memory above the bytes of `before` meanwhile."""
    budget_s = BUDGET_S + num_characters / BYTES_PER_S
    budget_bytes = BUDGET_BYTES + num_characters * BYTES_PER_CHARACTER
    deadline = time.monotonic() + budget_s
    thread.join(min(LOOK_S, budget_s))
    while thread.is_alive():
        if time.monotonic() >= deadline:
            raise DataError(
                f"{num_characters:,} characters are not encoded after {budget_s:.0f} s",
                why="a regular expression of the tokenizer takes too long for the text",
                fix="use another tokenizer, or correct the pattern in its tokenizer.json",
            )
        if resident_bytes() - before > budget_bytes:
            raise DataError(
                f"{num_characters:,} characters need more than {budget_bytes:,} bytes to encode",
                why="a pattern or replacement of the tokenizer multiplies the text",
                fix="use another tokenizer, or correct its tokenizer.json",
            )
        thread.join(LOOK_S)


def resident_bytes() -> int:
    """Memory of this process."""
    return int(_STATUS.read_text().split()[1]) * resource.getpagesize()
