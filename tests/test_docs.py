"""What the pages promise is there: links, files, modules, recipes, flags; commands:
tests/test_docs_commands.py.
"""

import argparse
import io
import re
import shlex
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

import nanotrain
from nanotrain.cli import addresses
from nanotrain.cli.launch import OPTIONS, split_arguments
from nanotrain.cli.main import CHECKPOINT_COMMANDS, COMMANDS, DATA_COMMANDS, FAMILY_COMMANDS, main
from nanotrain.cli.parser import CommandParser
from nanotrain.config.arguments import ALIASES, FLAGS, NEGATIONS, SWITCHES
from nanotrain.config.flags import OWN_FLAGS
from nanotrain.config.load import load
from nanotrain.config.megatron import megatron, row_of

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
)
FLAG = re.compile(r"(?<![\w-])--(?:\[no-\])?[a-z][a-z0-9-]*[a-z0-9](?![\w-])")
# of torchrun, Slurm, kubernetes-validate and Hydra
FOREIGN = {
    *OPTIONS,
    "--standalone",
    "--multirun",
    "--nodes",
    "--gpus-per-node",
    "--ntasks-per-node",
    "--time",
    "--requeue",
    "--signal",
}
FOREIGN |= {"--exclude", "--strict"}
# of Megatron-LM, for what `export-megatron` writes
FOREIGN |= {
    "--finetune",
    "--no-load-optim",
    "--no-load-rng",
    "--use-checkpoint-args",
    "--dist-ckpt-strictness",
}
FOREIGN |= {"--ckpt-format", "--cpus", "--memory"}  # the last two are of docker run
# of vLLM, SGLang and llama.cpp
FOREIGN |= {"--model-path", "--model-impl", "--outfile", "--outtype"}
# of Megatron-LM's other models and of forks, for the bugs that they show
FOREIGN |= {
    "--label-smoothing",
    "--sft",
    "--encoder-num-layers",
    "--encoder-seq-length",
    "--language-model-type",
    "--vision-model-type",
    "--patch-dim",
}
# where a page's short file names are to be looked for: `comm/gloo.py`, `memory.py` beside
# benchmarks/README.md
HOMES = (ROOT, ROOT / "nanotrain", ROOT / "nanotrain" / "train")


