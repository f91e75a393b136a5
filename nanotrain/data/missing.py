"""The error for a corpus that does not exist: what the path is instead, and which command fixes it.

--data-path story.txt       a text: prepare it
--data-path folder          a folder: its pairs, or prepare the texts in it
--data-path folder/pre      neither: the pairs beside it, if there are any
"""

from itertools import islice
from pathlib import Path

from nanotrain.data.token_format import bin_path, idx_path
from nanotrain.errors import DataError

_SHOWN = 4  # pairs that are named


def missing_pair(prefix: Path) -> DataError:
    """The error for a prefix of which the .bin, the .idx or both are missing."""
    missing, other = sorted((idx_path(prefix), bin_path(prefix)), key=Path.is_file)
    what = f"{missing} does not exist"
    why = "--data-path names prefixes of .bin/.idx pairs"
    if other.is_file():
        return DataError(what, why=f"{why}; {other.name} is there", fix="check the path, or copy the missing file")
    if prefix.is_file():
        return DataError(what, why=f"{why}; {prefix} is a file", fix=_prepare(prefix, prefix.with_suffix("")))
    why = f"{why}; {other.name} is missing too"
    folder, fix = prefix.parent, "check the path, or write the pair with `nanotrain prepare --output PREFIX`"
    if prefix.is_dir():
        folder, fix = prefix, _prepare(prefix, prefix.with_name(prefix.name + "-tokens"))
    if names := _pairs(folder):
        fix = f"write --data-path {names[0]}" if len(names) == 1 else "name one of them, or several to blend them"
        why = f"{why}; the folder {folder} has {', '.join(map(str, names))}"
    return DataError(what, why=why, fix=fix)


def _prepare(text: Path, output: Path) -> str:
    """The commands that prepare a text or a folder of texts and train on it."""
    return (
        f"make token files: nanotrain prepare --input {text} --output {output} --tokenizer bpe:8192, "
        f"then train with --data-path {output}"
    )


def _pairs(folder: Path) -> list[Path]:
    """Prefixes of the first pairs in a folder."""
    try:
        found = sorted(path.with_suffix("") for path in islice(folder.glob("*.idx"), 100))
    except OSError:  # a folder that may not be listed
        return []
    return [prefix for prefix in found if bin_path(prefix).is_file()][:_SHOWN]
