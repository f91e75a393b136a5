"""Sizes: lengths of files and functions, numbers of parameters, file names that say something, a test per module."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
MAX_FILE, MAX_MEDIAN_FILE, MAX_EXAMPLE, MAX_FUNCTION = 400, 150, 80, 60  # lines
MAX_PARAMETERS, MAX_POSITIONAL = 6, 2  # without self
MAX_UNTESTED_FILE = 60  # lines of a module without a test file of its name
VAGUE_NAMES = {"base", "common", "helper", "helpers", "misc", "util", "utils"}
OPEN_ENDS = re.compile(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError)\b")  # this file names them and is not searched

Function = ast.FunctionDef | ast.AsyncFunctionDef


def files_in(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def length(file: Path) -> int:
    return len(file.read_text().splitlines())


def name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def functions_in(
    tree: ast.AST, *, holder: ast.ClassDef | None = None
) -> Iterator[tuple[Function, ast.ClassDef | None]]:
    """Every function, with the class that it is a method of."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield node, holder
        yield from functions_in(node, holder=node if isinstance(node, ast.ClassDef) else None)


def parameter_complaint(function: Function, holder: ast.ClassDef | None) -> str:
    """What is wrong with the parameters of a function; some signatures are Python's or torch's, not ours."""
    if function.name.startswith("__") and function.name != "__init__":
        return ""
    if holder and any(ast.unparse(parent).endswith("autograd.Function") for parent in holder.bases):
        return ""
    if any(ast.unparse(mark) == "triton.jit" for mark in function.decorator_list):  # which has positional ones only
        return ""
    positional = [*function.args.posonlyargs, *function.args.args]
    is_method = holder and not any(ast.unparse(mark) == "staticmethod" for mark in function.decorator_list)
    count = len(positional) - bool(is_method)
    if count > MAX_POSITIONAL:
        return f"{count} positional parameters; keyword-only after {MAX_POSITIONAL}"
    total = count + len(function.args.kwonlyargs)
    return f"{total} parameters; at most {MAX_PARAMETERS}" if total > MAX_PARAMETERS else ""


def test_no_file_is_too_long() -> None:
    files = files_in("nanotrain", "tests", "benchmarks", "examples")
    assert not [f"{name(file)}: {length(file)} lines" for file in files if length(file) > MAX_FILE]
    assert not [f"{name(file)}: {length(file)} lines" for file in files_in("examples") if length(file) > MAX_EXAMPLE]


def test_the_median_file_is_short() -> None:
    lengths = [length(file) for file in files_in("nanotrain") if file.name != "__init__.py"]
    assert median(lengths) <= MAX_MEDIAN_FILE


def test_no_function_is_too_long() -> None:
    long = [
        f"{name(file)}:{function.lineno}: {function.name}: {lines} lines"
        for file in files_in("nanotrain", "tests", "benchmarks", "examples")
        for function, _ in functions_in(ast.parse(file.read_text()))
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > MAX_FUNCTION
    ]
    assert not long, "\n" + "\n".join(long)


def test_parameters_are_few_and_named_after_the_second() -> None:
    wide = [
        f"{name(file)}:{function.lineno}: {function.name}: {complaint}"
        for file in files_in("nanotrain")
        for function, holder in functions_in(ast.parse(file.read_text()))
        if (complaint := parameter_complaint(function, holder))
    ]
    assert not wide, "\n" + "\n".join(wide)


def test_no_file_has_a_name_that_says_nothing() -> None:
    assert not [name(file) for file in files_in("nanotrain", "tests") if file.stem in VAGUE_NAMES]


def test_nothing_is_left_open() -> None:
    files = [file for file in files_in("nanotrain", "tests", "benchmarks", "examples") if file != Path(__file__)]
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
    """Where the test of a module lies: nanotrain/data/gpt.py -> data/test_gpt.py, __main__.py -> test_main.py."""
    return file.relative_to(ROOT / "nanotrain").with_name(f"test_{file.stem.strip('_')}.py")


def test_every_longer_file_has_a_test_of_its_name() -> None:
    assert not without_a_test()
