"""The house has floors: a room imports from lower floors only, never from a neighbour or from above.

Lazy imports and those under TYPE_CHECKING count. A new room gets its floor here first.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {
    "cli": 12,
    **dict.fromkeys(["planner", "parity"], 11),
    "train": 10,
    "inference": 9,
    **dict.fromkeys(["model", "optim", "hf"], 8),
    **dict.fromkeys(["parallel.tp", "parallel.cp", "parallel.ep", "parallel.pp", "parallel.dp", "checkpoint"], 7),
    **dict.fromkeys(["kernels", "memory"], 6),
    **dict.fromkeys(["precision", "prepare"], 5),
    **dict.fromkeys(["comm", "data"], 4),
    **dict.fromkeys(["topology", "runs"], 3),
    "config": 2,
    **dict.fromkeys(["errors", "log"], 1),
}
# what only some files may name: the rest hears of it through them
RESERVED = {
    "torch.cuda": ("nanotrain/comm/device.py",),
    "os.environ": ("nanotrain/train/__main__.py", "nanotrain/cli.py", "nanotrain/config/compose.py", "nanotrain/comm/"),
    "hydra": ("nanotrain/config/",),
}
NO_TORCH = ("nanotrain/__init__.py", "nanotrain/cli.py", "nanotrain/errors.py", "nanotrain/log.py", "nanotrain/config/")
NO_TORCH += ("nanotrain/topology/",)
ALIASES = {"os.getenv": "os.environ", "os.environb": "os.environ", "os.putenv": "os.environ"}


def room_of(module: str) -> str:
    """The room of nanotrain that a dotted name lies in; "" for the public face and what has no floor."""
    parts = module.split(".")[1:]
    return next((room for end in (2, 1) if (room := ".".join(parts[:end])) in FLOORS), "")


def names_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported or written as module.attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{'.' * node.level}{node.module or ''}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.lineno, f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            yield node.lineno, str(getattr(node.args[0], "value", ""))


def complaint(path: str, name: str) -> str:
    """What is wrong with a file naming `name`, or nothing."""
    if name.startswith("."):
        return "a relative import hides its floor"
    if name.split(".")[0] == "nanotrain":
        here, there = room_of(path.removesuffix(".py").replace("/", ".")), room_of(name)
        if there == here and here:
            return ""
        if not there:
            return "the public face and rooms without a floor are not imported from inside"
        if here and FLOORS[there] >= FLOORS[here]:
            return f"{here} (floor {FLOORS[here]}) must not import {there} (floor {FLOORS[there]})"
    for reserved, holders in RESERVED.items():
        if f"{ALIASES.get(name, name)}.".startswith(f"{reserved}.") and not path.startswith(holders):
            return f"only {', '.join(holders)} may name {reserved}"
    return "no torch here" if name.split(".")[0] == "torch" and path.startswith(NO_TORCH) else ""


def complaints(path: str, source: str) -> list[str]:
    lines = source.splitlines()
    found = {(line, why) for line, name in names_in(ast.parse(source)) if (why := complaint(path, name))}
    return [f"{path}:{line}: {lines[line - 1].strip()}   <- {why}" for line, why in sorted(found)]


def test_every_room_imports_downward_only() -> None:
    files = sorted((ROOT / "nanotrain").rglob("*.py"))
    found = [text for file in files for text in complaints(file.relative_to(ROOT).as_posix(), file.read_text())]
    assert not found, "\n" + "\n".join(found)


def test_every_file_lies_in_a_room_with_a_floor() -> None:
    modules = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in (ROOT / "nanotrain").rglob("*.py")]
    homeless = [module for module in modules if not room_of(module) and not module.endswith("__init__")]
    assert not homeless, f"give these a floor in FLOORS: {homeless}"


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("nanotrain/comm/group.py", "from nanotrain.train.loop import fit"),
        ("nanotrain/comm/group.py", "from nanotrain.data import batch"),  # a neighbour
        ("nanotrain/parallel/dp/layout.py", "from nanotrain.parallel import pp"),
        ("nanotrain/comm/group.py", "def later():\n    import nanotrain.train"),
        ("nanotrain/comm/group.py", "if TYPE_CHECKING:\n    from nanotrain import model"),
        ("nanotrain/comm/group.py", "importlib.import_module('nanotrain.cli')"),
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
    ],
)
def test_the_offending_line_is_named(path: str, source: str) -> None:
    (found,) = complaints(path, source)
    assert source.splitlines()[-1].strip() in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "nanotrain/comm/group.py",
            "from nanotrain.comm.traffic import TrafficCounter\nfrom nanotrain.topology import grid",
        ),
        ("nanotrain/train/run.py", "import nanotrain.model.build, torch"),
        ("nanotrain/comm/device.py", "torch.cuda.synchronize()"),
        ("nanotrain/model/mlp.py", '"""Never torch.cuda here."""'),
        ("nanotrain/cli.py", "os.environ['COLUMNS']"),
        ("nanotrain/__init__.py", "from nanotrain.config.config import Config"),
    ],
)
def test_the_way_down_is_free(path: str, source: str) -> None:
    assert complaints(path, source) == []
