"""Find the training documents that hold a text."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nanotrain.data.gpt import GPTDataset
from nanotrain.data.order import DataOrder
from nanotrain.data.run_tokenizer import tokenizer_of_stored
from nanotrain.data.tokenizer import Tokenizer, load_tokenizer
from nanotrain.data.tokenizer_files import SETTINGS
from nanotrain.errors import DataError
from nanotrain.runs.folder import RunFolder

_BLOCK_TOKENS = 1 << 24
_MARGIN = 2  # tokens at both ends of a text that may differ inside of a document


def documents_with(text: str, order: DataOrder, *, run: Path) -> list[tuple[Path, int]]:
    """The documents of the training split, as prefix and index, whose text contains `text`.

    The tokens of the text, without those at its ends that depend on the surrounding text, are
    searched in the token files, and every document in which they occur is decoded.

    Raises:
        DataError: the tokenizer of the run is unknown, or the text is too short to be searched.
    """
    tokenizer = _load_run_tokenizer(order, run)
    (tokens,) = tokenizer.encode_documents([text])
    inner = tokens[_MARGIN:-_MARGIN]
    if not inner:
        raise DataError(
            f"the text {text!r} is too short to be searched",
            why=(
                f"it has {len(tokens)} tokens, "
                f"of which {2 * _MARGIN} at its ends depend on what is around it"
            ),
            fix="give more of it",
        )
    has_text: dict[tuple[Path, int], bool] = {}
    for start in order.starts:
        for part in start.corpora:
            for document in _candidates(part, inner):
                key = part.corpus.prefix, document
                if key not in has_text:
                    has_text[key] = text in _decode(part, document, tokenizer=tokenizer)
    return [key for key, is_match in has_text.items() if is_match]


def _load_run_tokenizer(order: DataOrder, run: Path) -> Tokenizer:
    """The tokenizer in the run folder, else the tokenizer of its data section."""
    stored = RunFolder(run).tokenizer
    if (stored / SETTINGS).is_file():
        return load_tokenizer(str(stored))
    name = tokenizer_of_stored(order.starts[-1].config.data)
    if name is None:
        raise DataError(
            f"{run} has no tokenizer",
            why="its corpora were prepared without one, or it is not on this machine",
            fix="search with --document PREFIX:INDEX",
        )
    return load_tokenizer(name)


def _candidates(part: GPTDataset, tokens: list[int]) -> Iterator[int]:
    """Documents of the split in which tokens begin."""
    corpus = part.corpus
    size = corpus.dtype.itemsize
    if max(tokens) > np.iinfo(corpus.dtype).max:
        return
    wanted = np.array(tokens, dtype=corpus.dtype).tobytes()
    for first in range(part.start, part.stop, _BLOCK_TOKENS):
        last = min(first + _BLOCK_TOKENS + len(tokens) - 1, part.stop)
        block = corpus.read(first, last).tobytes()
        offset = block.find(wanted)
        while offset >= 0:
            if offset % size == 0:
                position = first + offset // size
                document, _, _ = next(corpus.documents_in(position, position + 1))
                yield document
            offset = block.find(wanted, offset + 1)


def _decode(part: GPTDataset, document: int, *, tokenizer: Tokenizer) -> str:
    """The text of a document."""
    start = part.corpus.document_start(document)
    stop = part.corpus.document_start(document + 1)
    return tokenizer.decode(part.corpus.read(start, stop).tolist())
