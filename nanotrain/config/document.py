"""docs/config.md, made from the fields: `python -m nanotrain.config.document > docs/config.md`."""

from nanotrain.config.arguments import ALIASES
from nanotrain.config.help import KINDS, meaning, metavar
from nanotrain.config.megatron import megatron
from nanotrain.config.option import Entry, flag_of
from nanotrain.config.schema import SECTIONS, entries_of, typed

INTRODUCTION = """\
# Configuration

This page is made from the fields in `nanotrain/config/` by `python -m nanotrain.config.document`.

## Setting a value

Every field belongs to a section; flags are unique over all sections. Three equivalent forms:

    --train-iters 50            a flag: the field's name in kebab case (model.moe: with --moe-); also --train-iters=50
    train.train_iters=50        Hydra's form: section.field=value
    train: {train_iters: 50}    YAML

The forms mix in any order. Later sources override earlier ones: the default below, `train.yaml`, the files of
the groups (`model=llama7b`), the recipe (`+config=NAME`; `config=NAME` is the same), the command line; on the command
line the later argument.

- **Booleans**: `--overlap-grad-reduce`, `--no-overlap-grad-reduce`, or `parallel.overlap_grad_reduce=false`.
- **Lists** take all arguments up to the next flag or override: `--data-path 0.7 a 0.3 b` or
  `data.data_path=[0.7,a,0.3,b]`.
- **Unset**: `null`, as in `train.global_batch_size=null`.
- **Your own YAML**: `--config-dir DIR` (or `hydra.searchpath=[DIR]`) adds a folder that is laid out as `configs/` is:
  recipes in `config/`, models in `model/`. A recipe begins with `# @package _global_` and may start from another one:

        # @package _global_
        defaults:
          - tiny
          - _self_
        train:
          train_iters: 1000

- **A run again**: every run writes its resolved configuration to `config.yaml`; `+config=runs/NAME/config.yaml` reads
  it back. It includes the run folder, so the run resumes from its checkpoints; `--run-dir DIR` starts another.
- `--cfg job` prints the resolved configuration; `nanotrain config --explain ...` also prints the origin of each value.
- A setting without effect is an error. Two exceptions: where the command line switches off a setting of a YAML file,
  the setting returns to its default, as do settings that Megatron-LM ignores too (`--sequence-parallel` on one
  tensor-parallel rank); `--explain` shows it.
- Flags of Megatron-LM are accepted, converted or refused by the tables below ([from_megatron.md](from_megatron.md)).
- All mistakes of a command line are reported in one message.
- `torchrun` accepts abbreviations of its own options; no flag here is one of them.
"""


def document() -> str:
    """The page: how to set values, the aliases, and a table per section."""
    parts = [INTRODUCTION, "## Aliases\n", "| flag | means |", "|---|---|"]
    parts += [table_row(f"`{flag}`", f"`{flag_of(alias.name)} {alias.value}`") for flag, alias in ALIASES.items()]
    parts.append("| `--data-parallel-size N` | sets nothing; checks that the run has N data-parallel ranks |")
    for name, section in SECTIONS.items():
        parts += [f"\n## {name}\n", f"{(section.__doc__ or '').strip()}\n"]
        parts += ["| flag | takes | default | meaning |", "|---|---|---|---|"]
        parts += [row(entry) for entry in entries_of(name)]
    parts.append(
        "\n## Flags of Megatron-LM\n\nThey are no field of the same name; see [from_megatron.md](from_megatron.md)."
    )
    table = megatron().flags | megatron().patterns
    for kind, (title, sentence) in KINDS.items():
        parts += [f"\n### {title.capitalize()}\n\n{sentence}\n", "| flag | here |", "|---|---|"]
        parts += [table_row(f"`{flag}`", entry.meaning) for flag, entry in table.items() if entry.kind == kind]
    return "\n".join(parts) + "\n"


def row(entry: Entry) -> str:
    """One field as a row of its section's table."""
    check = entry.field.metadata["check"]
    bound = f"; {check.__doc__}" if check is not None else ""
    takes = metavar(entry).replace("{", "").replace("}", "").replace(",", ", ").replace("|", " or ")
    return table_row(f"`{entry.flag}`", takes, typed(entry.default), f"{meaning(entry)}{bound}")


def table_row(*cells: str) -> str:
    """One row of a table; a | in a cell is escaped.

    >>> print(table_row("Et|tL", "text"))
    | Et\\|tL | text |
    """
    escaped = (cell.replace("|", r"\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


if __name__ == "__main__":
    print(document(), end="")
