"""docs/families.md, whose tables are made from those of the families: `python -m
scripts.families_page PAGE`.
"""

import sys
from collections import Counter
from pathlib import Path

import transformers

from nanotrain.interop.hf.families import FAMILIES
from nanotrain.interop.hf.tables import MODELS, read_tables
from scripts.config_page import table_row
from tests.interop.hf.configs import CONFIG_CLASSES, CONFIGS

HEAD = "## Supported\n"


def document(page: str) -> str:
    """docs/families.md with its tables made anew: the families, and what is not supported."""
    introduction, models = page.partition(HEAD)[0], read_tables(MODELS)
    classes = [
        getattr(transformers, CONFIG_CLASSES.get(name, f"{name}Config"))
        for name, _ in CONFIGS.values()
    ]
    tested = Counter(kind.model_type for kind in classes)
    parts = [introduction + HEAD, f"Tested with transformers {transformers.__version__}.\n"]
    parts += ["| `model_type` | models | features | tested configurations |", "|---|---|---|---|"]
    for name, family in FAMILIES.items():
        title, features = models["supported"].get(name, (family.architecture, ""))
        parts.append(
            table_row(
                f"`{name}`", title, features, str(tested[name] or f"as {family.architecture}")
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
    PAGE = Path(sys.argv[1])
    PAGE.write_text(document(PAGE.read_text()))
