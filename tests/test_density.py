"""Density: how much a reader has to take in at once, counted on syntax trees and not on lines.

    nodes per statement     syntax nodes over statements, without imports and docstrings
    truth value as factor   `size * has_bias`, `number *= a > b`
    wide assignment         three or more values assigned by one statement
    nested comprehension    a comprehension inside of a comprehension
    long line               more than 100 columns

Formatting changes none of them but the last one. They show where to look; a reader judges.
"""

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nanotrain"
MAX_DENSITY = 12.5  # nodes per statement of the whole package
MAX_PACKAGE_DENSITY = 13.5
MAX_COLUMNS = 100
WIDE = 3  # values of an assignment
# beginnings of names that hold a truth value
TRUTH_NAMES = ("has_", "is_", "may_", "wants_", "keeps_", "uses_", "reads_", "adds_", "shares_")
COMPREHENSIONS = (ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)


@functools.cache
def bare_tree(source: str) -> ast.Module:
    """The syntax tree without imports and docstrings, those of attributes included."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [child for child in body if not is_import_or_docstring(child)]
    return tree


def is_import_or_docstring(node: ast.AST) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text and isinstance(node.value.value, str)


def is_truth_value(node: ast.AST) -> bool:
    """Whether an operand is a truth value, by its form or by its name."""
    if isinstance(node, ast.Compare | ast.BoolOp):
        return True
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return True
    name = getattr(node, "attr", getattr(node, "id", ""))
    return name.startswith(TRUTH_NAMES)


def has_truth_factor(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return is_truth_value(node.left) or is_truth_value(node.right)
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult):
        return is_truth_value(node.value)
    return False


def is_wide_assignment(node: ast.AST) -> bool:
    """Whether one statement assigns several values that stand side by side."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return isinstance(node.targets[0], ast.Tuple) and len(node.value.elts) >= WIDE


def is_nested_comprehension(node: ast.AST) -> bool:
    if not isinstance(node, COMPREHENSIONS):
        return False
    return any(isinstance(inner, COMPREHENSIONS) for inner in ast.walk(node) if inner is not node)


def begins_with_of(node: ast.AST) -> bool:
    if isinstance(node, ast.arg):
        return node.arg.startswith("of_")
    if isinstance(node, ast.FunctionDef):
        return node.name.startswith("of_")
    is_stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    return is_stored and node.id.startswith("of_")


KINDS = {
    "truth value as factor": has_truth_factor,
    "wide assignment": is_wide_assignment,
    "nested comprehension": is_nested_comprehension,
    "name that begins with of_": begins_with_of,
}


def package_files() -> Iterator[tuple[Path, str]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        yield file, file.read_text()


@functools.cache
def sizes() -> dict[str, Counter[str]]:
    """Nodes and statements by subpackage; files of nanotrain/ itself are "nanotrain"."""
    counts: dict[str, Counter[str]] = {}
    for file, source in package_files():
        parts = file.relative_to(PACKAGE).parts
        package = parts[0] if len(parts) > 1 else "nanotrain"
        nodes = list(ast.walk(bare_tree(source)))
        statements = sum(isinstance(node, ast.stmt) for node in nodes)
        counts.setdefault(package, Counter()).update(nodes=len(nodes), statements=statements)
    return counts


def densities() -> dict[str, float]:
    """Nodes per statement by subpackage."""
    return {
        package: count["nodes"] / count["statements"]
        for package, count in sizes().items()
        if count["statements"]
    }


def total() -> Counter[str]:
    return sum(sizes().values(), Counter())


@functools.cache
def dense_places() -> dict[str, list[str]]:
    """File and line of what is counted, by kind."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for file, source in package_files():
        path = file.relative_to(ROOT).as_posix()
        for node in ast.walk(bare_tree(source)):
            for kind, is_one in KINDS.items():
                if is_one(node):
                    found[kind].append(f"{path}:{node.lineno}")
    return found


def long_lines() -> list[str]:
    return [
        f"{file.relative_to(ROOT).as_posix()}:{number}"
        for file, source in package_files()
        for number, line in enumerate(source.splitlines(), start=1)
        if len(line) > MAX_COLUMNS
    ]


def test_the_package_has_few_nodes_per_statement() -> None:
    count = total()
    assert count["nodes"] / count["statements"] <= MAX_DENSITY, count


def test_no_subpackage_is_dense() -> None:
    dense = {name: round(value, 1) for name, value in densities().items()}
    assert not {name for name, value in dense.items() if value > MAX_PACKAGE_DENSITY}, dense


@pytest.mark.parametrize("kind", KINDS)
def test_no_line_says_two_things(kind: str) -> None:
    assert not dense_places()[kind], "\n" + "\n".join(dense_places()[kind])


def test_lines_are_short() -> None:
    assert not long_lines(), "\n" + "\n".join(long_lines())


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("truth value as factor", "size = number * has_bias"),
        ("truth value as factor", "size *= tp > 1"),
        ("truth value as factor", "size = number * (not fused)"),
        ("wide assignment", "a, b, c = x, y, z"),
        ("nested comprehension", "rows = [[c for c in row] for row in table]"),
        ("name that begins with of_", "of_rows = 3"),
        ("name that begins with of_", "def find(of_rows): ..."),
    ],
)
def test_each_kind_is_seen(kind: str, line: str) -> None:
    tree = bare_tree(line)
    assert any(KINDS[kind](node) for node in ast.walk(tree))


@pytest.mark.parametrize(
    "line", ["size = number * width", "a, b = x, y", "rows = [c for c in table]", "offsets = 3"]
)
def test_plain_lines_are_not(line: str) -> None:
    assert not any(is_one(node) for node in ast.walk(bare_tree(line)) for is_one in KINDS.values())
