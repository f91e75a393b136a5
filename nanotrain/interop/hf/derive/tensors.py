"""Names of tensors in files -> modules of a layer, by the names that known families have.

TensorTable     the tensors of a folder by templates: {layer} and {expert} in place of numbers
read_table      the table of names and shapes
Vocabulary      what known families call a module
ModuleName      a tensor with the modules that it holds
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nanotrain.interop.hf.names import HFName, Naming
from nanotrain.interop.hf.tensor_mapping import Interleave, Shape

LEAVES = (".weight", ".bias")
EXPERT = "{expert}"
ATTENTION = re.compile("attn|attention|mixer")
SHARED = re.compile("shared")
MLP = re.compile("mlp|feed_forward|ffn|moe|expert|router|gate")
NORM = re.compile("norm|^ln|_ln")


@dataclass(frozen=True)
class TensorTable:
    """The tensors of a folder.

    Attributes:
        layer: prefix of the tensors of a layer, with {layer}.
        ends: shapes of tensors outside of layers, by name.
        layers: shapes of tensors of layers, by name in a layer with {expert}.
        num_later_layers: number of layers after the last one of the model, which are left out.
    """

    layer: str
    ends: Mapping[str, Shape]
    layers: Mapping[str, Shape]
    num_later_layers: int = 0

    @property
    def prefix(self) -> str:
        """The prefix of all names but the head's: "model."."""
        return f"{self.layer.partition('.')[0]}."

    @property
    def stems(self) -> dict[str, Shape]:
        """Shapes of tensors of layers by name without ".weight", without the biases of weights."""
        stems = {}
        for name, shape in self.layers.items():
            if not name.endswith(".bias") or name.removesuffix(".bias") not in self._weights:
                stems[name.removesuffix(".weight")] = shape
        return stems

    @property
    def _weights(self) -> set[str]:
        return {name.removesuffix(".weight") for name in self.layers if name.endswith(".weight")}

    def has_bias(self, stem: str) -> bool:
        """Whether a matrix of that name has a bias."""
        return f"{stem}.bias" in self.layers


def read_table(shapes: Mapping[str, Shape], *, num_layers: int | None) -> TensorTable | None:
    """The table of tensors by name; None where no name has the number of a layer.

    Layers of multi-token prediction have the numbers from `num_layers` on.
    """
    numbered = {}
    for name in shapes:
        match = re.match(r"((?:[A-Za-z_]\w*\.)*?(?:layers|h|blocks|layer))\.(\d+)\.(.+)", name)
        if match:
            numbered[name] = match
    if not numbered:
        return None
    prefix, _ = Counter(match[1] for match in numbered.values()).most_common(1)[0]
    ends: dict[str, Shape] = {}
    layers: dict[str, Shape] = {}
    later = set()
    for name, shape in shapes.items():
        match = numbered.get(name)
        if match is None or match[1] != prefix:
            ends[name] = shape
            continue
        number = int(match[2])
        if num_layers is not None and number >= num_layers:
            later.add(number)
            continue
        template = re.sub(r"(experts?)\.\d+\.", rf"\1.{EXPERT}.", match[3])
        layers.setdefault(template, shape)
    return TensorTable(f"{prefix}.{{layer}}", ends, layers, num_later_layers=len(later))


# parts of attention whose modules have the same names as modules of attention
IN_ATTENTION = ("attention.indexer", "attention.compressor")


@dataclass(frozen=True)
class ModuleName:
    """The modules that a tensor holds, and how; `HFName` has the same fields."""

    stem: str
    modules: tuple[str, ...]
    transposed: bool = False
    groups: str | int = ""
    unsqueezed: tuple[int, ...] = ()
    is_full: bool = False

    def row(self, *, pairs: bool = False) -> dict[str, object] | str:
        """The value of the row for each of the modules."""
        values: dict[str, object] = {}
        if len(self.modules) > 1:
            values["fused"] = list(self.modules)
        for name in ("transposed", "groups", "is_full"):
            if getattr(self, name):
                values[name] = getattr(self, name)
        if self.unsqueezed:
            values["unsqueezed"] = list(self.unsqueezed)
        if pairs:
            values["has_neighbour_pairs"] = True
        return {"name": self.stem, **values} if values else self.stem


@dataclass
class Vocabulary:
    """The names of modules in known families.

    Attributes:
        meanings: (context, last part of a name) -> how often it holds which modules.
    """

    meanings: dict[tuple[str, str], Counter[ModuleName]] = field(default_factory=dict)

    @classmethod
    def of(cls, families: Iterable[Naming]) -> "Vocabulary":
        """The names of known families."""
        vocabulary = cls()
        for family in families:
            for table in (family.layers, *family.other_layers):
                for module, name in table.items():
                    vocabulary._add(module, name)
        return vocabulary

    def _add(self, module: str, name: HFName) -> None:
        """Count one name of a known family."""
        module = module.removesuffix(".weight").removesuffix(".bias")
        modules = tuple(name.fused) or (module,)
        is_interleaved = tuple(name.interleaved) != Interleave()
        if is_interleaved or module.startswith(("second.", "layer_input")):
            return
        leaf = last_part(name.name)
        meaning = ModuleName("", modules, groups=name.groups, unsqueezed=tuple(name.unsqueezed))
        key = (context_of_module(module), leaf)
        self.meanings.setdefault(key, Counter())[meaning] += 1

    def find(self, context: str, leaf: str) -> list[ModuleName]:
        """The meanings of a name in a context, the most frequent first."""
        found = self.meanings.get((context, leaf), Counter())
        if not found and context in ("mlp.shared", "mlp.experts"):
            return [_as_expert_modules(name, context) for name in self.find("mlp", leaf)]
        return [name for name, _ in found.most_common()]


def _as_expert_modules(name: ModuleName, context: str) -> ModuleName:
    """The same name with modules of experts in place of modules of an MLP."""
    modules = tuple(module.replace("mlp", context, 1) for module in name.modules)
    return ModuleName("", modules)


def last_part(name: str) -> str:
    """The last part of a name without ".weight": "self_attn.q_proj" -> "q_proj"."""
    return name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]


def context_of_module(module: str) -> str:
    """The part of a layer that a module belongs to: "attention", "mlp.shared", "norm"."""
    for context in (*IN_ATTENTION, "mlp.experts", "mlp.shared", "mlp.router", "mlp.activation"):
        if module.startswith(context + ".") or module == context:
            return context
    if module.endswith("_norm") and "." not in module:
        return "norm"
    return module.partition(".")[0]


def context_of_stem(stem: str) -> str:
    """The part of a layer that a tensor belongs to, by the parts of its name."""
    parts = stem.split(".")
    if len(parts) == 1 and NORM.search(stem):
        return "norm"
    for context in IN_ATTENTION:
        if last_part(context) in parts[:-1]:
            return context
    if any(ATTENTION.search(part) and not NORM.search(part) for part in parts[:-1]):
        return "attention"
    if any(SHARED.search(part) for part in parts[:-1]):
        return "mlp.shared"
    if any("expert" in part for part in parts[:-1]) or EXPERT in stem:
        return "mlp.experts"
    if "act" in parts[-2:][0]:
        return "mlp.activation"
    return "mlp" if any(MLP.search(part) for part in parts) else "other"