def code_lines(page: Path) -> Iterator[str]:
    """Lines of indented code, those that end with a backslash joined, without their comments."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    yield from (
        line.split("  #")[0].strip() for line in text.splitlines() if line.startswith("    ")
    )


def quoted(page: Path) -> set[str]:
    """What stands between backticks."""
    return set(re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")))


@cache
def known_flags() -> frozenset[str]:
    """Every flag of the configuration, of the commands' help and of the programs in benchmarks/ and
    examples/.
    """
    configuration = {*FLAGS, *NEGATIONS, *ALIASES, *OWN_FLAGS, *SWITCHES, *megatron().flags}
    text = io.StringIO()
    groups = {"checkpoint": CHECKPOINT_COMMANDS, "data": DATA_COMMANDS, "family": FAMILY_COMMANDS}
    for words in [[name] for name in COMMANDS if name != "checkpoint"] + [
        [group, n] for group, names in groups.items() for n in names
    ]:
        with redirect_stdout(text), suppress(SystemExit):
            main([*words, "--help"])
            main([])
    programs = [
        *(ROOT / "benchmarks").glob("*.py"),
        *(ROOT / "examples").glob("*.py"),
        ROOT / "scripts/without_gpu",
    ]
    flags = set(
        FLAG.findall(
            text.getvalue() + "".join(path.read_text(encoding="utf-8") for path in programs)
        )
    )
    forms = {
        form for flag in flags for form in (flag.replace("[no-]", ""), flag.replace("[no-]", "no-"))
    }
    return frozenset(forms | configuration)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    local = [target.split("#")[0] for target in targets if "://" not in target]
    assert not [target for target in local if not (page.parent / target).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_flag_named_exists(page: Path) -> None:
    named = set(FLAG.findall(page.read_text(encoding="utf-8")))
    unknown = named - known_flags() - FOREIGN
    assert not [flag for flag in unknown if row_of(flag) is None]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_and_module_named_exists(page: Path) -> None:
    files = {
        name
        for name in quoted(page)
        if re.fullmatch(r"[\w./-]+\.py|(tests|nanotrain|benchmarks)/[\w./-]+", name)
    }
    assert not [
        name for name in files if not any((home / name).exists() for home in (*HOMES, page.parent))
    ]
    modules = set(
        re.findall(r"(?<![\w/.])nanotrain(?:\.[a-z]\w*)+", page.read_text(encoding="utf-8"))
    )
    assert not [name for name in modules if not is_module(name)]


def is_module(name: str) -> bool:
    """Whether a dotted name is a module or package of ours, or a file name (`PREFIX.nanotrain.json`
    is no hit).
    """
    module = re.sub(r"\.(configure|load_config|load_checkpoint|pretrain|ShardedModule)$", "", name)
    place = ROOT / module.replace(".", "/")
    return place.is_dir() or place.with_name(place.name + ".py").is_file()


class Parsed(Exception):
    """Arguments that a parser has accepted."""


def stop_behind_arguments(parser: CommandParser, words: list[str]) -> NoReturn:
    """In place of `parse_args`."""
    _, rest = argparse.ArgumentParser.parse_known_args(parser, words)
    assert not rest, f"{parser.prog} does not take {rest}"
    raise Parsed


def stop_behind_flags(parser: CommandParser, words: list[str]) -> NoReturn:
    """In place of `parse_known_args`: what is left is for the configuration."""
    _, rest = argparse.ArgumentParser.parse_known_args(parser, words)
    if rest:
        load(split_arguments(rest)[1], to_train=False)  # `sweep` takes torchrun's options too
    raise Parsed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_other_command_parses_and_names_files_that_exist(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other commands than `train` stop behind their parser; tests/test_docs_commands.py runs and
    plans.
    """
    monkeypatch.setattr(CommandParser, "parse_known_args", stop_behind_flags)
    monkeypatch.setattr(CommandParser, "parse_args", stop_behind_arguments)
    # nothing is requested of the addresses that are named
    monkeypatch.setattr(addresses, "is_address", lambda text: False)
    monkeypatch.setattr(addresses, "local_path", Path)
    for line in code_lines(page):
        if "..." in line or not re.match(r"(nanotrain|scripts/|python|sbatch|torchrun) ?", line):
            continue
        words = shlex.split(line)
        files = [
            word
            for word in words
            if re.fullmatch(r"(examples|scripts|benchmarks)/[\w/]+(\.py)?", word)
        ]
        assert not [file for file in files if not (ROOT / file).exists()], line
        if words[0] != "nanotrain" or words[1] == "train" or len(words) == 1:
            continue
        with suppress(Parsed):
            assert run_nanotrain(words[1:]) == 0, line


def run_nanotrain(words: list[str]) -> int:
    """A command's exit code; mistakes are errors."""
    name, *arguments = words
    with redirect_stdout(io.StringIO()):
        return {**COMMANDS, "--version": lambda _: 0}[name](arguments)


def test_the_site_has_every_page_in_one_group() -> None:
    """`make docs` builds it; the links of the pages are held above."""
    listed = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted(pages)


def test_the_python_blocks_of_the_pages_compile_and_import() -> None:
    for page in PAGES:
        for name in re.findall(
            r"^    from nanotrain import (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE
        ):
            assert set(name.split(", ")) <= set(nanotrain.__all__), page


def test_the_readme_lists_every_recipe() -> None:
    recipes = {path.stem for path in (ROOT / "configs" / "config").glob("*.yaml")}
    assert not recipes - quoted(ROOT / "README.md")


def test_every_page_is_linked_from_another() -> None:
    linked = set()
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8")):
            place = (page.parent / target).resolve()
            linked |= set(place.glob("*.md")) if place.is_dir() else {place} - {page}
    assert not [
        str(page.relative_to(ROOT)) for page in PAGES if page.parent != ROOT and page not in linked
    ]


def test_every_page_is_in_the_source_archive() -> None:
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"][
        "build"
    ]["targets"]
    # which hatch adds
    included = {ROOT / name[1:] for name in targets["sdist"]["include"]} | {ROOT / "README.md"}
    assert not [page for page in PAGES if included.isdisjoint((page, *page.parents))]


def test_pictures_are_small_and_shown() -> None:
    images = list((ROOT / "docs" / "images").iterdir())
    assert sum(image.stat().st_size for image in images) < 300_000
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert not [image.name for image in images if f"images/{image.name}" not in text]


def test_lines_of_the_changelog_fit_on_a_screen() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > 160] == []
