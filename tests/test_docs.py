"""What the pages promise is there: links, files, modules, recipes, flags, and commands that load."""

import io
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from functools import cache
from pathlib import Path

import pytest

from nanotrain.cli import CHECKPOINT_COMMANDS, COMMANDS, main
from nanotrain.cli_launch import OPTIONS, split_arguments
from nanotrain.config.flags import ALIASES, FLAGS, NEGATIONS, OWN_FLAGS, SWITCHES
from nanotrain.config.load import load
from nanotrain.config.megatron import MEGATRON
from nanotrain.config.validate import validate_for_world

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
FLAG = re.compile(r"(?<![\w-])--(?:\[no-\])?[a-z][a-z0-9-]*[a-z0-9](?![\w-])")
# torchrun's and Slurm's own
FOREIGN = {*OPTIONS, "--standalone", "--nodes", "--gpus-per-node", "--time", "--requeue", "--signal"}
# where a page's short file names are to be looked for: `comm/gloo.py`, `memory.py` beside benchmarks/README.md
HOMES = (ROOT, ROOT / "nanotrain", ROOT / "nanotrain" / "train")
LAUNCHED = re.compile(r"(?:nanotrain train|torchrun) .*")


def code_lines(page: Path) -> Iterator[str]:
    """Lines of indented code, those that end with a backslash joined, without their comments."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    yield from (line.split("  #")[0].strip() for line in text.splitlines() if line.startswith("    "))


def quoted(page: Path) -> set[str]:
    """What stands between backticks."""
    return set(re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")))


@cache
def known_flags() -> frozenset[str]:
    """Every flag of the configuration, of the commands' help and of the programs in benchmarks/ and examples/."""
    configuration = {*FLAGS, *NEGATIONS, *ALIASES, *OWN_FLAGS, *SWITCHES, *MEGATRON}
    text = io.StringIO()
    for words in [[name] for name in COMMANDS if name != "checkpoint"] + [
        ["checkpoint", n] for n in CHECKPOINT_COMMANDS
    ]:
        with redirect_stdout(text), suppress(SystemExit):
            main([*words, "--help"])
            main([])
    programs = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").glob("*.py")]
    flags = set(FLAG.findall(text.getvalue() + "".join(path.read_text(encoding="utf-8") for path in programs)))
    forms = {form for flag in flags for form in (flag.replace("[no-]", ""), flag.replace("[no-]", "no-"))}
    return frozenset(forms | configuration)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    local = [target.split("#")[0] for target in targets if "://" not in target]
    assert not [target for target in local if not (page.parent / target).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_flag_named_exists(page: Path) -> None:
    named = set(FLAG.findall(page.read_text(encoding="utf-8")))
    assert not named - known_flags() - FOREIGN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_and_module_named_exists(page: Path) -> None:
    files = {name for name in quoted(page) if re.fullmatch(r"[\w./-]+\.py|(tests|nanotrain|benchmarks)/[\w./-]+", name)}
    assert not [name for name in files if not any((home / name).exists() for home in (*HOMES, page.parent))]
    modules = set(re.findall(r"(?<![\w/.])nanotrain(?:\.[a-z]\w*)+", page.read_text(encoding="utf-8")))
    assert not [name for name in modules if not is_module(name)]


def is_module(name: str) -> bool:
    """Whether a dotted name is a module or package of ours, or a file name (`PREFIX.nanotrain.json` is no hit)."""
    place = ROOT / name.replace(".", "/")
    return place.is_dir() or place.with_name(place.name + ".py").is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_shown_loads(page: Path) -> None:
    for line in code_lines(page):
        if not LAUNCHED.fullmatch(line) or "--config-dir" in line or "..." in line:
            continue
        program, *words = shlex.split(line)
        options, words = split_arguments(words)
        if program == "torchrun" and words[:2] != ["-m", "nanotrain.train"]:
            continue  # an example
        sizes = dict(option.split("=") for option in options if "=" in option)
        num_ranks = int(sizes.get("--nproc-per-node", 1)) * int(sizes.get("--nnodes", 1))
        validate_for_world(load(words[2 if program == "torchrun" else 1 :]).config, num_ranks)


def test_the_readme_lists_every_recipe() -> None:
    recipes = {path.stem for path in (ROOT / "configs" / "config").glob("*.yaml")}
    assert not recipes - quoted(ROOT / "README.md")


def test_every_page_is_linked_from_another() -> None:
    linked = set()
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8")):
            place = (page.parent / target).resolve()
            linked |= set(place.glob("*.md")) if place.is_dir() else {place} - {page}
    assert not [str(page.relative_to(ROOT)) for page in PAGES if page.parent != ROOT and page not in linked]
