"""Modeling code of Hugging Face as text: it is parsed, and never imported or run.

    ModelingSource   the classes that a causal language model consists of
    read_source      the file of a folder, or of the installed transformers
    block_order      norms, attention, MLP and additions of a block, in the order of its forward

A fact is a pattern in the text of a class as `ast.unparse` writes it, without comments.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nanotrain.errors import HuggingFaceError
from nanotrain.untrusted import own_file, plain_text, read_file, unreadable

MAX_SOURCE_BYTES = 1 << 20  # the largest modeling file of transformers has 0.3 MB
MAX_LINE = 1000  # characters of a line in which patterns are searched
UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
NORM_NAME = re.compile("norm|^ln")
ATTENTION_NAME = re.compile("attn|attention|mixer")
IGNORED_CALLS = re.compile("drop|_set|norm_kwargs")
NEIGHBOURS = re.compile(r"\.\.\., 0?::2\]|repeat_interleave\(2")
# code for an encoder beside the decoder
ENCODER = "encoder_hidden_states"

Function = ast.FunctionDef | ast.ClassDef


@dataclass(frozen=True)
class ModelingSource:
    """The classes and functions of a file that a class of it uses.

    Attributes:
        path: where the text comes from.
        parts: definitions by name, those that `architecture` uses.
    """

    path: Path
    parts: Mapping[str, Function]

    @cached_property
    def texts(self) -> dict[str, str]:
        """The code of every part, without docstrings and comments."""
        return {name: _unparse(part) for name, part in self.parts.items()}

    def text_of(self, pattern: str) -> str:
        """The code of all parts whose name matches a pattern."""
        return "\n".join(text for name, text in self.texts.items() if re.search(pattern, name))

    @cached_property
    def text(self) -> str:
        """The code of all parts."""
        return "\n".join(self.texts.values())

    @cached_property
    def reads(self) -> dict[str, str]:
        """Entries of the configuration that the code reads -> the first place that reads them."""
        first_reads: dict[str, str] = {}
        for name, part in self.parts.items():
            for node in ast.walk(part):
                entry = _read_entry(node)
                if entry:
                    line = getattr(node, "lineno", 0)
                    first_reads.setdefault(entry, f"{name}, line {line} of {self.path.name}")
        return first_reads

    @cached_property
    def needed(self) -> set[str]:
        """Entries of `reads` that the code reads without a default, or with one of its own."""
        nodes = [node for part in self.parts.values() for node in ast.walk(part)]
        return {_read_entry(node) for node in nodes if not _has_open_default(node)} - {""}

    def mentions(self, entry: str) -> bool:
        """Whether the code has an attribute or a text of this name, of whatever object."""
        return re.search(rf"[.'\"]{re.escape(entry)}\b", self.text) is not None

    @cached_property
    def block(self) -> ast.ClassDef | None:
        """The class of a layer: the one with norms and attention beside an MLP."""
        for part in self.parts.values():
            if isinstance(part, ast.ClassDef):
                kinds = {kind for kind, _ in _events(part)}
                if {"norm", "attention", "mlp", "add"} <= kinds:
                    return part
        return None

    def constructor(self, attribute: str) -> str:
        """The expression that a block assigns to an attribute: "HeliumRMSNorm(config...)"."""
        if self.block is None:
            return ""
        return _assigned(self.block).get(attribute, "")

    @property
    def has_neighbour_pairs(self) -> bool:
        """Whether the code rotates neighbouring channels, and not the two halves of a head."""
        return bool(NEIGHBOURS.search(self.text_of("^_?(rotate|apply_rotary)")))

    def biases(self, attribute: str) -> set[str]:
        """The `bias=` of linear layers of that name: {"False"}, {"config.attention_bias"}."""
        found = set()
        pattern = rf"self\.{re.escape(attribute)} = .*nn\.Linear\((.*)\)"
        for match in re.finditer(pattern, self.text):
            bias = re.search(r"bias=([\w.]+)", match[1])
            found.add(bias[1].replace("self.config.", "config.") if bias else "True")
        return found


def read_source(folder: Path, *, kind: str, architecture: str) -> ModelingSource | None:
    """The modeling code of a folder, else of the installed transformers; None without any.

    Args:
        folder: the folder of the model.
        kind: its `model_type`.
        architecture: name of its class.

    Raises:
        HuggingFaceError: the file of the folder is no Python, or lacks the class.
    """
    paths = sorted(folder.glob("modeling_*.py")) if folder.is_dir() else []
    is_own = bool(paths)
    for path in paths or _installed_files(kind):
        try:
            definitions = _definitions(path, architecture)
        except (OSError, *UNPARSABLE) as error:
            reason = unreadable(error) if isinstance(error, OSError | ValueError) else str(error)
            fix = "fetch the folder again, or remove the file: its code is read as text only"
            raise HuggingFaceError(
                f"cannot parse {path}", why=plain_text(reason)[:200], fix=fix
            ) from None
        if architecture in definitions:
            return ModelingSource(path, _used_by(architecture, definitions))
    if is_own:
        raise HuggingFaceError(
            f"{paths[0]} has no class {architecture}",
            why="config.json names it in `architectures`",
            fix="fetch the folder again",
        )
    return None


def block_order(source: ModelingSource) -> list[tuple[str, str]]:
    """The steps of a block, in order: ("norm", "input_layernorm"), ("attention", "self_attn"), ...

    Consecutive calls of MLPs count as one step, and so do consecutive additions.
    """
    if source.block is None:
        return []
    order: list[tuple[str, str]] = []
    for kind, name in _events(source.block):
        is_repeated = bool(order) and order[-1][0] == kind and kind in ("mlp", "add")
        if is_repeated:
            continue
        order.append((kind, name))
    return order


def _installed_files(kind: str) -> list[Path]:
    """The files of transformers with the class of a `model_type`, found without importing it."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return []
    models = Path(spec.submodule_search_locations[0]) / "models"
    names = {kind, kind.removesuffix("_text")}
    files = [models / name / f"modeling_{name}.py" for name in sorted(names)]
    named = [file for file in files if file.is_file()]
    others = sorted(models.glob("*/modeling_*.py"))
    return [*named, *(file for file in others if file not in named)]


