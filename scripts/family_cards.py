"""docs/cards/families.json: every family beside transformers in fp64, measured by `nanotrain card`:
`python -m scripts.family_cards FILE`.
"""

import argparse
import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nanotrain.interop.hf.families import FAMILIES
from nanotrain.parity.card import conversion_of_family

COMMAND = "python -m scripts.family_cards docs/cards/families.json"
CARDS = Path(__file__).parent.parent / "docs" / "cards"


def document() -> dict[str, Any]:
    """The checks of every family, with date and versions."""
    packages = ("nanotrain", "torch", "transformers")
    families = {}
    for name in FAMILIES:
        families[name] = [asdict(check) for check in conversion_of_family(name)]
        print(name, *(check["result"] for check in families[name]), file=sys.stderr)
    return {
        "command": COMMAND,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {name: version(name) for name in packages},
        "families": families,
    }


def read_families() -> dict[str, Any]:
    """The committed file."""
    content: dict[str, Any] = json.loads((CARDS / "families.json").read_text())
    return content


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="file that is written")
    FILE = parser.parse_args().file
    FILE.write_text(json.dumps(document(), indent=1) + "\n")
