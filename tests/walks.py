"""Which files of the package a call enters: how many a reader opens to follow it."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import nanotrain

PACKAGE = Path(nanotrain.__file__).parent


def files_entered(call: Callable[[], object]) -> set[str]:
    """The files of the package whose functions a call enters."""
    files: set[str] = set()

    def record(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(PACKAGE)):
            files.add(Path(name).relative_to(PACKAGE).as_posix())

    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files
