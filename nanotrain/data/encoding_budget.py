"""A limit on the time of an encoding.

A tokenizer.json holds regular expressions, some of which take time exponential in the text. The
library cannot be interrupted, so the caller stops waiting, and the program ends with an error.
"""

import threading
from collections.abc import Callable
from typing import Any

from nanotrain.errors import DataError

BUDGET_S = 60.0
BYTES_PER_S = 20_000  # the slowest encoding that is waited for; usual are 1,000,000 and more


def within_budget(encode: Callable[[], Any], *, num_characters: int) -> Any:
    """The result of an encoding, computed on a thread.

    Args:
        encode: the encoding; the library releases the interpreter's lock meanwhile.
        num_characters: length of its texts.

    Raises:
        DataError: it takes too long.
    """
    outcome: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(encode())
        except BaseException as error:  # the library's panics are no Exception
            errors.append(error)

    budget_s = BUDGET_S + num_characters / BYTES_PER_S
    thread = threading.Thread(target=run, name="encoding", daemon=True)
    thread.start()
    thread.join(budget_s)
    if errors and isinstance(errors[0], Exception):
        raise errors[0]
    if errors:
        raise DataError(
            "a text cannot be encoded",
            why=f"the tokenizer ended with: {errors[0]}",
            fix="use another tokenizer, or correct the patterns in its tokenizer.json",
        )
    if not outcome:
        raise DataError(
            f"{num_characters:,} characters are not encoded after {budget_s:.0f} s",
            why="a regular expression of the tokenizer takes too long for the text",
            fix="use another tokenizer, or correct the pattern in its tokenizer.json",
        )
    return outcome[0]
