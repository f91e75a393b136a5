"""docs/families.md, whose tables are made from those of the families: `python -m
scripts.families_page PAGE`.
"""

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import transformers

from nanotrain.interop.hf.families import FAMILIES
from nanotrain.interop.hf.tables import MODELS, read_tables
from scripts.config_page import table_row
from scripts.family_cards import read_families
from tests.interop.hf.configs import CONFIG_CLASSES, CONFIGS

HEAD = "## Supported\n"


def measured(checks: list[dict[str, Any]] | None) -> str:
    """What was measured of a family, or that it was not."""
    if checks is None:
        return "not measured"
    trip, same = checks
    if same["result"] == "not run":
        return f"not run: {same['text']}"
    numbers = ", ".join(f"{number:.1e}" for number in same["numbers"].values())
    above = "" if same["result"] == "holds" else ", above 1e-10"
    return f"{numbers}{above}; {'same bits' if trip['result'] == 'holds' else 'OTHER BITS'}"


def document(page: str) -> str:
    """docs/families.md with its tables made anew: the families, and what is not supported."""
    introduction, models = page.partition(HEAD)[0], read_tables(MODELS)
    classes = [
        getattr(transformers, CONFIG_CLASSES.get(name, f"{name}Config"))
        for name, _ in CONFIGS.values()
    ]
    tested = Counter(kind.model_type for kind in classes)
    cards = read_families()
    versions = ", ".join(f"{name} {number}" for name, number in cards["versions"].items())
    parts = [introduction + HEAD, f"Tested with transformers {transformers.__version__}.\n"]
    parts += [
        "The last column is measured on a tiny model in the sizes of transformers' class: the largest "
        "difference of logits and of a gradient in fp64, relative to the largest element, and whether the "
        f"export loads in transformers with the same bits (`{cards['command']}`, {cards['date']}, "
        f"{versions}). `nanotrain card --family NAME` makes a [card](cards.md) of one.\n"
    ]
    parts += [
        "| `model_type` | models | features | tested configurations | beside transformers |",
        "|---|---|---|---|---|",
    ]
    for name, family in FAMILIES.items():
        title, features = models["supported"].get(name, (family.architecture, ""))
        parts.append(
            table_row(
                f"`{name}`",
                title,
                features,
                str(tested[name] or f"as {family.architecture}"),
                measured(cards["families"].get(name)),
            )
        )
    parts += [
        "\n## Not supported\n",
        "Such a folder is refused, with what its family would need.\n",
    ]
    parts += ["| `model_type` | needs |", "|---|---|"]
    missing = {name: needs for name, needs in models["unsupported"].items() if name not in FAMILIES}
    return (
        "\n".join([*parts, *(table_row(f"`{name}`", needs) for name, needs in missing.items())])
        + "\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path, help="page whose tables are written again")
    PAGE = parser.parse_args().page
    PAGE.write_text(document(PAGE.read_text()))
