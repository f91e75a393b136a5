"""The tokenizer of a run, by the corpora of its data section.

uses_quickstart, first_blend    whether there are corpora, and those that training begins with
tokenizer_of                    tokenizer of a run
tokenizer_of_stored             the same of a stored file, which may be somebody else's
remote_name_of                  what it would fetch
"""

from nanotrain.config.config import DataConfig
from nanotrain.config.data_stages import read_stages
from nanotrain.data.corpus_info import read_info, recorded_tokenizer
from nanotrain.data.data_path import parse_data_path
from nanotrain.data.tokenizer import is_local
from nanotrain.errors import DataError
from nanotrain.paths import Address


def uses_quickstart(data: DataConfig) -> bool:
    """Whether a run reads the quick-start corpus, which has to be prepared first."""
    return not first_blend(data) and not data.mock_data


def first_blend(data: DataConfig) -> list[str]:
    """The blend that training begins with, for `parse_data_path`; empty if no corpus is set."""
    stages = read_stages(data.stages)
    if stages:
        return [stages[0].blend]
    return data.data_path or data.train_data_path


def tokenizer_of(data: DataConfig) -> str | None:
    """The tokenizer of a run: from the data section, else from the corpora.

    It is that of the first corpus of conversations, which has their chat template, else of the
    first corpus.
    """
    if data.vocab_file and data.merge_file:
        return f"{data.vocab_file},{data.merge_file}"
    paths = first_blend(data)
    if data.tokenizer_model or data.mock_data or not paths:
        return data.tokenizer_model
    prefixes = [entry.prefix for entry in parse_data_path(paths)]
    for prefix in prefixes:
        # a corpus at an address is asked only if it is the first: each is a request
        if not isinstance(prefix, Address) and read_info(prefix).chat_template_sha256:
            return recorded_tokenizer(prefix)
    return recorded_tokenizer(prefixes[0])


def tokenizer_of_stored(data: DataConfig) -> str | None:
    """The tokenizer of a stored data section, `tokenizer_of` without requests.

    A stored file may be somebody else's, and a request tells that it was read. The tokenizer of a
    corpus in object storage is unknown.

    Raises:
        DataError: the section names a tokenizer that is not on this machine.
    """
    remote = remote_name_of(data)
    if remote is not None and remote == data.tokenizer_model:
        raise DataError(
            f"the tokenizer {remote} cannot be loaded",
            why="it is no file or folder here, and a name or address of a stored file is not "
            "fetched",
            fix=f"write --tokenizer {remote} to fetch it, or name another",
        )
    return None if remote is not None else tokenizer_of(data)


def remote_name_of(data: DataConfig) -> str | None:
    """The name on the hub or the address that `tokenizer_of` would open; None if it is here."""
    if data.vocab_file and data.merge_file:
        return None
    if data.tokenizer_model:
        return None if is_local(data.tokenizer_model) else data.tokenizer_model
    paths = first_blend(data)
    prefix = parse_data_path(paths)[0].prefix if paths and not data.mock_data else None
    return str(prefix) if isinstance(prefix, Address) else None
