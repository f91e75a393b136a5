"""Checkpoints of Megatron-LM in its format `torch`: one file per model-parallel rank.

    FOLDER/iter_0000300/mp_rank_00/model_optim_rng.pt           tensor-parallel rank
    FOLDER/iter_0000300/mp_rank_00_001/model_optim_rng.pt       and pipeline or expert rank
    FOLDER/iter_0000300/mp_rank_00_001_003/model_optim_rng.pt   and both

Beside it the distributed optimizer has distrib_optim.pt, `legacy_buffers.py`.

`LegacyFolder` offers their tensors as those of a `torch_dist` checkpoint whose layers and experts
have keys of their own: the shards of a tensor are boxes of it. The files are mapped into memory.

Source: Megatron-LM, `training/checkpointing.py` and `tensor_parallel/layers.py`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanotrain.interop.dcp.pickles import load_archive, unreadable_file
from nanotrain.interop.dcp.tensors import Extent, StoredTensor
from nanotrain.interop.megatron.folder import RANK_FILE, CommonState, common_state_of, rank_files
from nanotrain.interop.megatron.legacy_buffers import Buckets, add_buffers
from nanotrain.interop.megatron.legacy_optimizer import rank_state
from nanotrain.interop.megatron.mamba_parts import with_parts
from nanotrain.interop.megatron.names import TABLES
from nanotrain.spec.boxes import Box
from nanotrain.untrusted import object_of, shown, whole_number

DISTRIBUTED = "distrib_optim.pt"
FOLDER_NAME = re.compile(r"mp_rank_(\d{1,6})(?:_(\d{1,6}))?(?:_(\d{1,6}))?")
LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)")
# keys of a tensor per expert of a rank: of a module per expert, or of grouped GEMM
EXPERT_KEYS = (
    re.compile(r"(?P<prefix>.*mlp\.experts\.)local_experts\.(?P<number>\d{1,6})\.(?P<name>.+)"),
    re.compile(
        r"(?P<prefix>.*mlp\.experts\.)"
        r"(?P<name>linear_fc[12]\.(?:weight|bias))(?P<number>\d{1,6})"
    ),
)
MAX_RANKS = 1 << 16


class Rank(NamedTuple):
    """A model-parallel rank."""

    tp: int
    pp: int
    ep: int


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, with its values."""

    box: Box
    values: Tensor


@dataclass(frozen=True)
class Sizes:
    """The layout of the run that saved the checkpoint."""

    tp: int
    pp: int
    ep: int
    num_chunks: int  # model chunks of a rank
    is_gated: bool  # the first product of an MLP has the rows of two
    is_tied: bool
    has_local_layers: bool  # the projections that transformer-engine duplicates are sharded

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> "Sizes":
        """The layout that the stored arguments describe.

        Raises:
            ValueError: no numbers, or experts are sharded otherwise than dense weights.
        """
        tp = size_of(arguments, "tensor_model_parallel_size")
        etp = arguments.get("expert_tensor_parallel_size") or tp
        if etp != tp:
            raise ValueError(f"experts on {etp} tensor-parallel ranks, other weights on {tp}")
        gated = [name for name in TABLES["gated_arguments"] if arguments.get(name)]
        return cls(
            tp=tp,
            pp=size_of(arguments, "pipeline_model_parallel_size"),
            ep=size_of(arguments, "expert_model_parallel_size"),
            num_chunks=size_of(arguments, "virtual_pipeline_model_parallel_size"),
            is_gated=bool(gated),
            is_tied=not arguments.get("untie_embeddings_and_output_weights"),
            has_local_layers=arguments.get("transformer_impl") == "local",
        )


def size_of(arguments: Mapping[str, Any], name: str) -> int:
    """The size of an axis; 1 where it is not set."""
    return whole_number(arguments.get(name) or 1, name, low=1, high=MAX_RANKS)


def is_legacy(folder: Path) -> bool:
    """Whether the folder of a step has files of model-parallel ranks."""
    return bool(rank_files(folder))


