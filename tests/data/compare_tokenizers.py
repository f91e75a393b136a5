"""Compare tokenizers with transformers' AutoTokenizer, and print a table.

    python -m tests.data.compare_tokenizers [FOLDER ...]

Compares every kind of tokenizer_kinds.py and every FOLDER on 300 texts each:

    prompts     `encode` of the folder, with AutoTokenizer
    documents   `encode_documents`, with AutoTokenizer and split_special_tokens=True
    copy        both again for what `save` wrote, loaded by `tokenizers` alone
    copy-there  AutoTokenizer of the folder, with AutoTokenizer of what `save` wrote

The columns are the numbers of texts with other ids; 0 everywhere is right.
"""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from nanotrain.data.tokenizer import FastTokenizer, SlowTokenizer, load_tokenizer
from nanotrain.errors import DataError
from tests.data.tokenizer_kinds import KINDS, texts_for, write_kind


class Difference(NamedTuple):
    """The number of texts with other ids than AutoTokenizer's, by what was compared."""

    texts: int
    prompts: int
    documents: int
    copy: int
    copy_there: int
    eos: str  # "" if the end-of-document token is AutoTokenizer's, else both

    @property
    def total(self) -> int:
        return self.prompts + self.documents + self.copy + self.copy_there + bool(self.eos)


def ids_of(auto: Any, texts: Sequence[str], *, is_text: bool) -> list[list[int]]:
    """AutoTokenizer's ids without BOS and EOS."""
    options = {"split_special_tokens": True} if is_text else {}
    return [auto.encode(text, add_special_tokens=False, **options) for text in texts]


def compare(folder: Path, copy: Path) -> Difference:
    """Compare the tokenizer of a folder, and what `save` writes to the folder `copy`."""
    from transformers import AutoTokenizer

    auto = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    model = getattr(getattr(auto, "backend_tokenizer", None), "model", None)
    if getattr(model, "dropout", None):
        model.dropout = None
    texts = texts_for(list(auto.get_added_vocab()))
    prompts = ids_of(auto, texts, is_text=False)
    documents = ids_of(auto, texts, is_text=True)
    ours = load_tokenizer(str(folder))
    assert isinstance(ours, FastTokenizer | SlowTokenizer)
    ours.save(copy)
    again = load_tokenizer(str(copy))
    there = AutoTokenizer.from_pretrained(str(copy), trust_remote_code=False)
    copied = unequal([again.encode(text) for text in texts], prompts)
    copied += unequal(again.encode_documents(texts), documents)
    return Difference(
        len(texts),
        unequal([ours.encode(text) for text in texts], prompts),
        unequal(ours.encode_documents(texts), documents),
        copied,
        unequal(ids_of(there, texts, is_text=False), prompts),
        other_eos(ours.eod, again.eod, auto=auto),
    )


def other_eos(eod: int | None, again: int | None, *, auto: Any) -> str:
    """The end-of-document tokens if they differ; one of a usual name where none is named."""
    expected = eod if auto.eos_token_id is None else auto.eos_token_id
    return "" if eod == again == expected else f"{eod} {again} {expected}"


def unequal(first: Sequence[list[int]], second: Sequence[list[int]]) -> int:
    """The number of texts with other ids."""
    return sum(ids != others for ids, others in zip(first, second, strict=True))


def main(folders: Sequence[str]) -> int:
    """Print the table; returns 1 if anything differs."""
    logging.disable(logging.WARNING)
    num_equal, num_texts, others = 0, 0, 0
    print(f"{'tokenizer':34} texts prompts documents copy copy-there eos")
    with TemporaryDirectory() as scratch:
        named = {name: write_kind(name, Path(scratch, name)) for name in KINDS}
        named |= {folder: Path(folder) for folder in folders}
        for number, (name, folder) in enumerate(named.items()):
            try:
                found = compare(folder, Path(scratch, f"copy-{number}"))
            except (DataError, ValueError, OSError) as error:
                print(f"{name[-34:]:34} refused: {str(error)[:200]}")
                others += 1
                continue
            print(f"{name[-34:]:34}", *found)
            num_texts += found.texts
            num_equal += found.total == 0
            others += found.total != 0
    print(f"{num_equal} tokenizers with AutoTokenizer's ids on {num_texts} texts; others: {others}")
    return int(others > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
