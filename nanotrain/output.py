"""Standard streams of a command where they are closed, hung up, not read any more, or on a full disk.

open_closed_streams   before any file is opened
guard_output          at the start of a command: one error in place of a traceback
outlive_output        at the start of a training, which goes on without its output
"""

import errno
import io
import os
import sys
import time
from typing import Any

from nanotrain.errors import EnvironmentFault

_FULL_PIPE_S = 0.01  # seconds until the next attempt to write to a full pipe that does not block


def open_closed_streams() -> None:
    """Send standard streams that were closed (`2>&-`) to nowhere.

    The next files to be opened would get their numbers, and what a library prints would be written into them.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(opened, True)  # by the ranks
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


class _Output(io.FileIO):
    """The bytes of standard output or error.

    Args:
        number: of the file.
        is_needed: an error while writing is the command's; otherwise what cannot be written is dropped.
    """

    def __init__(self, number: int, *, is_needed: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self.is_needed, self.note = is_needed, ""
        self._is_terminal = self.isatty()  # not of one that has hung up

    def write(self, data: Any) -> int:
        """Write bytes, and return how many are done with.

        Raises:
            BrokenPipeError: nothing reads output that is needed.
            EnvironmentFault: output that is needed cannot be written.
        """
        try:
            written = super().write(data)
        except OSError as error:
            self._fail(error)
            return len(data)
        if written is None:
            time.sleep(_FULL_PIPE_S)
        return written or 0

    def _fail(self, error: OSError) -> None:
        """End the command, or drop what it writes: once where space may return, for good where nobody is there."""
        has_hung_up = self._is_terminal and error.errno == errno.EIO
        if self.is_needed and not has_hung_up:
            self.is_needed = False  # the interpreter writes what is left once more at its end
            if error.errno == errno.EPIPE:
                raise error
            reason, fix = error.strerror or str(error), "free space, or send the output elsewhere"
            raise EnvironmentFault("standard output cannot be written", why=reason, fix=fix) from None
        if has_hung_up or error.errno == errno.EPIPE:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
        if self.note and not has_hung_up:
            print(f"standard output cannot be written: {error.strerror}; {self.note}", file=sys.stderr)
            self.note = ""


def guard_output() -> None:
    """Replace standard output and error by streams that fail as a command should.

    Output that cannot be written is an `EnvironmentFault`. What a terminal gets after it has hung up, as a closed ssh
    session does, is dropped, and so is what standard error cannot take: there is nowhere left to report it. Characters
    that the encoding of the stream does not have are escaped, as Python does on standard error: "\\u20ac".
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
