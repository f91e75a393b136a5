"""docs/megatron_tests.md: which argument sets of Megatron-LM's functional tests load here.

Usage: `python -m scripts.megatron_tests CHECKOUT > docs/megatron_tests.md`

CHECKOUT is a folder with Megatron-LM's repository. A set is a MODEL_ARGS of a model_config.yaml; its
number of ranks is that of the recipes that run it. Nothing of the checkout is executed.
"""

import re
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

import yaml

from nanotrain.config.flags import parse
from nanotrain.config.load import load
from nanotrain.config.rules.check import validate_for_world
from nanotrain.config.translate import is_same
from nanotrain.errors import ConfigError, ConfigErrors
from scripts.config_page import table_row

CASES = "tests/functional_tests/test_cases"
RECIPES = "tests/test_utils/recipes"
SUITES = ("gpt", "hybrid", "mixtral", "moe", "nemotron")  # folders of GPT-style pretraining
PROGRAMS = ("pretrain_gpt.py", "pretrain_hybrid.py")
OTHER_SUITES = {
    "bert": "BERT",
    "common": "conversion of checkpoints",
    "gpt-nemo": "NeMo's own command line",
    "mimo": "images and text",
    "multimodal-llava": "images and text",
    "t5": "T5",
}
RANKS_PER_NODE = 8
VARIABLE = re.compile(r"\$\{?(\w+)\}?")
PROGRAM = re.compile(r"TRAINING_SCRIPT_PATH=([\w./]+)")
MISSING = "for what does not exist here"  # in the error of flags of the kind "not yet"

PAGE = """\
# Command lines of Megatron-LM's functional tests

{loaded} of {total} argument sets of GPT-style pretraining in Megatron-LM's functional tests load here as they stand;
{refused} are refused. This page is made by `python -m scripts.megatron_tests CHECKOUT` from Megatron-LM at commit
`{commit}`. A set loads if `nanotrain config --megatron-defaults` accepts its arguments and its
layout fits the ranks of the test. None was trained for this page.

A set is a `MODEL_ARGS` of a `model_config.yaml`. Its number of ranks is its own `GPUS_PER_NODE`, else that of each
recipe that runs it; without a recipe it is the smallest multiple of {ranks_per_node} that the layout divides. Variables of the shell, such as
`$DATA_BLEND`, are replaced by a path.

| folder | sets | loaded | refused |
|---|---:|---:|---:|
{folders}

Not counted, because they are no GPT-style pretraining: {others}.

## Why sets are refused

A set may have several reasons. "Alone" counts the sets that have no other.

| | reason | sets | alone | in the words of the error |
|---:|---|---:|---:|---|
{reasons}

## Refused sets

| set | ranks | reasons |
|---|---|---|
{sets}"""


@dataclass(frozen=True)
class ArgumentSet:
    """The arguments of one training of a functional test."""

    name: str  # folder, and the key where it is not MODEL_ARGS
    arguments: tuple[str, ...]
    ranks: tuple[int, ...]  # the numbers of ranks that it is run on
    scope: str  # empty for GPT-style pretraining, else what it is instead

    @property
    def folder(self) -> str:
        return self.name.partition("/")[0]


@dataclass(frozen=True, order=True)
class Reason:
    """A kind of mistake, without the numbers of the set that has it."""

    text: str
    words: str  # the cause in the words of the error


def read_sets(checkout: Path) -> Iterator[ArgumentSet]:
    """The argument sets of a checkout, by name."""
    runs = read_recipes(checkout / RECIPES)
    cases = checkout / CASES
    for file in sorted(cases.glob("*/*/model_config.yaml")):
        content = yaml.safe_load(file.read_text())
        case = str(file.parent.relative_to(cases))
        programs = {program for _, program in runs[case]}
        for key in content:
            if not key.startswith("MODEL_ARGS"):
                continue
            arguments = tuple(words_of(content[key] or {}))
            suffix = "" if key == "MODEL_ARGS" else f" {key}"
            own = content.get("MODEL_ENV_VARS", {}).get(key, {}).get("GPUS_PER_NODE")
            ranks = {own} if own else {ranks for ranks, _ in runs[case]}
            yield ArgumentSet(
                case + suffix,
                arguments,
                ranks=tuple(sorted(ranks)),
                scope=scope_of(case, content.get("MODE"), programs, arguments),
            )


def read_recipes(folder: Path) -> Mapping[str, set[tuple[int, str]]]:
    """The numbers of ranks and the programs of each test, by folder and name of the test."""
    runs: dict[str, set[tuple[int, str]]] = defaultdict(set)
    for file in sorted(folder.glob("*/*.yaml")):
        text = file.read_text()
        recipe = yaml.safe_load(text)
        found = PROGRAM.search(text)
        program = found[1] if found else ""
        for product in recipe.get("products", []):
            for variant in product.get("products", [{}]):
                sizes = {**recipe["spec"], **product, **variant}
                ranks = first(sizes["nodes"]) * first(sizes["gpus"])
                for case in product["test_case"]:
                    runs[f"{sizes['model']}/{case}"].add((ranks, program))
    return runs


def first(value: Any) -> int:
    """A number, or the first of a list."""
    return int(value[0] if isinstance(value, list) else value)


