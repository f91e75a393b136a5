"""The seam to Hugging Face: tokenizers by `transformers`, corpora by `datasets`.

Both libraries take seconds to import and are imported only when something needs them; nothing else in this room
names them.
"""

import socket
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nanotrain.errors import DataError

_CONNECT_S = 3.0


@dataclass(frozen=True)
class HubCorpus:
    """A corpus that `datasets.load_dataset` reads.

    Args:
        name: hub name, a folder, or a file type ("csv") with `files`.
        subset: configuration of the corpus; None for its only one.
        split: split of the corpus, usually "train".
        files: local files for a file type.
    """

    name: str
    subset: str | None
    split: str
    files: tuple[str, ...] = ()


def load_tokenizer(name: str) -> Any:
    """A transformers tokenizer by Hugging Face name or folder.

    Raises:
        DataError: there is none of that name, or it would have to be fetched and cannot be.
    """
    if not Path(name).is_dir():
        _settle_reachability()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # OSError, ValueError, ImportError, KeyError: whatever the repository leads to
        raise DataError(
            f"the tokenizer {name} cannot be loaded",
            why=f"it is no local tokenizer.json or folder, and Hugging Face says: {_first_line(error)}",
            fix="without a network give a folder with a tokenizer.json, 'bytes', or in prepare bpe:8192",
        ) from None


def stream_rows(corpus: HubCorpus) -> Iterator[dict[str, Any]]:
    """The rows of a corpus as they arrive, nothing kept on disk."""
    return iter(_open(corpus, streaming=True))


@lru_cache(maxsize=4)
def load_rows(corpus: HubCorpus) -> Any:
    """A corpus as a random-access `datasets.Dataset`, downloaded on first use."""
    return _open(corpus, streaming=False)


def _open(corpus: HubCorpus, *, streaming: bool) -> Any:
    if not corpus.files and not Path(corpus.name).is_dir():
        _settle_reachability()
    import datasets

    if not streaming:
        datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(
            corpus.name,
            corpus.subset,
            split=corpus.split,
            data_files=list(corpus.files) or None,
            streaming=streaming,
        )
    except Exception as error:  # a loader may raise anything; the user needs its first line
        raise DataError(
            f"the corpus {corpus.files[0] if corpus.files else corpus.name} cannot be loaded",
            why=f"it is no local file or folder of text, and Hugging Face datasets says: {_first_line(error)}",
            fix="check the spelling, --subset and --split-name; without a network give local files",
        ) from None


@cache
def _settle_reachability() -> None:
    """Without a way to the hub, say so to its client: it then looks into its cache at once.

    Left to itself it tries five times, half a minute (measured), before it says that there is no network.
    """
    from huggingface_hub import constants

    hub = urlsplit(constants.ENDPOINT)
    if urllib.request.getproxies() or constants.HF_HUB_OFFLINE:
        return
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), timeout=_CONNECT_S).close()
    except OSError:
        constants.HF_HUB_OFFLINE = True


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__
