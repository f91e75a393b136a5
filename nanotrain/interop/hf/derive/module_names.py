"""The tables `ends`, `layer` and `layers` of a row: the module of every tensor.

    add_names   the rule

A tensor is known by its shape (a router, its expert bias), by its place in the block (norms) or by
the name that known families have for it. Of two names that nothing tells apart, both orders are
choices.
"""

import re
from dataclasses import replace
from itertools import permutations

from nanotrain.interop.hf.derive.findings import Findings
from nanotrain.interop.hf.derive.tensors import (
    EXPERT,
    ModuleName,
    Vocabulary,
    context_of_stem,
    last_part,
)
from nanotrain.interop.hf.families import FAMILIES
from nanotrain.interop.hf.tensor_mapping import Shape

# modules with rotary channels, whose order may differ in files
ROTARY = ("attention.query", "attention.key")
ROTARY_MLA = ("attention.query", "attention.query_up", "attention.kv_down")
# buffers of files that are no weights
BUFFERS = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.bias")
# code that divides rows by heads, each with its query, key and value
BY_HEAD = re.compile(r"self\.num_(attention_)?heads, 3,")
MAX_UNKNOWN = 12  # tensors that a message names


def add_names(f: Findings) -> None:
    """The names of embedding, final norm and head, and of the modules of a layer."""
    f.row["layer"] = f.table.layer
    if f.table.prefix != "model.":
        f.row["prefix"] = f.table.prefix
    _add_ends(f)
    f.row["layers"] = {}
    namer = _Namer(f, Vocabulary.of(FAMILIES.values()))
    unknown: dict[str, Shape] = {}
    for stem, shape in f.table.stems.items():
        if stem.endswith(BUFFERS) or _is_constant(f, stem, shape=shape):
            continue
        name = namer.find(stem, shape)
        if name is None:
            unknown[stem] = shape
        else:
            namer.add(name)
    unknown = _choose_order(f, unknown)
    for stem, shape in list(unknown.items())[:MAX_UNKNOWN]:
        tensor = f"{f.table.layer}.{stem} {list(shape)}"
        f.lack("a module of a layer", asked_by=f"tensor {tensor}")


def _is_constant(f: Findings, stem: str, *, shape: Shape) -> bool:
    """Whether a scalar is a constant of a known family, which the row then has too."""
    if shape != ():
        return False
    for family in FAMILIES.values():
        if stem in family.constants:
            f.table_of("constants")[stem] = family.constants[stem]
            return True
    return False


def _add_ends(f: Findings) -> None:
    """The tensors outside of layers, by their shapes and names."""
    ends = f.table_of("ends")
    vocab_size, hidden = f.entries.get("vocab_size"), f.size("hidden_size")
    for name, shape in f.table.ends.items():
        stem = name.removesuffix(".weight")
        leaf = last_part(name)
        if shape == (vocab_size, hidden) and ("head" in leaf or leaf == "embed_out"):
            ends["head"] = stem
        elif shape == (vocab_size, hidden):
            ends["embedding.word"] = stem
        elif shape == (hidden,) and name.endswith(".weight"):
            ends["final_norm"] = stem
        elif "wpe" in leaf:
            ends["embedding.position"] = stem
        elif not stem.endswith((*BUFFERS, ".bias")):
            f.lack("a module outside of layers", asked_by=f"tensor {name} {list(shape)}")
    ends.setdefault("head", "lm_head")


