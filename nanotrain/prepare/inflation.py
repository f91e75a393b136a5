"""Check what compressed files hold before `datasets` writes all of it to the disk."""

import zipfile
from collections.abc import Sequence
from pathlib import Path

from nanotrain.data.pretrained import first_line
from nanotrain.errors import DataError
from nanotrain.prepare.inputs import ALWAYS_BYTES, Limits, is_compressed, open_input

BLOCK_BYTES = 1 << 20  # counted at a time


def require_bounded(files: Sequence[str], *, folder: Path) -> None:
    """Check the files of a dataset, or of its folder where it has none; nothing of the hub.

    Raises:
        DataError: one is damaged, or holds more than text would.
    """
    paths = [Path(file) for file in files]
    if not files and folder.is_dir():
        paths = [file for file in folder.rglob("*") if file.is_file()]
    for path in paths:
        if path.suffix.lower() == ".zip":
            check_zip(path)
        elif is_compressed(path):
            check_inflation(path)


def check_inflation(path: Path) -> None:
    """Check a compressed file.

    Raises:
        DataError: it holds more than text would.
    """
    limits = Limits()
    most = limits.file_bytes(str(path))
    total = 0
    with open_input(str(path)) as stream:
        while block := stream.read(BLOCK_BYTES):
            total += len(block)
            limits.check_file(str(path), total, most=most)


def check_zip(path: Path) -> None:
    """Check a .zip file; reading a member ends at the size that the file states.

    Raises:
        DataError: it holds more than text would.
    """
    limits = Limits()
    try:
        with zipfile.ZipFile(path) as archive:
            stated = sum(member.file_size for member in archive.infolist())
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{path} cannot be read", why=first_line(error), fix="write it again, or leave it out"
        ) from None
    most = ALWAYS_BYTES + limits.inflation * path.stat().st_size
    limits.check_file(str(path), stated, most=most)
