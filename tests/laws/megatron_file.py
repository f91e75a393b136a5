"""A writer of Megatron-LM's `.bin/.idx` format, independent of ours, to test our reader."""

import struct
from pathlib import Path

import numpy as np

DTYPE_CODES = {"uint8": 1, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_tokens(prefix: Path, tokens: np.ndarray, *, document_length: int = 500) -> None:
    """Write a token stream, split into documents of one sequence each."""
    lengths = [
        min(document_length, len(tokens) - start)
        for start in range(0, len(tokens), document_length)
    ]
    pointers = np.cumsum([0, *lengths[:-1]]) * tokens.itemsize
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    header = b"MMIDIDX\x00\x00" + struct.pack(
        "<QBQQ", 1, DTYPE_CODES[tokens.dtype.name], len(lengths), len(lengths) + 1
    )
    arrays = (
        np.array(lengths, "<i4"),
        pointers.astype("<i8"),
        np.arange(len(lengths) + 1, dtype="<i8"),
    )
    prefix.with_suffix(".idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
