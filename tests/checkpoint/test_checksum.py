"""The checksum of a chunk does not depend on the library that computes it."""

import os
import zlib

import pytest

from nanotrain.checkpoint.checksum import crc32


def test_the_checksum_is_zlibs():
    for size in (0, 1, 1000, 100_000):
        data = os.urandom(size)
        assert crc32(memoryview(data)) == zlib.crc32(data)


def test_isal_computes_it_where_it_is_installed():
    isal_zlib = pytest.importorskip("isal.isal_zlib")
    assert crc32 is isal_zlib.crc32
