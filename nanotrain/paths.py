"""Paths as users write them: `~` and $VARIABLES are replaced, and addresses are refused.

expanded, local_path    the text of a path, and the path
Address                 an address of object storage; path_or_address for settings that take either
is_secret               whether the name of a variable of the environment is that of a secret
"""

import os
import re
from pathlib import Path, PosixPath

from nanotrain.errors import ConfigError
from nanotrain.storage.remote import is_address, redacted

_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})")
_SECRET = re.compile(
    "TOKEN(?!IZER)|KEY|SECRET|PASS|PWD.|_PWD|CREDENTIAL|AUTH|PRIVATE|COOKIE|WEBHOOK|NOTIFY",
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


def expanded(text: str, *, may_be_address: bool = False, why: str | None = None) -> str:
    """Expand `~` and variables of a path; other text, such as a name on the hub, is unchanged.

    `why` is the reason for which it cannot be an address, and what to do.

    Raises:
        ConfigError: an address of a remote file, a variable that is not set or looks like a secret,
            an unknown user.
    """
    if is_address(text) and not may_be_address:
        scheme = text.partition(":")[0]
        usual = f"files are read and written by their path on this machine, and {scheme}:// is none"
        reason, _, fix = (
            why or f"{usual}; mount it and name the folder, or copy it first"
        ).partition("; ")
        raise ConfigError(f"{redacted(text)} is no path", why=reason, fix=fix)
    for variable in _VARIABLE.findall(text):
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
    path = os.path.expanduser(os.path.expandvars(text))
    if path.startswith("~"):
        why = f"{path.split('/')[0]} is no user's folder"
        raise ConfigError(
            f"{text} cannot be a path", why=why, fix=f"write ./{text} for a file of that name"
        )
    return path


def local_path(text: str, *, why: str | None = None) -> Path:
    """The path of a text, as `expanded`."""
    return Path(expanded(text, why=why))


def path_or_address(text: str) -> Path:
    """Parse a local path as `expanded` does, or an address in object storage without blanks."""
    return Address(text) if is_address(text) and " " not in text else local_path(text)
