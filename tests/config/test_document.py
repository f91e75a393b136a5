"""docs/config.md and `--help` are made from the fields."""

from pathlib import Path

from nanotrain.config.document import document
from nanotrain.config.help import help_text
from nanotrain.config.schema import ENTRIES

ROOT = Path(__file__).parents[2]


def test_the_page_is_current():
    page = (ROOT / "docs" / "config.md").read_text()
    assert page == document(), "run: python -m nanotrain.config.document > docs/config.md"


def test_every_row_of_a_table_has_as_many_cells_as_its_head():
    num_cells = 0
    for line in filter(lambda line: line.startswith("|"), document().splitlines()):
        cells = line.replace(r"\|", "").strip("|").split("|")
        num_cells = len(cells) if cells[0] == " flag " else num_cells
        assert len(cells) == num_cells and not set("{}") & set(cells[1].partition("`")[0]), line


def test_help_and_page_name_every_flag_with_its_meaning():
    text, page = " ".join(help_text("all").replace("│", "").split()), document()
    for entry in ENTRIES.values():
        flag = f"--[no-]{entry.flag[2:]}" if entry.kind is bool else entry.flag
        assert f"{flag} " in text and f"| `{entry.flag}` |" in page
        assert entry.field.metadata["meaning"] in text and entry.field.metadata["meaning"].replace("|", r"\|") in page
