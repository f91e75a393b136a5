"""Compressed inputs give their text, and one that cannot be read is named."""

import gzip
from pathlib import Path

import pytest
import zstandard

from nanotrain.errors import DataError
from nanotrain.prepare import compressed
from nanotrain.prepare.compressed import open_input


def _read(file: Path) -> bytes:
    with open_input(str(file)) as stream:
        return stream.read()


def test_a_damaged_compressed_file_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"text": "a"}\n' * 1000)
    for name, data in (("cut.jsonl.gz", whole[:-20]), ("other.jsonl.gz", b"no gzip"), ("other.txt.xz", b"no xz")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=f"{name} cannot be read"):
            _read(tmp_path / name)


def test_zst_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "find_spec", lambda name: None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"any")
    with pytest.raises(DataError, match="zstandard is not installed; pip install zstandard"):
        _read(tmp_path / "a.jsonl.zst")


def test_a_cut_zst_is_named(tmp_path: Path) -> None:
    whole = zstandard.compress(b"".join(b'{"text": "%d"}\n' % i for i in range(50_000)))
    (tmp_path / "cut.jsonl.zst").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cut\.jsonl\.zst cannot be read.*ends too early"):
        _read(tmp_path / "cut.jsonl.zst")
    (tmp_path / "cut.jsonl.zst").write_bytes(whole)
    assert _read(tmp_path / "cut.jsonl.zst").endswith(b'"49999"}\n')
    with open_input(str(tmp_path / "cut.jsonl.zst")) as stream:
        assert stream.readline() and stream.tell() == len(b'{"text": "0"}\n')


def test_zst_is_read_over_all_its_frames(tmp_path: Path) -> None:
    compress = zstandard.compress
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(compress(b'{"text": "%d"}\n' % i) for i in range(3)))
    assert _read(tmp_path / "a.jsonl.zst") == b'{"text": "0"}\n{"text": "1"}\n{"text": "2"}\n'
