"""docs/config.md, with tables made from the fields.

Usage: `python -m scripts.config_page docs/config.md`
"""

import argparse
from pathlib import Path

from nanotrain.config.arguments import ALIASES
from nanotrain.config.help import KINDS, metavar
from nanotrain.config.megatron import megatron
from nanotrain.config.option import Entry, flag_of, section_help
from nanotrain.config.schema import SECTIONS, entries_of, typed


def document(page: str) -> str:
    """docs/config.md with new tables of aliases, fields by section and Megatron-LM's flags."""
    introduction, heading, _ = page.partition("## Aliases\n")
    parts = [introduction + heading, "| flag | means |", "|---|---|"]
    parts += [
        table_row(f"`{flag}`", f"`{flag_of(alias.name)} {alias.value}`")
        for flag, alias in ALIASES.items()
    ]
    parts.append(
        "| `--data-parallel-size N` | sets nothing; checks that the run has N data-parallel ranks |"
    )
    for name, section in SECTIONS.items():
        parts += [f"\n## {name}\n", f"{section_help(section)}\n"]
        parts += ["| flag | takes | default | meaning |", "|---|---|---|---|"]
        parts += [field_row(entry) for entry in entries_of(name)]
    parts.append(
        "\n## Flags of Megatron-LM\n\n"
        "They are no field of the same name; see [from_megatron.md](from_megatron.md)."
    )
    table = megatron().flags | megatron().patterns
    for kind, (title, sentence) in KINDS.items():
        parts += [f"\n### {title.capitalize()}\n\n{sentence}\n", "| flag | here |", "|---|---|"]
        parts += [
            table_row(f"`{flag}`", row.meaning) for flag, row in table.items() if row.kind == kind
        ]
    return "\n".join(parts) + "\n"


def field_row(entry: Entry) -> str:
    """One field as a row of its section's table."""
    check = entry.field.metadata["check"]
    bound = f"; {check.__doc__}" if check is not None else ""
    takes = metavar(entry).replace("{", "").replace("}", "").replace(",", ", ").replace("|", " or ")
    return table_row(f"`{entry.flag}`", takes, typed(entry.default), f"{entry.help}{bound}")


def table_row(*cells: str) -> str:
    """One row of a table; a | in a cell is escaped.

    >>> print(table_row("Et|tL", "text"))
    | Et\\|tL | text |
    """
    escaped = (cell.replace("|", r"\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path, help="page whose tables are written again")
    PAGE = parser.parse_args().page
    PAGE.write_text(document(PAGE.read_text()))
