"""How a corpus was prepared: `PREFIX.nanotrain.json`, written beside its `.bin/.idx` pair.

The tokenizer named there is "bytes" or a folder beside the pair.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from nanotrain.errors import DataError
from nanotrain.runs.files import write_text
from nanotrain.untrusted import object_of, parse_json, read_file, text_of, whole_number


@dataclass(frozen=True)
class CorpusInfo:
    """The contents of `PREFIX.nanotrain.json` (`PREFIX.json` may be an input file)."""

    tokenizer: str | None = None  # "bytes", or the name of a folder beside the pair; None if unknown
    vocab_size: int = 0  # one more than the largest id of that tokenizer
    eod: int | None = None  # the end-of-document token
    documents: int = 0  # number of documents
    tokens: int = 0  # number of tokens
    plan: str = ""  # hash of inputs and options


def tokenizer_path(prefix: Path) -> Path:
    """The folder beside a pair that holds the tokenizer."""
    return prefix.with_name(prefix.name + ".tokenizer")


def read_info(prefix: Path) -> CorpusInfo:
    """Read the info of a corpus; an empty one if there is none, as beside Megatron-LM's own files.

    Raises:
        DataError: the file is damaged.
    """
    path = _info_path(prefix)
    if not path.is_file():
        return CorpusInfo()
    try:
        return _checked(CorpusInfo(**object_of(parse_json(read_file(path)), "it")))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{path} cannot be read",
            why=str(error),
            fix="remove it and name the tokenizer with --tokenizer-model, or prepare the corpus again",
        ) from None


def _checked(info: CorpusInfo) -> CorpusInfo:
    for field in ("vocab_size", "documents", "tokens"):
        whole_number(getattr(info, field), field)
    if info.eod is not None:
        whole_number(info.eod, "eod")
    if info.tokenizer is not None:
        text_of(info.tokenizer, "tokenizer")
    text_of(info.plan, "plan")
    return info


def write_info(prefix: Path, info: CorpusInfo) -> None:
    """Write the info of a corpus, atomically."""
    path = _info_path(prefix)
    write_text(path, json.dumps(asdict(info), indent=2) + "\n")


def recorded_tokenizer(prefix: Path | str) -> str | None:
    """The tokenizer a corpus was prepared with, as `load_tokenizer` takes it; None if unknown."""
    name = read_info(Path(prefix)).tokenizer
    folder = tokenizer_path(Path(prefix))
    return str(folder) if name == folder.name else name


def _info_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".nanotrain.json")