def words_of(arguments: Mapping[str, Any]) -> Iterator[str]:
    """The words of a command line, from flags and their values."""
    for flag, value in arguments.items():
        yield str(flag)
        text = VARIABLE.sub(value_of_variable, str(value)).strip()
        if value is None or text in ("True", "true", ""):
            continue
        if text.startswith("[") and text.endswith("]"):
            yield from shlex.split(text[1:-1])
        else:  # the script of the tests leaves the words of a value to the shell
            yield from shlex.split(text)


def value_of_variable(found: re.Match[str]) -> str:
    """What stands for a variable of the shell: a path, or 1 for the number of a repetition."""
    return "1" if found[1] == "REPEAT" else f"/{found[1]}"


def scope_of(case: str, mode: str | None, programs: set[str], arguments: tuple[str, ...]) -> str:
    """What a test is, if it is no GPT-style pretraining; else empty."""
    folder = case.partition("/")[0]
    if folder not in SUITES:
        return OTHER_SUITES.get(folder, folder)
    if mode == "inference" or not arguments:
        return "inference"
    if mode == "rl":
        return "reinforcement learning"
    if programs and programs.isdisjoint({*PROGRAMS, ""}):
        names = sorted(program.rpartition("/")[2] for program in programs)
        return f"another program ({', '.join(names)})"
    return ""


def reasons_of(arguments: ArgumentSet) -> set[Reason]:
    """Why a set is refused; empty for a set that loads."""
    try:
        config = load([*arguments.arguments, "--megatron-defaults"]).config
        parallel = config.parallel
        model_ranks = (
            parallel.tensor_model_parallel_size
            * parallel.context_parallel_size
            * parallel.pipeline_model_parallel_size
        )
        for ranks in arguments.ranks or (lcm(RANKS_PER_NODE, model_ranks),):
            validate_for_world(config, ranks)
    except ConfigErrors as error:
        return {reason for one in error.errors for reason in read_error(one, arguments)}
    except ConfigError as error:
        return set(read_error(error, arguments))
    return set()


def read_error(error: ConfigError, arguments: ArgumentSet) -> Iterator[Reason]:
    """The kinds of mistakes of an error: one per cure of missing flags, else one."""
    if not error.what.endswith(MISSING):
        yield Reason(re.sub(r"\b\d[\d.]*\b", "N", error.what), error.why)
        return
    flags: dict[str, set[str]] = defaultdict(set)
    for argument in parse(arguments.arguments).megatron:
        is_accepted = any(is_same(text, argument.value) for text in argument.row.accepts)
        if argument.row.kind == "not yet" and not is_accepted:
            flags[argument.row.meaning].add(argument.flag)
    for cure, names in flags.items():
        yield Reason(", ".join(f"`{name}`" for name in sorted(names)), cure)


def page(sets: list[ArgumentSet], *, commit: str) -> str:
    """The page about some sets.

    Args:
        sets: all argument sets.
        commit: name of the version of Megatron-LM.
    """
    counted = [one for one in sets if not one.scope]
    reasons = {one.name: reasons_of(one) for one in counted}
    refused = [one for one in counted if reasons[one.name]]
    others = Counter(one.scope for one in sets if one.scope)
    uses = Counter(reason for found in reasons.values() for reason in found)
    alone = Counter(reason for found in reasons.values() if len(found) == 1 for reason in found)
    ordered = sorted(uses, key=lambda reason: (-uses[reason], -alone[reason], reason))
    numbers = {reason: number for number, reason in enumerate(ordered, 1)}
    reason_rows = [
        table_row(str(numbers[one]), one.text, str(uses[one]), str(alone[one]), one.words)
        for one in ordered
    ]
    set_rows = []
    for one in refused:
        ranks = ", ".join(map(str, one.ranks)) or "no recipe"
        of_set = ", ".join(str(number) for number in sorted(numbers[r] for r in reasons[one.name]))
        set_rows.append(table_row(one.name, ranks, of_set))
    return PAGE.format(
        loaded=len(counted) - len(refused),
        total=len(counted),
        refused=len(refused),
        commit=commit,
        ranks_per_node=RANKS_PER_NODE,
        folders="\n".join(folder_rows(counted, refused)),
        others=", ".join(f"{count} of {scope}" for scope, count in others.most_common()),
        reasons="\n".join(reason_rows),
        sets="\n".join(set_rows),
    )


def folder_rows(counted: list[ArgumentSet], refused: list[ArgumentSet]) -> Iterator[str]:
    """One row per folder of tests: sets, loaded, refused."""
    num_sets = Counter(one.folder for one in counted)
    num_refused = Counter(one.folder for one in refused)
    for folder, count in sorted(num_sets.items()):
        cells = (count, count - num_refused[folder], num_refused[folder])
        yield table_row(f"`{folder}`", *map(str, cells))


def commit_of(checkout: Path) -> str:
    """The commit of a checkout, from its .git folder; "unknown" without one."""
    head = checkout / ".git" / "HEAD"
    text = head.read_text().strip() if head.is_file() else ""
    if text.startswith("ref: "):
        branch = head.parent / text.removeprefix("ref: ")
        text = branch.read_text().strip() if branch.is_file() else ""
    return text or "unknown"


def main(argv: list[str]) -> int:
    """Print the page of a checkout."""
    if len(argv) != 1 or not (Path(argv[0]) / CASES).is_dir():
        print(f"usage: python -m scripts.megatron_tests CHECKOUT, with {CASES}", file=sys.stderr)
        return 2
    checkout = Path(argv[0])
    print(page(list(read_sets(checkout)), commit=commit_of(checkout)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
