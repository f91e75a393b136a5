"""Addresses in the configuration: which fields take them, and which files may open a port."""

import re
from collections.abc import Mapping

from nanotrain.config.config import Config
from nanotrain.config.option import Entry
from nanotrain.errors import ConfigError
from nanotrain.paths import require_path
from nanotrain.storage.remote import is_address, parse


def check_path(entry: Entry, text: str) -> None:
    """Check that a text is no address, or a complete one if the field takes addresses.

    Raises:
        ConfigError: it is another address.
    """
    if entry.takes_address and is_address(text):
        parse(text)  # an error for half an address
    elif not entry.takes_address and not entry.name.endswith("data_path"):
        require_path(text)


def require_loopback(config: Config, files: Mapping[str, str]) -> None:
    """Check that no file opens a port to the network.

    Args:
        config: a configuration.
        files: the file of every key that a file sets.

    Raises:
        ConfigError: one does.
    """
    key = "train.prometheus_address"
    address = config.train.prometheus_address
    if key not in files or address in ("localhost", "::1") or re.match(r"127(\.\d+){3}$", address):
        return
    raise ConfigError(
        f"{key} in {files[key]} is {address}",
        why="a recipe may be somebody else's, and opens no port to the network",
        fix=f"write --prometheus-address {address} on the command line",
    )
