"""Headers pack and read back; dtypes fit their vocabulary."""

from pathlib import Path

import numpy as np
import pytest

from nanotrain.data.token_format import (
    CODES,
    DTYPES,
    IndexHeader,
    check_dtype,
    read_header,
    smallest_dtype,
)
from nanotrain.errors import DataError


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in DTYPES.values() if dtype.kind != "f"], ids=str
)
def test_a_header_reads_back(tmp_path: Path, dtype: np.dtype) -> None:
    header = IndexHeader(dtype, num_sequences=3, num_document_indices=4)
    file = tmp_path / "a.idx"
    file.write_bytes(header.pack() + bytes(12 * 3 + 8 * 4))
    assert read_header(file) == header
    assert file.stat().st_size == header.file_bytes


def test_codes_are_megatrons() -> None:
    names = {code: dtype.name for code, dtype in DTYPES.items()}
    assert names == {
        1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16",
    }  # fmt: skip
    assert all(CODES[dtype] == code for code, dtype in DTYPES.items())


@pytest.mark.parametrize(
    ("vocab_size", "name"), [(257, "uint16"), (65499, "uint16"), (65500, "int32")]
)
def test_uint16_up_to_megatrons_bound(vocab_size: int, name: str) -> None:
    assert smallest_dtype(vocab_size).name == name


def test_a_dtype_too_small_is_refused_with_its_bounds() -> None:
    check_dtype(np.dtype("uint8"), 256)
    with pytest.raises(
        DataError,
        match="uint8 cannot hold .* of 257: the largest id is 256, the largest uint8 is 255",
    ):
        check_dtype(np.dtype("uint8"), 257)


def test_an_index_with_modes_is_refused_and_says_why(tmp_path: Path) -> None:
    """Megatron-LM's multimodal index has one int8 mode per sequence after the document indices."""
    header = IndexHeader(np.dtype("uint16"), num_sequences=3, num_document_indices=4)
    file = tmp_path / "a.idx"
    file.write_bytes(header.pack() + bytes(12 * 3 + 8 * 4 + 3))
    with pytest.raises(DataError, match="more than token sequences .multimodal"):
        read_header(file)