def _definitions(path: Path, architecture: str) -> dict[str, Function]:
    """The definitions of a file; none where it does not name the class."""
    text = read_file(own_file(path), most=MAX_SOURCE_BYTES)
    if f"class {architecture}".encode() not in text:
        return {}
    module = ast.parse(text)
    return {node.name: node for node in module.body if isinstance(node, Function)}


def _used_by(name: str, definitions: Mapping[str, Function]) -> dict[str, Function]:
    """A definition and all definitions that it uses, directly or indirectly."""
    used: dict[str, Function] = {}
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current in used:
            continue
        used[current] = definitions[current]
        for node in ast.walk(definitions[current]):
            if isinstance(node, ast.Name) and node.id in definitions:
                waiting.append(node.id)
    return used


def _unparse(part: ast.AST) -> str:
    try:
        lines = ast.unparse(part).splitlines()
    except RecursionError:
        return ""
    return "\n".join(line[:MAX_LINE] for line in lines)


def _read_entry(node: ast.AST) -> str:
    """The entry of `config.NAME`, `self.config.NAME` or `getattr(config, "NAME")`; else ""."""
    if isinstance(node, ast.Attribute) and _is_config(node.value):
        return node.attr
    if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "getattr":
        return ""
    has_name = len(node.args) >= 2 and isinstance(node.args[1], ast.Constant)
    if has_name and _is_config(node.args[0]):
        return str(node.args[1].value)  # type: ignore[attr-defined]
    return ""


def _has_open_default(node: ast.AST) -> bool:
    """Whether a `getattr` falls back to None or to an expression, which a rule may know."""
    if not isinstance(node, ast.Call) or len(node.args) < 3:
        return False
    default = node.args[2]
    return not isinstance(default, ast.Constant) or default.value is None


def _is_config(node: ast.AST) -> bool:
    name = getattr(node, "id", "") or getattr(node, "attr", "")
    return name in ("config", "text_config")


def _assigned(block: ast.ClassDef) -> dict[str, str]:
    """Attributes that the constructor of a class sets, and the expressions."""
    values = {}
    for node in ast.walk(block):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            values[node.targets[0].attr] = _unparse(node.value)
    return values


def _events(block: ast.ClassDef) -> list[tuple[str, str]]:
    """Calls of submodules and additions in the forward of a class, in the order of evaluation."""
    for node in block.body:
        if isinstance(node, ast.FunctionDef) and node.name == "forward":
            events: list[tuple[str, str]] = []
            for statement in _statements(node.body):
                events += _events_in(statement)
            return events
    return []


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements in their order, without the branches for an encoder."""
    for statement in body:
        if not isinstance(statement, ast.If):
            yield statement
        elif ENCODER not in _unparse(statement.test):
            yield from _statements(statement.body)
            yield from _statements(statement.orelse)


def _events_in(node: ast.AST) -> list[tuple[str, str]]:
    """The events of an expression: arguments before the call, operands before the sum."""
    events: list[tuple[str, str]] = []
    for child in ast.iter_child_nodes(node):
        events += _events_in(child)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        events.append(("add", ""))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        is_own = getattr(node.func.value, "id", "") == "self"
        name = node.func.attr
        if is_own and not IGNORED_CALLS.search(name):
            events.append((_kind_of_call(name), name))
    return events


def _kind_of_call(name: str) -> str:
    if ATTENTION_NAME.search(name) and not NORM_NAME.search(name):
        return "attention"
    return "norm" if NORM_NAME.search(name) else "mlp"
