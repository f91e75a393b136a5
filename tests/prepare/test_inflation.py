"""What compressed files hold is counted before `datasets` reads them."""

import gzip
import zipfile
from pathlib import Path

import pytest

from nanotrain.errors import DataError
from nanotrain.prepare.chunks import plan_chunks
from nanotrain.prepare.inflation import require_bounded


def test_a_compressed_table_made_to_fill_the_disk_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bomb.csv.gz"
    with gzip.open(file, "wb") as out:
        for _ in range(64):
            out.write(b"text\n" * (1 << 18))
    with pytest.raises(DataError, match="bomb.csv.gz holds more than"):
        plan_chunks([str(file)], subset=None, split="train")
    with pytest.raises(DataError, match="bomb.csv.gz holds more than"):
        require_bounded((), folder=tmp_path)


def test_a_zip_is_counted_by_what_it_states(tmp_path: Path) -> None:
    file = tmp_path / "bomb.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.csv", b"text\n" * (1 << 24))
    with pytest.raises(DataError, match="bomb.zip holds more than"):
        require_bounded([str(file)], folder=tmp_path)
    file.write_bytes(b"PK")
    with pytest.raises(DataError, match="bomb.zip cannot be read"):
        require_bounded([str(file)], folder=tmp_path)


def test_usual_tables_pass(tmp_path: Path) -> None:
    file = tmp_path / "a.csv.gz"
    file.write_bytes(gzip.compress(b"text\nabc\n"))
    require_bounded([str(file)], folder=tmp_path)
    require_bounded([], folder=tmp_path / "hub-name")
