"""The package is layered: a package imports from lower layers only, never from its own layer or
from above.

Imports inside functions and under TYPE_CHECKING count. A new package gets its layer in FLOORS
first.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# subpackages and files of train/, the lowest first; those in one row never import each other
TRAIN_FLOORS = (
    ("batches",),
    ("parts",),
    ("run",),
    ("trackers",),
    ("step", "resume", "inputs", "checks", "same_start"),
    ("build", "step_report", "auto_layout"),
    ("tasks",),
    ("hooks",),
    ("evaluate", "fit"),
    ("open_run", "generate"),
    ("phases", "restart"),
    ("open_and_train",),
    ("main",),
    ("__main__", "spare"),
)
# packages and files of nanotrain/, the lowest first; those in one row never import each other
PACKAGE_FLOORS = (
    ("errors", "log", "quantities", "untrusted"),
    ("waiting",),
    ("storage", "system", "scheduler"),
    ("paths",),
    ("config",),
    ("topology", "runs"),
    ("comm", "data", "spec"),
    ("precision", "prepare"),
    ("kernels",),
    ("attention", "memory"),
    ("parallel.tp", "parallel.cp", "parallel.ep", "parallel.pp", "parallel.dp", "checkpoint"),
    ("model", "optim"),
    ("interop",),
    ("plan",),
    ("inference", "report"),
    ("planner", "launch", "watch"),
    ("train",),
    ("parity", "dry_run", "audit"),
    ("prove",),
    ("cli",),
    ("__main__",),
)
# the floor of each package, and the floor inside of train/
FLOORS = {
    **{name: (floor, 0) for floor, names in enumerate(PACKAGE_FLOORS, start=1) for name in names},
    **{
        f"train.{name}": (PACKAGE_FLOORS.index(("train",)) + 1, floor)
        for floor, names in enumerate(TRAIN_FLOORS, start=1)
        for name in names
    },
}
# names that only some files may use
RESERVED = {
    "torch.cuda": ("nanotrain/comm/device.py",),
    "os.environ": (
        "nanotrain/train/main.py",
        "nanotrain/train/spare.py",
        "nanotrain/system.py",
        "nanotrain/cli/",
        "nanotrain/config/compose.py",
        "nanotrain/config/user_paths.py",
        "nanotrain/comm/",
        "nanotrain/launch/",
        "nanotrain/parity/local_ranks.py",
    ),
    "hydra": ("nanotrain/config/",),
}
NO_TORCH = (
    *(
        "nanotrain/__init__.py",
        "nanotrain/cli/",
        "nanotrain/config/",
        "nanotrain/topology/",
        "nanotrain/spec/",
    ),
    *(
        "nanotrain/errors.py",
        "nanotrain/log.py",
        "nanotrain/paths.py",
        "nanotrain/system.py",
        "nanotrain/untrusted.py",
    ),
)
ALIASES = {"os.getenv": "os.environ", "os.environb": "os.environ", "os.putenv": "os.environ"}


def package_of(module: str) -> str:
    """The package of nanotrain that holds a dotted name; "" for the public names and for what has
    no layer.
    """
    parts = module.split(".")[1:]
    return next((package for end in (2, 1) if (package := ".".join(parts[:end])) in FLOORS), "")


@functools.cache
def names_in(source: str) -> tuple[tuple[int, str], ...]:
    """Line and dotted name of everything imported or written as module.attribute."""
    return tuple(walk_names(ast.parse(source)))


def walk_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (
                (node.lineno, f"{'.' * node.level}{node.module or ''}.{alias.name}")
                for alias in node.names
            )
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.lineno, f"{node.value.id}.{node.attr}"
        elif (
            isinstance(node, ast.Call)
            and node.args
            and last_name(node.func).endswith("import_module")
        ):
            yield node.lineno, str(getattr(node.args[0], "value", ""))


def last_name(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


@functools.cache
def complaint(path: str, name: str) -> str:
    """What is wrong with a file naming `name`, or nothing."""
    if name.startswith("."):
        return "a relative import hides its layer"
    if name.split(".")[0] == "nanotrain":
        here, there = package_of(path.removesuffix(".py").replace("/", ".")), package_of(name)
        if there == here and here:
            return ""
        if not there:
            return "the public names and packages without a layer are not imported from inside"
        if here and FLOORS[there] >= FLOORS[here]:
            return f"{here} (layer {FLOORS[here]}) must not import {there} (layer {FLOORS[there]})"
    for reserved, holders in RESERVED.items():
        if f"{ALIASES.get(name, name)}.".startswith(f"{reserved}.") and not path.startswith(
            holders
        ):
            return f"only {', '.join(holders)} may name {reserved}"
    return "no torch here" if name.split(".")[0] == "torch" and path.startswith(NO_TORCH) else ""


def complaints(path: str, source: str) -> list[str]:
    lines = source.splitlines()
    faults = {(line, why) for line, name in names_in(source) if (why := complaint(path, name))}
    return [f"{path}:{line}: {lines[line - 1].strip()}   <- {why}" for line, why in sorted(faults)]


def test_every_package_imports_downward_only() -> None:
    files = sorted((ROOT / "nanotrain").rglob("*.py"))
    faults = [
        text
        for file in files
        for text in complaints(file.relative_to(ROOT).as_posix(), file.read_text())
    ]
    assert not faults, "\n" + "\n".join(faults)


def test_every_file_lies_in_a_package_with_a_layer() -> None:
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in (ROOT / "nanotrain").rglob("*.py")
    ]
    homeless = [
        module for module in modules if not package_of(module) and not module.endswith("__init__")
    ]
    assert not homeless, f"give these a layer in FLOORS: {homeless}"


def import_cycles() -> list[list[str]]:
    """Groups of modules that import each other, directly or through others."""
    modules = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts): file
        for file in (ROOT / "nanotrain").rglob("*.py")
    }
    modules = {name.removesuffix(".__init__"): file for name, file in modules.items()}
    graph = {
        name: {
            target
            for _, imported in names_in(file.read_text())
            for target in (imported, imported.rpartition(".")[0])
            if target in modules and target != name
        }
        for name, file in modules.items()
    }
    reachable: dict[str, set[str]] = {}
    for name in graph:
        seen, left = set(), [name]
        while left:
            new = graph[left.pop()] - seen
            seen |= new
            left.extend(new)
        reachable[name] = seen
    return [
        sorted(n for n in reachable[name] if name in reachable[n])
        for name in graph
        if name in reachable[name]
    ]


def test_no_import_cycles() -> None:
    assert not import_cycles()


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("nanotrain/comm/group.py", "from nanotrain.train.loop import fit"),
        ("nanotrain/comm/group.py", "from nanotrain.data import batch"),  # a neighbour
        ("nanotrain/parallel/dp/layout.py", "from nanotrain.parallel import pp"),
        ("nanotrain/comm/group.py", "def later():\n    import nanotrain.train"),
        ("nanotrain/comm/group.py", "if TYPE_CHECKING:\n    from nanotrain import model"),
        ("nanotrain/comm/group.py", "importlib.import_module('nanotrain.cli.main')"),
        ("nanotrain/comm/group.py", "from ..train import loop"),
        ("nanotrain/comm/group.py", "from nanotrain import Config"),
        ("nanotrain/model/mlp.py", "torch.cuda.synchronize()"),
        ("nanotrain/model/mlp.py", "from torch.cuda import synchronize"),
        ("nanotrain/data/gpt.py", "import os\nseed = os.environ['SEED']"),
        ("nanotrain/data/gpt.py", "import os\nseed = os.getenv('SEED')"),
        ("nanotrain/data/gpt.py", "from os import environ"),
        ("nanotrain/topology/grid.py", "def later():\n    import torch"),
        ("nanotrain/config/load.py", "from torch import Tensor"),
        ("nanotrain/train/run.py", "import hydra"),
        ("nanotrain/train/parts/norms.py", "from nanotrain.train.run import Run"),
        ("nanotrain/train/step.py", "from nanotrain.train.resume import rollback"),  # a neighbour
        ("nanotrain/train/without_a_layer.py", "from nanotrain.train.run import Run"),
    ],
)
def test_the_offending_line_is_named(path: str, source: str) -> None:
    (fault,) = complaints(path, source)
    assert source.splitlines()[-1].strip() in fault


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "nanotrain/comm/group.py",
            "from nanotrain.comm.group import TrafficCounter\nfrom nanotrain.topology import grid",
        ),
        ("nanotrain/train/run.py", "import nanotrain.model, torch"),
        ("nanotrain/comm/device.py", "torch.cuda.synchronize()"),
        ("nanotrain/model/mlp.py", '"""Never torch.cuda here."""'),
        ("nanotrain/cli/main.py", "os.environ['COLUMNS']"),
        ("nanotrain/__init__.py", "from nanotrain.config.config import Config"),
    ],
)
def test_an_import_from_below_is_allowed(path: str, source: str) -> None:
    assert complaints(path, source) == []
