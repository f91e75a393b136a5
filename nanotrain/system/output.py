"""Standard output that cannot be written: its reader has gone (`| head`), its disk is full, its terminal was closed.

guard_output          at the start of a command: one error in place of a traceback
outlive_output        at the start of a training, which goes on without its output
"""

import errno
import io
import sys
import time
from typing import Any

from nanotrain.errors import EnvironmentFault

FULL_PIPE_S = 0.01  # seconds until the next attempt to write to a full pipe that does not block


class _Output(io.FileIO):
    """The bytes of standard output or error.

    Args:
        number: number of the file.
        is_needed: whether an error while writing ends the command; otherwise what cannot be written is dropped.
    """

    def __init__(self, number: int, *, is_needed: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self.is_needed, self.note = is_needed, ""

    def write(self, data: Any) -> int:
        """Write bytes, and return how many are done with.

        Raises:
            BrokenPipeError: nothing reads output that is needed.
            EnvironmentFault: output that is needed cannot be written.
        """
        try:
            written = super().write(data)
        except OSError as error:
            was_needed, self.is_needed = self.is_needed, False  # the interpreter writes what is left at its end
            if was_needed and error.errno == errno.EPIPE:
                raise
            if was_needed:
                why, fix = error.strerror or str(error), "free space, or send the output elsewhere"
                raise EnvironmentFault("standard output cannot be written", why=why, fix=fix) from None
            note, self.note = self.note, ""
            if note:
                print(f"standard output cannot be written: {error.strerror}; {note}", file=sys.stderr)
            return len(data)
        if written is None:
            time.sleep(FULL_PIPE_S)
        return written or 0


def guard_output() -> None:
    """Replace standard output and error by streams that fail as a command should.

    Output that cannot be written is an `EnvironmentFault`; what standard error cannot take is dropped, as there is
    nowhere left to report it. Characters that the encoding of the stream does not have are escaped: "\\u20ac".
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.flush()
            raw = _Output(stream.fileno(), is_needed=name == "stdout")
            errors = "backslashreplace" if stream.errors == "strict" else stream.errors
            text = io.TextIOWrapper(io.BufferedWriter(raw), encoding=stream.encoding, errors=errors)
            # python -u (PYTHONUNBUFFERED, as in many containers): what is printed appears at once
            text.reconfigure(line_buffering=stream.line_buffering or stream.write_through)
            setattr(sys, name, text)


def outlive_output(note: str) -> None:
    """From now on drop what standard output cannot take; the first time `note` is printed on standard error.

    Also in a program that trains by a function and has not called `guard_output`; not in a notebook, which has a
    stream of its own.
    """
    if sys.stdout is sys.__stdout__:
        guard_output()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, _Output):
        raw.is_needed, raw.note = False, note
