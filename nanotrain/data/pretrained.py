"""Load the tokenizer of a folder or Hugging Face name as transformers' AutoTokenizer does.

AutoTokenizer decides by config.json and tokenizer_config.json which class builds the tokenizer.
Some classes take tokenizer.json as it is, others only its vocabulary; all add the tokens that
special_tokens_map.json, added_tokens.json and tokenizer_config.json name. So it is asked, and
`resolved_settings` describes the result: with them and the `tokenizer.json` of its backend,
`tokenizers` alone gives the same ids, without the seconds that transformers takes to import.
"""

import socket
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nanotrain.data.tokenizer_files import VOCABULARY_FILES
from nanotrain.errors import DataError

_CONNECT_TIMEOUT_S = 3.0  # for a connection to the hub
ANY_CLASS = "PreTrainedTokenizerFast"  # transformers' class of whatever a tokenizer.json holds
# entries of tokenizer_config.json that the `tokenizer.json` of the backend already contains
_RESOLVED = (
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "added_tokens_decoder",
    "auto_map",
    "legacy",
    "sp_model_kwargs",
    "tokenizer_class",
)
_TOKEN_FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def load_pretrained(name: str) -> Any:
    """Load a transformers tokenizer by name or folder; never runs code from the repository.

    Raises:
        DataError: transformers cannot load it.
    """
    is_folder = Path(name).is_dir()
    if not is_folder:
        go_offline_if_unreachable()
    # not from `transformers`, which replaces itself while another thread imports it
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    try:
        # False, not None: None asks on the terminal, and "y" would run the repository's code.
        return AutoTokenizer.from_pretrained(
            name, trust_remote_code=False, local_files_only=is_folder
        )
    # OSError, ValueError, ImportError, KeyError: depends on the repository; the panics of the
    # `tokenizers` library are no Exception
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        what = "is no tokenizer.json or folder here"
        if is_folder and not any((Path(name) / file).is_file() for file in VOCABULARY_FILES):
            what = "is a folder without tokenizer.json or another vocabulary"
        elif is_folder:
            what = "is a folder whose tokenizer files transformers cannot read"
        raise DataError(
            f"the tokenizer {name} cannot be loaded",
            why=f"it {what}, and Hugging Face reports: {first_line(error)}",
            fix=(
                "without a network give a folder with a tokenizer.json, 'bytes', "
                "or in prepare bpe:8192"
            ),
        ) from None


def resolved_settings(loaded: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer_config.json with which `tokenizer.json` of the backend is the whole tokenizer.

    Args:
        loaded: a transformers tokenizer with a `tokenizers` backend.
        settings: the tokenizer_config.json that it was loaded from.
    """
    kept = {name: value for name, value in settings.items() if name not in _RESOLVED}
    tokens = {name: str(token) for name, token in loaded.special_tokens_map.items()}
    added = {}
    for token, entry in loaded.added_tokens_decoder.items():
        added[str(token)] = {flag: getattr(entry, flag) for flag in _TOKEN_FLAGS}
    return {
        "tokenizer_class": ANY_CLASS,
        **kept,
        **tokens,
        "added_tokens_decoder": added,
        "split_special_tokens": loaded.split_special_tokens,
    }


def go_offline_if_unreachable() -> None:
    """Switch the hub client to its cache if the hub does not accept a connection.

    The client itself would try five times, half a minute (measured), before it reports that there
    is no network.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or urllib.request.getproxies():
        return
    hub = urlsplit(constants.ENDPOINT)
    address = (hub.hostname or "", hub.port or 443)
    try:
        socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S).close()
    except OSError:
        constants.HF_HUB_OFFLINE = True


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type."""
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__
