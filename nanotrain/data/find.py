"""Find the training documents that hold a text."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nanotrain.data.build import tokenizer_of
from nanotrain.data.gpt import GPTDataset
from nanotrain.data.order import DataOrder
from nanotrain.data.tokenizer import SETTINGS, Tokenizer, load_tokenizer
from nanotrain.errors import DataError
from nanotrain.runs.folder import RunFolder

_BLOCK_TOKENS = 1 << 24
_MARGIN = 2  # tokens at each end of a text that may be others inside of a document


def documents_with(text: str, order: DataOrder, *, run: Path) -> list[tuple[Path, int]]:
    """The documents of the training split, as prefix and index, whose text contains `text`.

    The tokens of the text without those at its ends, which depend on what is around it, are
    searched in the token files, and every document in which they occur is decoded.

    Raises:
        DataError: the tokenizer of the run is unknown, or the text is too short to be searched.
    """
    stored = RunFolder(run).tokenizer
    name = (
        str(stored) if (stored / SETTINGS).is_file() else tokenizer_of(order.starts[-1].config.data)
    )
    if name is None:
        why = "its corpora were prepared without one, and it has no --tokenizer-model"
        raise DataError(
            f"{run} has no tokenizer", why=why, fix="search with --document PREFIX:INDEX"
        )
    tokenizer, found = load_tokenizer(name), {}
    tokens = tokenizer.encode(text)
    inner = tokens[_MARGIN:-_MARGIN]
    if not inner:
        why = f"it has {len(tokens)} tokens, of which {2 * _MARGIN} at its ends depend on what is around it"
        raise DataError(
            f"the text {text!r} is too short to be searched", why=why, fix="give more of it"
        )
    for start in order.starts:
        for part in start.corpora:
            for document in _candidates(part, inner):
                key = part.corpus.prefix, document
                if key not in found:
                    found[key] = text in _text(part, document, tokenizer=tokenizer)
    return [key for key, has_text in found.items() if has_text]


def _candidates(part: GPTDataset, tokens: list[int]) -> Iterator[int]:
    """Documents of the split in which tokens begin."""
    corpus, size, length = part.corpus, part.corpus.dtype.itemsize, len(tokens)
    if max(tokens) > np.iinfo(corpus.dtype).max:
        return
    wanted = np.array(tokens, dtype=corpus.dtype).tobytes()
    for first in range(part.start, part.stop, _BLOCK_TOKENS):
        block = corpus.read(first, min(first + _BLOCK_TOKENS + length - 1, part.stop)).tobytes()
        at = block.find(wanted)
        while at >= 0:
            if at % size == 0:
                yield next(corpus.documents_in(first + at // size, first + at // size + 1))[0]
            at = block.find(wanted, at + 1)


def _text(part: GPTDataset, document: int, *, tokenizer: Tokenizer) -> str:
    start, stop = part.corpus.document_start(document), part.corpus.document_start(document + 1)
    return tokenizer.decode(part.corpus.read(start, stop).tolist())
