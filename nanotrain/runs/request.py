"""A request to a running job: a JSON file in its run folder, which the job reads and removes."""

import json
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from nanotrain.errors import NanotrainError
from nanotrain.runs.files import write_text
from nanotrain.untrusted import object_of, parse_json, read_file

Request = TypeVar("Request")


def write_request(file: Path, body: Mapping[str, Any]) -> None:
    """Write a request, with a random number by which its record names it."""
    write_text(file, json.dumps({**body, "number": secrets.token_hex(8)}) + "\n")


def read_request_file(
    file: Path,
    parse: Callable[[Mapping[str, Any]], Request],
    *,
    error: type[NanotrainError],
    command: str,
) -> Request | None:
    """The request in a file, where it stays; None without one.

    Args:
        file: the file.
        parse: makes the request of its fields; raises a ValueError where one is wrong.
        error: class of the error.
        command: the command that writes such files, for the error.

    Raises:
        NanotrainError: of the class `error`: the file cannot be read, and was removed.
    """
    try:
        return parse(object_of(parse_json(read_file(file, follows_links=False)), "it"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as reason:
        file.unlink(missing_ok=True)
        raise error(f"{file} cannot be read", why=str(reason), fix=f"use `{command}`") from None
