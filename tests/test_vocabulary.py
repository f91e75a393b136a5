"""Retired words stay retired: identifiers and sentences use the terms of torch and Megatron-LM.

`RETIRED_NAMES` are identifiers, found as tokens of the code. `RETIRED_PHRASES` are words of docstrings, comments,
messages and pages. Each row names the term to use instead; docs/glossary.md explains these.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = ("nanotrain", "examples", "benchmarks", "tests")
TEXT = ("nanotrain", "examples", "benchmarks", "docs", "configs", "scripts", "README.md", "CONTRIBUTING.md", "Makefile")
TEXT += ("pyproject.toml", "tests/laws", "tests/harness.py", "tests/test_floors.py", "tests/test_sizes.py")
MEASURED = "benchmarks/results/"  # tables keep the words of the day on which they were measured

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

# phrase -> the term to use instead; matched without regard to case, in text only
RETIRED_PHRASES = {
    r"start values?": "initial weights, init",
    r"roll call": "all-reduce before the step",
    r"the house|\brooms?\b|small rooms": "package",
    r"\bspeaks?\b|\bhears?\b|\bstrangers\b|\btalks? to\b|whom to|\bbooked\b": "communicates with, receives, counts",
    r"\bis told\b|\btells?\b|\bwas told\b": "receives, returns, states",
    r"first cop(y|ies)": "replica 0",
    r"\bledger\b": "traffic counter",
    r"weight pass(es)?|\bputs? off\b|\bput off\b": "W action, deferred wgrad",
    r"\bhops?\b|\btrades?\b|\btraded\b|\btrading\b": "ring step, all-to-all",
    r"\bharvest\w*|\btall(y|ies)\b": "collect, statistics",
    r"\bstretch(es)?\b": "param range",
    r"\bslots?\b": "param range in the buffer",
    r"\bdocument ids?\b": "segment ids",
    r"mistakes? in the words|the words of a command line|stray word": "arguments",
    r"\btamer\b|so many (likeliest|tokens|ranks|groups|samples|steps|layers|pieces)": "the number, named",
    r"drawn by lot|by lot\b": "at random",
    r"infinitely wrong|little reason against|out of play|uncover it": "a plain statement",
    r"on the wire|on loan|on (its|their|the) way": "in flight",
    r"\b(says|knows|knew|wants|sees|thinks|remembers|forgets)\b": "states, has, reads",
    r"\b(do|does) not (say|know|see|want)\b|\banew\b": "states, has, reads; again",
    r"\bgroup of one\b(?! rank)|\bmember number\b": "group of size 1, group of one rank",
    r"(?<!^)\b(file|line|section|token|row|object|byte|bytes|record|document|one|thread|number|dim|box) a "
    r"(rank|step|token|group|dim|row|document|microbatch|second|stage|line|layer|machine|process)\b"
    r"|\bshards? a rank\b": "per",
}
EXAMPLES = {
    "one shard file a rank": "per",
    "answers to a group of one": "group of size 1, group of one rank",
    "A room imports from the floors below": "package",
    "start values follow from the seed": "initial weights, init",
}


def files(places: tuple[str, ...], *endings: str) -> list[Path]:
    """Files of these endings in folders, and the files named themselves; not the tables of measurements."""
    found: list[Path] = []
    for place in (ROOT / name for name in places):
        found += [place] if place.is_file() else [path for path in place.rglob("*") if path.suffix in endings]
    kept = {path for path in found if path != Path(__file__) and "__pycache__" not in path.parts}
    return sorted(path for path in kept if MEASURED not in path.relative_to(ROOT).as_posix())


def names_in(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every identifier."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


def texts_in(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every comment and string of a program, or of every line of another file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(source.splitlines(), start=1)
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield from enumerate(token.string.splitlines(), start=token.start[0])


def retired_names(source: str) -> list[tuple[int, str, str]]:
    """Line, retired identifier and the term to use."""
    return [
        (line, name, instead)
        for line, name in names_in(source)
        for pattern, instead in RETIRED_NAMES.items()
        if re.fullmatch(pattern, name)
    ]


def retired_phrases(line: str) -> list[tuple[str, str]]:
    """Retired phrases of a line and the terms to use."""
    found = ((re.search(pattern, line, re.IGNORECASE), instead) for pattern, instead in RETIRED_PHRASES.items())
    return [(match[0], instead) for match, instead in found if match]


def all_retired_names() -> list[str]:
    """Every retired identifier of the tree, with its place and the term to use."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {name}   (use {instead})"
        for path in files(CODE, ".py")
        for line, name, instead in retired_names(path.read_text(encoding="utf-8"))
    ]


def all_retired_phrases() -> list[str]:
    """Every retired phrase of the tree, with its place and the term to use."""
    return [
        f"{path.relative_to(ROOT)}:{number}: {phrase!r}   (use {instead})"
        for path in files(TEXT, ".py", ".md", ".yaml", ".toml")
        for number, line in texts_in(path)
        for phrase, instead in retired_phrases(line)
    ]


def all_retired() -> list[str]:
    """Every retired word of the tree."""
    return all_retired_names() + all_retired_phrases()


def test_no_retired_identifier() -> None:
    left = all_retired_names()
    assert not left, f"{len(left)} retired identifiers\n" + "\n".join(left)


def test_no_retired_phrase() -> None:
    left = all_retired_phrases()
    assert not left, f"{len(left)} retired phrases\n" + "\n".join(left)


@pytest.mark.parametrize(("line", "instead"), EXAMPLES.items(), ids=EXAMPLES)
def test_a_retired_phrase_is_found(line: str, instead: str) -> None:
    assert instead in [use for _, use in retired_phrases(line)]


def test_a_retired_identifier_is_found() -> None:
    assert retired_names("work = start_scatter(grads, group)") == [
        (1, "start_scatter", RETIRED_NAMES["start_sum|start_scatter|start_gather"])
    ]


PACKAGES = sorted(path for path in (ROOT / "nanotrain").rglob("__init__.py"))


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: path.parent.relative_to(ROOT).as_posix())
def test_a_package_states_what_it_holds_and_what_it_does_not(path: Path) -> None:
    first, *others = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")
    assert first.endswith((".", ":")) and any(text.endswith((".", ":")) for text in others), first
