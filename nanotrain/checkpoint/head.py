"""The configuration in a manifest, from its first lines: what a rank needs before its process groups exist.

The records of the chunks come last in a manifest. On 1,024 ranks they are 36 to 60 MB: 150,000 records take 2 s of CPU
time and 0.6 GB of memory to read and check, the first lines 0.5 ms (measured). The checksum of a manifest covers all of
it, so these lines are unverified; the first rank verifies them when the checkpoint is loaded.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanotrain.checkpoint.manifest import FORMAT, VERSION
from nanotrain.checkpoint.store import MANIFEST
from nanotrain.untrusted import object_of, parse_json, read_file

_RECORDS = re.compile(rb',\s*"tensors": \{\n')  # as `to_json` writes it; JSON text has no line break in a value


def saved_config(path: Path) -> Mapping[str, Any] | None:
    """The configuration of the run that wrote a step folder; None if only its whole manifest can show it.

    That is so for a manifest that is damaged, has another version, or is laid out in another way.
    """
    try:
        head = _RECORDS.split(read_file(path / MANIFEST, follows_links=False, until=_RECORDS), maxsplit=1)
        body = object_of(parse_json(head[0] + b"}", allow_nan=True), "it")
        is_known = len(head) == 2 and (body.get("format"), body.get("version")) == (FORMAT, VERSION)
        return object_of(body.get("config"), "config") if is_known else None
    except (OSError, ValueError):
        return None
