"""Description of a prepared corpus: `PREFIX.nanotrain.json`, next to its `.bin/.idx` pair.

The tokenizer named there is "bytes" or a folder next to the pair.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from nanotrain.data.remote import local_folder, open_file
from nanotrain.errors import DataError
from nanotrain.runs.files import write_text
from nanotrain.untrusted import (
    object_of,
    parse_json,
    plain_file_name,
    read_file,
    text_of,
    whole_number,
)

HASH = "sha256"  # entry of the file with the hash of the others


@dataclass(frozen=True)
class CorpusInfo:
    """The contents of `PREFIX.nanotrain.json` (`PREFIX.json` may be an input file)."""

    # "bytes", or the name of a folder next to the pair; None if unknown
    tokenizer: str | None = None
    vocab_size: int = 0  # one more than the largest id of that tokenizer
    eod: int | None = None  # the end-of-document token
    documents: int = 0  # number of documents
    tokens: int = 0  # number of tokens
    plan: str = ""  # hash of inputs and options
    inputs: dict[str, str] = field(default_factory=dict)  # SHA-256 of every input file, by its path
    # hash of the tokenizer's definition; empty for bytes and for transformers' own classes
    tokenizer_sha256: str = ""
    chat_template_sha256: str = ""  # of conversations: hash of the template that wrote their text
    targets: int = 0  # of conversations: number of tokens that the assistant writes
    # documents whose tokens have other bytes than their text; None if unknown
    uneven_documents: int | None = None


# checks of the fields that are no numbers
CHECKS: dict[str, Callable[[Any, str], object]] = {
    "tokenizer": plain_file_name,  # so that no corpus names one elsewhere
    "plan": text_of,
    "tokenizer_sha256": text_of,
    "chat_template_sha256": text_of,
    "inputs": object_of,
}


def tokenizer_path(prefix: Path) -> Path:
    """The folder with the tokenizer of a pair."""
    return prefix.with_name(prefix.name + ".tokenizer")


def read_info(prefix: Path) -> CorpusInfo:
    """Read the info of a corpus; an empty one without a file, as for Megatron-LM's corpora.

    Raises:
        DataError: the file is damaged, or its values are not those of its hash; older files have
            none.
    """
    path = _info_path(prefix)
    file = open_file(path)
    if file is None:
        return CorpusInfo()
    try:
        values = object_of(parse_json(read_file(file.local)), "it")
        stored_hash = values.pop(HASH, None)
        info = CorpusInfo(**values)
        for name, value in asdict(info).items():
            may_be_unknown = name in ("tokenizer", "eod", "uneven_documents")
            if value is None and may_be_unknown:
                continue
            check = CHECKS.get(name, whole_number)
            check(value, name)
        if stored_hash is not None and stored_hash != _hash_of(info):
            raise ValueError(f"its values are not those that were written (their {HASH} differs)")
        return info
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{path} cannot be read",
            why=str(error),
            fix=(
                "remove it and name the tokenizer with --tokenizer-model, "
                "or prepare the corpus again"
            ),
        ) from None


def write_info(prefix: Path, info: CorpusInfo) -> None:
    """Write the info of a corpus and the hash of its values, atomically."""
    values = asdict(info) | {HASH: _hash_of(info)}
    write_text(_info_path(prefix), json.dumps(values, indent=2) + "\n")


def recorded_tokenizer(prefix: Path | str) -> str | None:
    """The tokenizer a corpus was prepared with, as `load_tokenizer` takes it; None if unknown."""
    prefix = prefix if isinstance(prefix, Path) else Path(prefix)
    name = read_info(prefix).tokenizer
    if name is None or name == "bytes":
        return name
    folder = local_folder(prefix.with_name(name))
    # a relative path of a folder that is missing would be a name on the hub
    return str(folder if folder.exists() else folder.absolute())


def _hash_of(info: CorpusInfo) -> str:
    """The SHA-256 of the values that differ from an empty info.

    A field that a later version adds does not change it.
    """
    empty = asdict(CorpusInfo())
    known = {name: value for name, value in asdict(info).items() if value != empty[name]}
    return sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def _info_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".nanotrain.json")
