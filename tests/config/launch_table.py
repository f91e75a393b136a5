"""docs/megatron.md, made from published launch scripts: `python -m tests.config.launch_table >
docs/megatron.md`.
"""

import shlex
from collections import Counter

from nanotrain.config.arguments import ALIASES, FLAGS, NEGATIONS
from nanotrain.config.flags import OWN_FLAGS
from nanotrain.config.megatron import megatron
from nanotrain.config.option import flag_of
from scripts.config_page import table_row
from tests.config.launch_scripts import SCRIPTS

TITLE = """\
# Flags of published launch scripts

What every flag of {scripts} published launch scripts of Megatron-LM became here. This page is made from their arguments
(`tests/config/launch_scripts.py`) and the tables of flags by `python -m tests.config.launch_table`. The kinds are those
of [From Megatron-LM](from_megatron.md#what-becomes-of-a-flag); every flag is in [the configuration](config.md).
[Differences on purpose](from_megatron.md#differences-on-purpose) have a table with the reasons.

{summary}

| flag | scripts | kind | here |
|---|---:|---|---|"""
SAME = "same name"


def page() -> str:
    """The page: one row per flag, the most used first."""
    uses = Counter(flag for _, line in SCRIPTS.values() for flag in flags_of(line))
    rows = [
        (flag, count, *became(flag))
        for flag, count in sorted(uses.items(), key=lambda use: (-use[1], use[0]))
    ]
    kinds = Counter(kind for _, _, kind, _ in rows)
    summary = (
        f"{len(rows)} flags: "
        + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        + "."
    )
    lines = [TITLE.format(scripts=len(SCRIPTS), summary=summary)]
    lines += [
        table_row(f"`{flag}`", str(count), kind, meaning) for flag, count, kind, meaning in rows
    ]
    return "\n".join(lines) + "\n"


def flags_of(line: str) -> set[str]:
    """The flags of a script, without values."""
    return {word.partition("=")[0] for word in shlex.split(line) if word.startswith("--")}


def became(flag: str) -> tuple[str, str]:
    """The kind of a flag, and its meaning here."""
    if flag in FLAGS:
        return SAME, f"`{FLAGS[flag].key}`"
    if flag in NEGATIONS:
        return SAME, f"`{NEGATIONS[flag].key}=false`"
    if flag in ALIASES:
        return "alias", f"`{flag_of(ALIASES[flag].name)} {ALIASES[flag].value}`"
    if row := megatron().flags.get(flag):
        return row.kind, row.meaning
    return ("own", "the program's own flag") if flag in OWN_FLAGS else ("unknown", "an error")


if __name__ == "__main__":
    print(page(), end="")
