"""Retired identifiers stay retired: names in the code are the terms of torch and Megatron-LM
(docs/glossary.md).
"""

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = ("nanotrain", "examples", "benchmarks", "tests")
# identifier -> the term to use instead
RETIRED_NAMES = {
    r"all_layers|dp_layers": "data_parallel",
    r"start_sum|start_scatter|start_gather": "start_all_reduce, start_reduce_scatter, start_all_gather",
    r"exchange\w*|_?Exchange|trade\w*|_trade|start_rotate|hop|hops": "all_to_all, send_recv",
    r"_?Pending|pending|Coming|coming|Rotating|OnTheWay|on_the_way|_Arrival": "Work, work",
    r"late|_LateGrads|_LaterGrad|put_off|is_put_off|weight_pass": "deferred wgrad",
    r"\w*Core|HeadsCore|PlainCore|Running|Attended": "core attention, AttentionOutput",
    r"Choice|tally|Tally|RouterTally|harvest|RouterLoad|router_loads?": "topk_ids, topk_weights, tokens_per_expert",
    r"Cut|cuts|is_first_copy|first_copy": "Shard, shards, replica_id",
    r"Stretch|stretch|stretches|publish": "ParamRange, copy_main_to_model_params",
    r"Samples|\w+Samples|Feed|feed|ReadPlace": "Dataset, DataLoader, batch iterator, sampler config",
    r"Words|asked|said|told|answer|answers|Answer|_Answer": "arguments, reply, result",
    r"Ledger|ledger": "TrafficCounter, traffic",
    r"alone|ALONE": "single_rank, SINGLE_RANK",
    r"start_values|roll_call": "init",
    r"PARAMETERS|Role": "declarations in spec/parameters.py",
}
# the same for the package alone
RETIRED_IN_PACKAGE = {
    r"each": "a noun for the element",
    r"_?places": "a noun that says what they are",
}
# variables, parameters and functions of the package; not methods such as `LayerSizes.for_model`
RETIRED_VARIABLES = r"_?of_\w+"


def names_in(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every identifier."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


@functools.cache
def terms_for(name: str) -> tuple[str, ...]:
    """The terms to use instead of a retired identifier; none for others."""
    return tuple(
        instead for pattern, instead in RETIRED_NAMES.items() if re.fullmatch(pattern, name)
    )


def retired_names(source: str) -> list[tuple[int, str, str]]:
    """Line, retired identifier and the term to use."""
    # as in most files: tokens take longer
    if not any(map(terms_for, set(re.findall(r"[^\W\d]\w*", source)))):
        return []
    return [(line, name, instead) for line, name in names_in(source) for instead in terms_for(name)]


def all_retired() -> list[str]:
    """Every retired identifier of the tree, with its place and the term to use."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {name}   (use {instead})"
        for folder in CODE
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != Path(__file__)
        for line, name, instead in retired_names(path.read_text(encoding="utf-8"))
    ]


def test_no_retired_identifier() -> None:
    left = all_retired()
    assert not left, f"{len(left)} retired identifiers\n" + "\n".join(left)


def test_no_retired_identifier_in_the_package() -> None:
    left = [
        f"{path.relative_to(ROOT)}:{line}: {name}   (use {instead})"
        for path in sorted((ROOT / "nanotrain").rglob("*.py"))
        for line, name in names_in(path.read_text(encoding="utf-8"))
        for pattern, instead in RETIRED_IN_PACKAGE.items()
        if re.fullmatch(pattern, name)
    ]
    assert not left, "\n".join(left)


def variables_in(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of every variable, parameter and function outside of classes."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            yield statement.lineno, statement.name


def test_no_variable_is_named_after_its_owner() -> None:
    left = [
        f"{path.relative_to(ROOT)}:{line}: {name}   (use a noun that says what it is)"
        for path in sorted((ROOT / "nanotrain").rglob("*.py"))
        for line, name in variables_in(path.read_text(encoding="utf-8"))
        if re.fullmatch(RETIRED_VARIABLES, name)
    ]
    assert not left, "\n".join(left)


def test_a_variable_named_after_its_owner_is_found() -> None:
    assert [
        name for _, name in variables_in("of_rows = 1") if re.fullmatch(RETIRED_VARIABLES, name)
    ]


def test_a_retired_identifier_is_found() -> None:
    assert retired_names("work = start_scatter(grads, group)") == [
        (1, "start_scatter", RETIRED_NAMES["start_sum|start_scatter|start_gather"])
    ]


PACKAGES = sorted(path for path in (ROOT / "nanotrain").rglob("__init__.py"))


@pytest.mark.parametrize(
    "path", PACKAGES, ids=lambda path: path.parent.relative_to(ROOT).as_posix()
)
def test_a_package_states_what_it_holds_and_what_it_does_not(path: Path) -> None:
    first, *others = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split(
        "\n\n"
    )
    assert first.endswith((".", ":")) and any(text.endswith((".", ":")) for text in others), first
