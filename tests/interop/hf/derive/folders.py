"""Folders of families whose rows are taken out of the tables."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers.models.llama import configuration_llama, modeling_llama

from nanotrain.interop.hf.families import FAMILIES, FOLDER_ROWS
from tests.interop.hf.configs import CONFIG_CLASSES, CONFIGS
from tests.interop.hf.reference import reference

# what happens if code of the folder is run
HARM = "raise SystemExit('code of the folder was run')\n"


def kind_of(name: str) -> str:
    """The `model_type` of a tiny configuration."""
    family, _ = CONFIGS[name]
    kind: str = getattr(transformers, CONFIG_CLASSES.get(family, f"{family}Config")).model_type
    return kind


def write_folder(folder: Path, name: str) -> Path:
    """A folder as transformers writes it, of the `model_type` of the published files."""
    reference(name).save_pretrained(folder)
    change_config(folder, model_type=kind_of(name))
    return folder


def change_config(folder: Path, **changes: object) -> None:
    """Change entries of a config.json; None removes one."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


@contextmanager
def restored_tables() -> Iterator[None]:
    """The families as they are, again after the block."""
    tables: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (table, table.copy()) for table in (FAMILIES, FOLDER_ROWS)
    ]
    yield
    for table, before in tables:
        table.clear()
        table.update(before)


def write_own_code(folder: Path, name: str = "llama") -> Path:
    """A Llama as a model that transformers lacks: its code beside config.json, under another name.

    The code ends the process if it is run.
    """
    write_folder(folder, name)
    for module, file in ((modeling_llama, "modeling"), (configuration_llama, "configuration")):
        text = Path(str(module.__file__)).read_text().replace("Llama", "Mine")
        text = text.replace('model_type = "llama"', 'model_type = "mine"')
        text = re.sub(r"^from __future__.*\n", "", text, flags=re.MULTILINE)
        (folder / f"{file}_mine.py").write_text(HARM + text)
    change_config(folder, model_type="mine", architectures=["MineForCausalLM"])
    return folder
