"""Small corpora on disk for tests."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from nanotrain.prepare.token_writer import TokenWriter

WriteCorpus = Callable[..., Path]


def random_documents(
    lengths: Sequence[int], *, vocab_size: int = 100, seed: int = 0
) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, vocab_size, length) for length in lengths]


@pytest.fixture
def write_corpus(tmp_path: Path) -> WriteCorpus:
    """A function that writes documents as a pair and returns its prefix."""

    def write(
        documents: Sequence[np.ndarray], *, name: str = "corpus", dtype: str = "uint16"
    ) -> Path:
        return write_documents(tmp_path / name, documents, dtype=dtype)

    return write


def write_documents(
    prefix: Path, documents: Sequence[np.ndarray], *, dtype: str = "uint16"
) -> Path:
    with TokenWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add_documents([document])
    return prefix