class _Namer:
    """Finds the modules of tensors, and writes them into the row."""

    def __init__(self, f: Findings, vocabulary: Vocabulary) -> None:
        self.f = f
        self.vocabulary = vocabulary
        self.hidden = f.size("hidden_size")
        self.num_experts = f.size("num_experts")
        self.is_conv1d = "Conv1D(" in f.code
        self.has_pairs = has_neighbour_pairs(f)

    def find(self, stem: str, shape: Shape) -> ModuleName | None:
        """The modules of a tensor; None for a tensor whose name says nothing."""
        router = self._find_router(stem, shape)
        if router is not None:
            return router
        context = "mlp.experts" if len(shape) == 3 else context_of_stem(stem)
        leaf = last_part(stem)
        if context == "norm" and stem in self.f.norms:
            return ModuleName(stem, (self.f.norms[stem],))
        by_shape = self._find_by_shape(stem, context, shape=shape)
        if by_shape is not None:
            return self._as_stored(by_shape, stem, shape=shape)
        found = self.vocabulary.find(context, leaf)
        fitting = [name for name in found if self._fits(name, shape)]
        if not fitting:
            return None
        name = self._as_stored(fitting[0], stem, shape=shape)
        return self._with_groups(name)

    def _find_by_shape(self, stem: str, context: str, *, shape: Shape) -> ModuleName | None:
        """A stack of gates and up projections, or attention sinks, which a shape shows."""
        if len(shape) == 3:
            width = self.f.size("moe_intermediate_size") or self.f.size("intermediate_size")
            if set(shape[1:]) == {self.hidden, 2 * width} and "shared" not in stem:
                return ModuleName(stem, ("mlp.experts.gate", "mlp.experts.up"))
        has_sinks = "sink" in self.f.attention_code
        if context == "attention" and shape == (self.f.size("num_attention_heads"),) and has_sinks:
            return ModuleName(stem, ("attention.softmax_offset",))
        return None

    def add(self, name: ModuleName) -> None:
        """Write the modules of a tensor into the row."""
        self.f.row["layers"] |= self._rows(name)

    def _rows(self, name: ModuleName) -> dict[str, dict[str, object] | str]:
        """The value of the row for each module of a tensor."""
        is_mla = "deepseek_mla" in self.f.row["from"]
        rotary = ROTARY_MLA if is_mla else ROTARY
        rows = {}
        for module in name.modules:
            has_pairs = self.has_pairs and module in rotary
            rows[module] = name.row(pairs=has_pairs)
        return rows

    def _with_groups(self, name: ModuleName) -> ModuleName:
        """The likeliest order of the rows of queries, keys and values in one tensor.

        Others are remembered as choices.
        """
        if "attention.query" not in name.modules or len(name.modules) == 1:
            return name
        known: tuple[str | int, ...] = (name.groups, "", "num_heads", "query_groups")
        if BY_HEAD.search(self.f.code):
            known = ("num_heads",)
        groups = list(dict.fromkeys(known))
        rows = [{"layers": self._rows(replace(name, groups=group))} for group in groups]
        self.f.choices.append(rows)
        return replace(name, groups=groups[0])

    def _find_router(self, stem: str, shape: Shape) -> ModuleName | None:
        """The matrix of a router, its expert bias, or the gate of a shared expert, by shape."""
        is_mlp = context_of_stem(stem) not in ("attention", "norm")
        if self.num_experts is None or not is_mlp or EXPERT in stem:
            return None
        is_full = f"{stem}.weight" not in self.f.table.layers
        if shape == (self.num_experts, self.hidden) and not is_full:
            return ModuleName(stem, ("mlp.router",))
        if shape == (1, self.hidden):
            return ModuleName(stem, ("mlp.shared_gate",))
        if "bias" in stem and shape[-1] == self.num_experts and len(shape) <= 2:
            unsqueezed = (0,) if len(shape) == 2 else ()
            return ModuleName(
                stem, ("mlp.router.expert_bias",), is_full=True, unsqueezed=unsqueezed
            )
        return None

    def _fits(self, name: ModuleName, shape: Shape) -> bool:
        """Whether a tensor of that shape can hold the modules."""
        is_norm = name.modules[0].endswith("norm")
        is_vector = is_norm or name.modules[0].endswith(("softmax_offset", "alpha_p", "alpha_n"))
        if is_vector:
            return len(shape) == 1
        return len(shape) >= 2

    def _as_stored(self, name: ModuleName, stem: str, *, shape: Shape) -> ModuleName:
        """The modules under the name of the files, as the files store them."""
        is_stack = len(shape) == 3
        is_matrix = len(shape) == 2
        inner = [size for size in shape[1:] if size != self.hidden]
        transposed = is_matrix and self.is_conv1d
        if is_stack and inner:
            is_down = name.modules[0].endswith(".down")
            transposed = (shape[1] == self.hidden) != is_down
        return replace(
            name,
            stem=stem,
            transposed=transposed,
            is_full=f"{stem}.weight" not in self.f.table.layers,
        )


def _choose_order(f: Findings, unknown: dict[str, Shape]) -> dict[str, Shape]:
    """Assign the modules that are left to unknown matrices of an MLP; returns the matrices left.

    Matrices of one shape are gate and up in one order or the other.
    """
    hidden = f.size("hidden_size")
    inner = f.size("intermediate_size")
    widening = []
    for stem, shape in unknown.items():
        if context_of_stem(stem) == "mlp" and shape == (inner, hidden):
            widening.append(stem)
    left = [module for module in ("mlp.gate", "mlp.up") if module not in f.row["layers"]]
    if len(widening) == 1 and left:
        left = ["mlp.up"]
    if not widening or len(widening) != len(left):
        return unknown
    orders = []
    for order in permutations(widening):
        orders.append({"layers": dict(zip(left, order, strict=True))})
    f.row["layers"] |= orders[0]["layers"]
    if len(orders) > 1:
        f.choices.append(orders)
    return {stem: shape for stem, shape in unknown.items() if stem not in widening}


def has_neighbour_pairs(f: Findings) -> bool:
    """Whether the code rotates neighbouring channels."""
    if f.entries.get("rope_interleave"):
        return True
    return f.source is not None and f.source.has_neighbour_pairs