class LegacyFolder:
    """The tensors of a folder.

    Args:
        folder: folder of a step.

    Raises:
        CheckpointError: files are missing or damaged, or of a form that is not read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self.objects: dict[str, Extent] = {}
        self._pieces: dict[str, list[Piece]] = {}
        self._files: dict[Rank, Mapping[str, Any]] = {}
        self._distributed: dict[Rank, Any] = {}  # content of the files of buffers
        self._steps: set[int] = set()
        try:
            self._open_files()
            self._add_stages()
            for key, pieces in self._pieces.items():
                self.tensors[key] = stored_tensor(key, pieces)
        except ValueError as error:
            raise unreadable_file(str(folder), str(error)) from None

    def read(self, key: str, box: Box) -> Tensor:
        """One box of a tensor, in its data type.

        Raises:
            CheckpointError: the files do not have all of it.
        """
        target = torch.empty(box.shape, dtype=self.tensors[key].dtype)
        copied = 0
        for piece in self._pieces[key]:
            shared = piece.box.intersect(box)
            if shared is not None:
                values = piece.values[shared.within(piece.box).slices()]
                target[shared.within(box).slices()] = values
                copied += shared.numel
        if copied != box.numel:
            why = f"its shards do not cover {shown(key)} exactly once"
            raise unreadable_file(str(self.folder), why)
        return target

    def read_object(self, key: str) -> Any:
        """Refuse to read an object: files of ranks have none.

        Raises:
            CheckpointError: always.
        """
        raise unreadable_file(str(self.folder), f"{shown(key)} is not read")

    def _open_files(self) -> None:
        """Map the files of all ranks; ValueError names one that is missing."""
        paths = {}
        for path in sorted(self.folder.glob("mp_rank_*")):
            match = FOLDER_NAME.fullmatch(path.name)
            if match is not None:
                paths[tuple(int(number) for number in match.groups() if number is not None)] = path
        if not paths:
            raise ValueError("it has no folder mp_rank_NN of a rank")
        first = load_file(next(iter(paths.values())) / RANK_FILE)
        self.common: CommonState = common_state_of(first)
        self.sizes = Sizes.from_arguments(self.common.arguments)
        for rank in all_ranks(self.sizes):
            numbers = [rank.tp]
            if self.sizes.pp > 1:
                numbers.append(rank.pp)
            if self.sizes.ep > 1:
                numbers.append(rank.ep)
            if tuple(numbers) not in paths:
                raise ValueError(f"it has no file of {rank}")
            path = paths.pop(tuple(numbers))
            self._files[rank] = load_file(path / RANK_FILE)
            buffers = path / DISTRIBUTED
            if buffers.exists():
                content = load_archive(buffers, shown=str(buffers), is_mapped=True)
                self._distributed[rank] = content
        if paths:
            raise ValueError(f"{next(iter(paths.values())).name} is of no rank of its layout")

    def _add_stages(self) -> None:
        """Add the tensors of all pipeline stages, in the order of the layers."""
        sizes = self.sizes
        states = {}
        for rank, content in self._files.items():
            states[rank] = rank_state(content, sizes=sizes)
            self._steps |= states[rank].steps
            if rank in self._distributed:
                buckets = Buckets.from_arguments(
                    self.common.arguments, pp=sizes.pp, is_tied=sizes.is_tied
                )
                add_buffers(self._distributed[rank], states[rank], buckets=buckets, stage=rank.pp)
        if len(self._steps) > 1:
            raise ValueError(f"parameters have different numbers of updates: {self._steps}")
        offset = 0
        for chunk in range(sizes.num_chunks):
            for stage in range(sizes.pp):
                num_layers = 0
                for expert_rank in range(sizes.ep):
                    shards = []
                    for tp_rank in range(sizes.tp):
                        own = states[Rank(tp_rank, stage, expert_rank)].chunks[chunk]
                        shards.append(with_parts(own))
                    found = self._add_chunk(shards, offset=offset, expert_rank=expert_rank)
                    num_layers = max(num_layers, found)
                offset += num_layers
        self._add_optimizer_state(states[Rank(0, 0, 0)].grad_scaler)

    def _add_chunk(
        self,
        shards: Sequence[Mapping[str, Mapping[str, Tensor]]],
        *,
        offset: int,
        expert_rank: int,
    ) -> int:
        """Add the tensors of a model chunk; returns its number of layers.

        Args:
            shards: per tensor-parallel rank, tensors by name and by the beginning of their key.
            offset: number of layers before the chunk.
            expert_rank: rank of its experts; other weights are read from rank 0.
        """
        num_layers = 0
        num_local = count_experts(shards[0])
        for name in shards[0]:
            match = LAYER.fullmatch(name)
            key = name
            if match is not None:
                layer = int(match[1])
                num_layers = max(num_layers, layer + 1)
                key = f"decoder.layers.{layer + offset}.{match[2]}"
            key, is_expert = expert_key(key, rank=expert_rank, num_local=num_local)
            if expert_rank and not is_expert:
                continue
            if name == "output_layer.weight" and self.sizes.is_tied:
                continue  # a copy of the embedding
            if name.startswith("embedding.") and key in self._pieces:
                continue  # the last stage has a copy
            for beginning in shards[0][name]:
                values = [shard.get(name, {}).get(beginning) for shard in shards]
                self._add_tensor(key, values, beginning=beginning)
        return num_layers

    def _add_tensor(self, key: str, values: Sequence[Tensor | None], *, beginning: str) -> None:
        """Add the shards of a tensor, one per tensor-parallel rank."""
        full_key = beginning + key
        tensors = [value for value in values if value is not None]
        if len(tensors) != len(values):
            raise ValueError(f"{shown(full_key)} is missing in files of some ranks")
        if full_key in self._pieces:
            raise ValueError(f"{shown(full_key)} is in the files of two stages")
        dim = self._shard_dim(key)
        if dim is None or len(tensors) == 1:
            first = tensors[0]
            self._pieces[full_key] = [Piece(Box.full(tuple(first.shape)), first)]
            return
        num_parts = 2 if self.sizes.is_gated and ".linear_fc1." in key else 1
        self._pieces[full_key] = list(shard_pieces(tensors, dim=dim, num_parts=num_parts))

    def _shard_dim(self, key: str) -> int | None:
        """The dim along which a tensor is sharded; None: all ranks have all of it."""
        tables = [TABLES["shard_dims"]]
        if self.sizes.has_local_layers:
            tables.append(TABLES["local_shard_dims"])
        for table in tables:
            for dim, endings in table.items():
                if key.endswith(tuple(endings)):
                    return int(dim)
        return None

    def _add_optimizer_state(self, grad_scaler: Any) -> None:
        """Add numbers of updates and loss scale to `common`, as a `torch_dist` checkpoint does."""
        shared: dict[str, Any] = {"optimizer": {"param_groups": []}}
        for step in self._steps:
            shared["optimizer"]["param_groups"].append({"step": step})
        if grad_scaler is not None:
            shared["grad_scaler"] = grad_scaler
        state = dict(self.common.state) | {"optimizer": shared}
        self.common = CommonState(self.common.arguments, self.common.step, state)


def load_file(path: Path) -> Mapping[str, Any]:
    """The content of the file of a rank, whose tensors are mapped into memory.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return object_of(load_archive(path, shown=str(path), is_mapped=True), "it")
    except ValueError as error:
        raise unreadable_file(str(path), str(error)) from None


