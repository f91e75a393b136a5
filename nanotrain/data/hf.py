"""Tokenizers from Hugging Face, and whether the hub can be reached.

`transformers` takes seconds to import, so it is imported only when a tokenizer needs it. Datasets of the hub are in
prepare/hub.py.
"""

import socket
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nanotrain.errors import DataError

_CONNECT_TIMEOUT_S = 3.0


def load_tokenizer(name: str) -> Any:
    """Load a transformers tokenizer by Hugging Face name or folder; never runs code from the repository.

    Raises:
        DataError: no tokenizer has that name, or it must be downloaded and cannot be.
    """
    if not Path(name).is_dir():
        go_offline_if_unreachable()
    from transformers import AutoTokenizer

    try:
        # False, not None: None asks on the terminal, and "y" would run the repository's code.
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError, ImportError, KeyError: depends on the repository
        what = "is a folder without tokenizer.json" if Path(name).is_dir() else "is no local tokenizer.json or folder"
        raise DataError(
            f"the tokenizer {name} cannot be loaded",
            why=f"it {what}, and Hugging Face reports: {first_line(error)}",
            fix="without a network give a folder with a tokenizer.json, 'bytes', or in prepare bpe:8192",
        ) from None


def go_offline_if_unreachable() -> None:
    """Switch the hub client to its cache if the hub does not accept a connection.

    The client itself would try five times, half a minute (measured), before it reports that there is no network.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or urllib.request.getproxies():
        return
    hub = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError:
        constants.HF_HUB_OFFLINE = True


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type."""
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__
