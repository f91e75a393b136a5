"""The place of each tensor of nanotrain in the tensors of a `torch_dist` checkpoint.

    Placement         all places of a model, found among the keys of a checkpoint
    Placement.read    one box of a tensor of nanotrain, wherever its rows lie

A tensor of Megatron-LM has the same columns, and the rows of several tensors of nanotrain: one
after another (gate and up of an MLP), or by query group (queries, keys and values). Rotary channels
of MLA are in another order. In front it may have a dim of layers and one of experts; other
checkpoints have the number in the key instead.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanotrain.config.model import ModelConfig
from nanotrain.errors import CheckpointError
from nanotrain.interop.dcp.tensors import TensorFolder
from nanotrain.interop.hf.names import checkpoint_shapes
from nanotrain.interop.megatron.names import (
    EXPERT_BIAS,
    EXPERTS,
    TABLES,
    Block,
    block_modules,
    blocks,
    end_modules,
    leaves,
    middle_dims,
    num_row_groups,
    rotary_pairs,
)
from nanotrain.interop.megatron.rows import RotaryPairs, Rows
from nanotrain.quantities import count_of
from nanotrain.spec.boxes import Box
from nanotrain.spec.shape import ModelShape

Shape = tuple[int, ...]
Read = Callable[[str, Box], Tensor]  # a box of a tensor of Megatron-LM, by its key
EMBEDDING = "embedding.word_embeddings.weight"
STATE = "optimizer."  # beginning of the keys of optimizer state
SHOWN = 4  # keys that an error lists


@dataclass(frozen=True)
class Prefix:
    """A beginning of keys."""

    text: str
    lead: Shape = ()  # index of the layer, in tensors of all layers


@dataclass(frozen=True)
class Location:
    """The place of a nanotrain tensor, or of one expert of it, in a tensor of Megatron-LM."""

    key: str
    lead: Shape  # indices in the first dims: layer, expert
    rows: Rows | RotaryPairs
    shape: Shape  # of the tensor of Megatron-LM, without these first dims
    middle: Shape = ()  # its dims between rows and columns


class Placement:
    """All places of a model in a checkpoint.

    Args:
        model_config: the model.
        folder: the checkpoint.

    Raises:
        CheckpointError: it lacks a tensor of the model, has one in another shape, or has one that
            the model lacks.
    """

    def __init__(self, model_config: ModelConfig, folder: TensorFolder) -> None:
        self.folder = folder
        self.sizes = checkpoint_shapes(model_config)
        self.shape = ModelShape.of(model_config)
        self.prefix = find_prefix(folder)
        self.locations: dict[str, tuple[Location, ...]] = {}
        self._missing: list[str] = []
        self._found_keys: set[str] = set()  # keys that were found, also second ones
        for module, part in end_modules(self.shape).items():
            self._add_module([module], [part], prefixes=[Prefix("")])
        for block in blocks(self.shape):
            self._add_block(block)
        for depth in range(self.shape.num_mtp_layers):
            for module, (part,) in TABLES["mtp"].items():
                self._add_module(
                    [module], [f"mtp.{depth}.{part}"], prefixes=[Prefix(f"mtp.layers.{depth}.")]
                )
        self._check()

    def read(self, name: str, box: Box, *, read: Read | None = None) -> Tensor:
        """One box of a tensor of nanotrain.

        Args:
            name: name of the tensor in nanotrain's checkpoints.
            box: the box.
            read: returns a box of a weight's state by the key of the weight; None: of the weight.

        Raises:
            CheckpointError: a chunk is damaged.
        """
        read = read or self.folder.read
        locations = self.locations[name]
        if not is_expert(name):
            return read_rows(locations[0], box, read=read)
        experts = []
        inner = Box(box.start[1:], box.stop[1:])
        for expert in range(box.start[0], box.stop[0]):
            experts.append(read_rows(locations[expert], inner, read=read))
        return torch.stack(experts)

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.shape.num_layers

    @property
    def stored_keys(self) -> list[str]:
        """The keys of all tensors of the model, each once."""
        keys: dict[str, None] = {}
        for locations in self.locations.values():
            keys |= dict.fromkeys(location.key for location in locations)
        return list(keys)

    def _add_block(self, block: Block) -> None:
        """The places of a layer."""
        prefixes = [Prefix(block.theirs)]
        if block.stacked is not None:
            prefixes.insert(0, Prefix(block.stacked, (block.layer,)))
        by_parts: dict[tuple[str, ...], list[str]] = {}
        for module, parts in block_modules(self.shape, block.layer).items():
            by_parts.setdefault(tuple(parts), []).append(module)
        for parts, names in by_parts.items():
            others = [*names, *TABLES["other_names"].get(names[0], [])]
            self._add_module(
                others,
                [block.ours + part for part in parts],
                prefixes=prefixes,
                num_groups=num_row_groups(self.shape, names[0]),
                pairs=rotary_pairs(self.shape, parts[0], layer=block.layer),
            )
        name = f"router/{block.ours}{EXPERT_BIAS}"
        if name in self.sizes:
            self._add_places([EXPERT_BIAS], {name: self.sizes[name]}, prefixes=prefixes)

    def _add_module(
        self,
        modules: Sequence[str],
        parts: Sequence[str],
        *,
        prefixes: Sequence[Prefix],
        num_groups: int = 1,
        pairs: RotaryPairs | None = None,
    ) -> None:
        """Add the places of nanotrain modules, `parts`, which one Megatron-LM module joins."""
        for leaf in leaves(modules[0]):
            sizes = {}
            for part in parts:
                name = f"model/{part}{leaf}"
                if name in self.sizes:
                    sizes[name] = self.sizes[name]
            if sizes:
                keys = [module + leaf for module in modules]
                self._add_places(keys, sizes, prefixes=prefixes, num_groups=num_groups, pairs=pairs)

    def _add_places(
        self,
        keys: Sequence[str],
        sizes: Mapping[str, Shape],
        *,
        prefixes: Sequence[Prefix],
        num_groups: int = 1,
        pairs: RotaryPairs | None = None,
    ) -> None:
        """Add the places of tensors whose rows alternate by group in one tensor of Megatron-LM."""
        numbered: list[int | None] = [None]
        own_sizes = dict(sizes)
        if keys[0].startswith(EXPERTS):
            num_experts = next(iter(sizes.values()))[0]
            numbered = list(range(num_experts))
            own_sizes = {name: size[1:] for name, size in sizes.items()}
        num_rows = sum(size[0] for size in own_sizes.values())
        middle = middle_dims(keys[0])
        columns = (*middle, *next(iter(own_sizes.values()))[1:])
        for expert in numbered:
            found = self._find_key(keys, prefixes=prefixes, expert=expert)
            if found is None:
                self._missing.append(prefixes[0].text + keys[0])
                return
            key, front = found
            first = 0
            for name, size in own_sizes.items():
                per_group = size[0] // num_groups
                rows: Rows | RotaryPairs = Rows(first, per_group, num_rows // num_groups)
                if pairs is not None:
                    rows = pairs
                location = Location(key, front, rows, (num_rows, *columns), middle)
                self.locations[name] = (*self.locations.get(name, ()), location)
                first += per_group

    def _find_key(
        self, keys: Sequence[str], *, prefixes: Sequence[Prefix], expert: int | None
    ) -> tuple[str, Shape] | None:
        """The key that the checkpoint has, and the indices in its first dims."""
        found = []
        for key in keys:
            for prefix in prefixes:
                for own, index in expert_names(key, expert):
                    full = f"{self.prefix}{prefix.text}{own}"
                    if full in self.folder.tensors:
                        found.append((full, prefix.lead + index))
        self._found_keys.update(key for key, _ in found)
        return found[0] if found else None

    def _check(self) -> None:
        """Check that the model and the checkpoint have the same tensors, in the same shapes."""
        complaints = []
        if self._missing:
            complaints.append(f"missing: {list_some(self._missing)}")
        unplaced = [name for name in self.sizes if name not in self.locations]
        if unplaced and not self._missing:
            complaints.append(f"without a known name in Megatron-LM: {list_some(unplaced)}")
        wrong = []
        for locations in self.locations.values():
            for location in locations:
                size = self.folder.tensors[location.key].shape
                if size[len(location.lead) :] != location.shape:
                    wrong.append(f"{location.key} is {size} and should end in {location.shape}")
        if wrong:
            complaints.append(f"mis-shaped: {list_some(wrong)}")
        others = [
            key for key in self.folder.tensors if key not in self._found_keys and is_weight(key)
        ]
        if others:
            complaints.append(f"unknown: {list_some(others)}")
        if complaints:
            raise CheckpointError(
                f"the tensors in {self.folder.folder} are not those of the model that its "
                "arguments describe",
                why="; ".join(complaints),
                fix="import a checkpoint with the arguments of its own run; parts that are unknown "
                "here have no place in nanotrain",
            )


def read_rows(location: Location, box: Box, *, read: Read) -> Tensor:
    """One box of a nanotrain tensor, or of one expert of it, from its rows in Megatron-LM."""
    pieces = []
    for run in location.rows.runs(box.start[0], box.stop[0]):
        zeros = [0] * len(location.middle)
        low = (*location.lead, run.first, *zeros, *box.start[1:])
        lead = [index + 1 for index in location.lead]
        high = (*lead, run.last, *location.middle, *box.stop[1:])
        values = read(location.key, Box(low, high))
        pieces.append(values.reshape(-1, *box.shape[1:])[:: run.step])
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def embedding_rows(folder: TensorFolder) -> int:
    """The rows of the word embedding, padding included.

    Raises:
        CheckpointError: there is none, or it is no matrix.
    """
    key = find_prefix(folder) + EMBEDDING
    shape = folder.tensors[key].shape
    if len(shape) != 2:
        raise CheckpointError(
            f"{key} in {folder.folder} has the shape {shape}",
            why="a word embedding has two dims, tokens and channels",
            fix="copy the checkpoint again, or use another step of the run",
        )
    return shape[0]


def find_prefix(folder: TensorFolder) -> str:
    """The prefix of the keys of weights, such as "module." of a model that was not unwrapped.

    Raises:
        CheckpointError: there is no word embedding.
    """
    for key in folder.tensors:
        if key.endswith(EMBEDDING) and is_weight(key):
            return key.removesuffix(EMBEDDING)
    raise CheckpointError(
        f"{folder.folder} has no tensor {EMBEDDING}",
        why=f"it has {count_of(len(folder.tensors), 'tensor')}, and a GPT has a word embedding",
        fix="use a checkpoint of a GPT",
    )


def is_weight(key: str) -> bool:
    """Whether a key names a weight, not optimizer or random state."""
    return f".{STATE}" not in f".{key}" and "rng_state" not in key and "_extra_state" not in key


def is_expert(name: str) -> bool:
    """Whether a tensor of nanotrain has a dim of experts."""
    return ".mlp.experts." in name


def expert_names(key: str, expert: int | None) -> list[tuple[str, Shape]]:
    """The keys of an expert: with all experts in a tensor, and with one."""
    if expert is None:
        return [(key, ())]
    own = key.replace(EXPERTS, f"{EXPERTS}{expert}.", 1)
    return [(key, (expert,)), (own, ())]


def list_some(items: Sequence[str]) -> str:
    """The first items, and the number of the others."""
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more
