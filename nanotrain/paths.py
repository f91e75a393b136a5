"""Paths as users type them: `~` and $VARIABLES are replaced, and addresses are refused.

expanded, local_path    the text of a path that a user typed, and the path
require_utf8            refuse a text that no file can record
require_path            refuse an address
Address                 an address of object storage; path_or_address for settings that take either
is_secret               whether a variable of the environment looks like a secret by its name
"""

import os
import re
from pathlib import Path, PosixPath

from nanotrain.errors import ConfigError
from nanotrain.storage.remote import is_address, redacted

_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})")
_SECRET = re.compile(
    "TOKEN(?!IZER)|KEY|SECRET|PASS|PWD.|_PWD|CREDENTIAL|AUTH|PRIVATE|COOKIE|WEBHOOK|NOTIFY|JWT",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Whether a variable of the environment looks like a secret by its name.

    >>> is_secret("HF_TOKEN"), is_secret("SCRATCH"), is_secret("TOKENIZER_PATH")
    (True, False, False)
    """
    return _SECRET.search(name) is not None


class Address(PosixPath):
    """An address in object storage, SCHEME://BUCKET/NAME, as a path.

    >>> str(Address("s3://bucket/web").with_name("code"))
    's3://bucket/code'
    """

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)


def require_utf8(text: str, what: str) -> str:
    """Check that a text can be written to a file.

    Python reads the bytes of an argument that are not UTF-8, as of a folder named in Latin-1, as
    lone surrogates, which no YAML file and no tokenizer takes.

    Raises:
        ConfigError: it has such bytes; `what` names the text.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{what} is {ascii(text)[:200]}",
            why="some of its bytes are not UTF-8, so no file can record it",
            fix="rename what it names in UTF-8; where the name is right, set LC_ALL=C.UTF-8",
        ) from None
    return text


def require_path(text: str, *, why: str | None = None) -> None:
    """Refuse the address of a remote file where a path of this machine is meant.

    `why` is the reason, and what to do.

    Raises:
        ConfigError: it is an address.
    """
    if not is_address(text):
        return
    scheme = text.partition(":")[0]
    usual = f"files are read and written by their path on this machine, and {scheme}:// is none"
    reason, _, fix = (why or f"{usual}; mount it and name the folder, or copy it first").partition(
        "; "
    )
    raise ConfigError(f"{redacted(text)} is no path", why=reason, fix=fix)


def expanded(text: str, *, may_be_address: bool = False, why: str | None = None) -> str:
    """Expand `~` and variables of a path that the user typed; other text is unchanged.

    Text of stored files is never expanded: it could name any variable, and the path be printed or
    sent away.

    `why` is the reason for which it cannot be an address, and what to do.

    Raises:
        ConfigError: an address of a remote file, a variable that is not set or looks like a secret,
            an unknown user.
    """
    if not may_be_address:
        require_path(text, why=why)
    for variable in _VARIABLE.findall(text):
        require_variable(variable, text=text)
    return with_home(os.path.expandvars(text))


def require_variable(variable: str, *, text: str) -> None:
    """Check that a variable of a path, NAME or {NAME}, is set and no secret.

    Raises:
        ConfigError: it is not.
    """
    name = variable.strip("{}")
    if is_secret(name):
        why = f"the name of {name} is that of a secret, and paths are printed and saved"
        raise ConfigError(
            f"{text} cannot be a path", why=why, fix="name a variable that holds a folder"
        )
    if os.path.expandvars(f"${variable}") == f"${variable}":
        why = f"{name} is not in the environment"
        raise ConfigError(
            f"{text} cannot be a path", why=why, fix=f"export {name}, or write the whole path"
        )


def with_home(text: str) -> str:
    """A path with a leading `~` or `~USER` replaced.

    Raises:
        ConfigError: an unknown user.
    """
    path = os.path.expanduser(text)
    if path.startswith("~"):
        why = f"{path.split('/')[0]} is no user's folder"
        raise ConfigError(
            f"{text} cannot be a path", why=why, fix=f"write ./{text} for a file of that name"
        )
    return path


def local_path(text: str, *, why: str | None = None) -> Path:
    """The path of a text that the user typed, as `expanded`."""
    return Path(expanded(text, why=why))


def path_or_address(text: str) -> Path:
    """A path as it is written, or an address in object storage without blanks."""
    if is_address(text) and " " not in text:
        return Address(text)
    require_path(text)
    return Path(text)