def all_ranks(sizes: Sizes) -> Iterator[Rank]:
    """All model-parallel ranks."""
    for tp in range(sizes.tp):
        for pp in range(sizes.pp):
            for ep in range(sizes.ep):
                yield Rank(tp, pp, ep)


def count_experts(names: Mapping[str, Any]) -> int:
    """The experts of a rank."""
    highest = -1
    for name in names:
        match = match_expert(name)
        if match is not None:
            highest = max(highest, int(match["number"]))
    return highest + 1


def expert_key(key: str, *, rank: int, num_local: int) -> tuple[str, bool]:
    """The key of a tensor with the number of its expert among all, and whether it has one."""
    match = match_expert(key)
    if match is None:
        return key, False
    number = rank * num_local + int(match["number"])
    return f"{match['prefix']}experts.{number}.{match['name']}", True


def match_expert(key: str) -> re.Match[str] | None:
    """The prefix, number and name in the key of an expert's tensor; None for another tensor."""
    for pattern in EXPERT_KEYS:
        match = pattern.fullmatch(key)
        if match is not None:
            return match
    return None


def shard_pieces(tensors: Sequence[Tensor], *, dim: int, num_parts: int) -> Iterator[Piece]:
    """The boxes of shards along a dim.

    Args:
        tensors: one per rank.
        dim: the sharded dim.
        num_parts: parts that each shard has one after another, such as gate and up; in the whole
            tensor all shards of the first part are before those of the second.

    Raises:
        ValueError: shards differ in shape.
    """
    size = list(tensors[0].shape)
    if dim >= len(size) or size[dim] % num_parts:
        raise ValueError(f"a shard of the shape {tuple(size)} is not {num_parts} parts")
    length = size[dim] // num_parts
    for rank, tensor in enumerate(tensors):
        if list(tensor.shape) != size:
            raise ValueError(f"shards have the shapes {tuple(size)} and {tuple(tensor.shape)}")
        for part in range(num_parts):
            start = [0] * len(size)
            stop = list(size)
            start[dim] = (part * len(tensors) + rank) * length
            stop[dim] = start[dim] + length
            values = tensor.narrow(dim, part * length, length)
            yield Piece(Box(tuple(start), tuple(stop)), values)


def stored_tensor(key: str, pieces: Sequence[Piece]) -> StoredTensor:
    """A tensor that pieces are boxes of.

    Raises:
        ValueError: they have different data types.
    """
    dtypes = {piece.values.dtype for piece in pieces}
    if len(dtypes) != 1:
        raise ValueError(f"the shards of {shown(key)} have different data types")
    shape = tuple(map(max, zip(*(piece.box.stop for piece in pieces), strict=True)))
    chunks = tuple((piece.box, Extent(RANK_FILE, 0, 0)) for piece in pieces)
    return StoredTensor(shape, dtypes.pop(), chunks)
