"""Sizes: lengths of files and functions, numbers of parameters, file names that say something, a
test per module.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
MAX_FILE = 500  # lines
MAX_MEDIAN_FILE = 165
MAX_EXAMPLE = 100
MAX_FUNCTION = 70
MAX_PARAMETERS, MAX_POSITIONAL = 6, 2  # without self
MAX_UNTESTED_FILE = 60  # lines of a module without a test file of its name
# the two functions that every reader opens first, and their code lines
BARE = {"model/transformer.py": ("Block.forward", 12), "train/step.py": ("train_step", 12)}
VAGUE_NAMES = {"base", "common", "helper", "helpers", "misc", "util", "utils"}
# this file names them and is not searched
OPEN_ENDS = re.compile(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError)\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def files_in(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def length(file: Path) -> int:
    return len(file.read_text().splitlines())


def code_lines(source: str, tree: ast.Module | None = None) -> set[int]:
    """Numbers of the lines that are code: no blanks, comments, docstrings or imports."""
    left_out: set[int] = set()
    for node in statements_in(tree or ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, (node.end_lineno or 0) + 1))
        if (
            isinstance(node, ast.Module | ast.ClassDef | Function)
            and ast.get_docstring(node, clean=False) is not None
        ):
            left_out.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = ((number, line.strip()) for number, line in enumerate(source.splitlines(), start=1))
    return {
        number
        for number, line in lines
        if line and not line.startswith("#") and number not in left_out
    }


def bare_lines() -> dict[str, int]:
    """Code lines of the functions of `BARE`."""
    lines = {}
    for path, (qualified, _) in BARE.items():
        source = (ROOT / "nanotrain" / path).read_text()
        for function, holder in functions_in(ast.parse(source)):
            if qualified == (f"{holder.name}.{function.name}" if holder else function.name):
                inside = range(function.body[0].lineno, (function.end_lineno or 0) + 1)
                lines[qualified] = len(code_lines(source) & set(inside))
    return lines


def name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def statements_in(tree: ast.AST) -> Iterator[ast.AST]:
    """The tree and every statement, handler and case in it."""
    yield tree
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.expr):  # most nodes, and none holds a statement
            yield from statements_in(node)


def functions_in(
    tree: ast.AST, *, holder: ast.ClassDef | None = None
) -> Iterator[tuple[Function, ast.ClassDef | None]]:
    """Every function, with the class that it is a method of."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):  # most nodes, and none holds a function
            continue
        if isinstance(node, Function):
            yield node, holder
        yield from functions_in(node, holder=node if isinstance(node, ast.ClassDef) else None)


def parameter_complaint(function: Function, holder: ast.ClassDef | None) -> str:
    """What is wrong with the parameters of a function; some signatures are Python's or torch's, not
    ours.
    """
    if function.name.startswith("__") and function.name != "__init__":
        return ""
    if holder and any(ast.unparse(parent).endswith("autograd.Function") for parent in holder.bases):
        return ""
    # which has positional ones only
    if any(ast.unparse(mark) == "triton.jit" for mark in function.decorator_list):
        return ""
    positional = [*function.args.posonlyargs, *function.args.args]
    is_method = holder and not any(
        ast.unparse(mark) == "staticmethod" for mark in function.decorator_list
    )
    count = len(positional) - bool(is_method)
    if count > MAX_POSITIONAL:
        return f"{count} positional parameters; keyword-only after {MAX_POSITIONAL}"
    total = count + len(function.args.kwonlyargs)
    return f"{total} parameters; at most {MAX_PARAMETERS}" if total > MAX_PARAMETERS else ""


def test_block_and_step_stay_bare() -> None:
    counts = bare_lines()
    assert not [row for row in BARE.values() if counts[row[0]] > row[1]], counts


def test_code_lines_leave_out_what_is_no_code() -> None:
    assert code_lines(
        '"""Text."""\nimport os\n\n# why\ndef f():\n    """Text."""\n    return os  # why\n'
    ) == {5, 7}


def test_no_file_is_too_long() -> None:
    files = files_in("nanotrain", "tests", "benchmarks", "examples")
    assert not [f"{name(file)}: {length(file)} lines" for file in files if length(file) > MAX_FILE]
    assert not [
        f"{name(file)}: {length(file)} lines"
        for file in files_in("examples")
        if length(file) > MAX_EXAMPLE
    ]


def test_the_median_file_is_short() -> None:
    lengths = [length(file) for file in files_in("nanotrain")]
    assert median(lengths) <= MAX_MEDIAN_FILE


def test_no_function_is_too_long() -> None:
    long = [
        f"{name(file)}:{function.lineno}: {function.name}: {lines} lines"
        for file in files_in("nanotrain", "tests", "benchmarks", "examples")
        if length(file) > MAX_FUNCTION
        for function, _ in functions_in(tree_of(file))
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > MAX_FUNCTION
    ]
    assert not long, "\n" + "\n".join(long)


def test_parameters_are_few_and_named_after_the_second() -> None:
    wide = [
        f"{name(file)}:{function.lineno}: {function.name}: {complaint}"
        for file in files_in("nanotrain")
        for function, holder in functions_in(tree_of(file))
        if (complaint := parameter_complaint(function, holder))
    ]
    assert not wide, "\n" + "\n".join(wide)


def test_no_file_has_a_name_that_says_nothing() -> None:
    assert not [name(file) for file in files_in("nanotrain", "tests") if file.stem in VAGUE_NAMES]


def test_nothing_is_left_open() -> None:
    files = [
        file
        for file in files_in("nanotrain", "tests", "benchmarks", "examples")
        if file != Path(__file__)
    ]
    left = [
        f"{name(file)}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if OPEN_ENDS.search(line)
    ]
    assert not left, "\n" + "\n".join(left)


def without_a_test() -> list[str]:
    """Modules of more than 60 lines without a test file of their name in the mirrored folder."""
    return [
        name(file)
        for file in files_in("nanotrain")
        if length(file) > MAX_UNTESTED_FILE and not (ROOT / "tests" / mirrored_test(file)).is_file()
    ]


def mirrored_test(file: Path) -> Path:
    """Where the test of a module lies: nanotrain/data/gpt.py -> data/test_gpt.py, __main__.py ->
    test_main.py.
    """
    return file.relative_to(ROOT / "nanotrain").with_name(f"test_{file.stem.strip('_')}.py")


def test_every_longer_file_has_a_test_of_its_name() -> None:
    assert not without_a_test()
