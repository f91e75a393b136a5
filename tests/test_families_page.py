"""docs/families.md is made from the tables of the families."""

from pathlib import Path

from nanotrain.interop.hf.families import FAMILIES
from nanotrain.interop.hf.tables import MODELS, read_tables
from scripts.families_page import document

PAGE = (Path(__file__).parent.parent / "docs" / "families.md").read_text()


def test_the_page_is_current() -> None:
    assert document(PAGE) == PAGE, "run: python -m scripts.families_page docs/families.md"


def test_every_family_has_the_names_of_its_models() -> None:
    assert FAMILIES.keys() == read_tables(MODELS)["supported"].keys(), (
        "nanotrain/interop/hf/models.yaml names the others"
    )
