"""Offload of activations: saved tensors of the first blocks in host memory until the backward.

    forward of block i     saved tensors -> host, overlapped with the following blocks
    backward of block i    its tensors are back; the copies of block i - 1 to the device start

Every storage is copied once, however many views of it are saved. Parameters and tensors that all
blocks share (mask, rotary tables) stay on the device. Source: Rhu et al. 2016 (vDNN), section 3.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from nanotrain.comm.device import Copy, HostTransfer

MIN_BYTES = 4096  # smaller storages stay on the device: copying them costs more than it saves


def offloaded(blocks: Sequence[nn.Module]) -> list[Callable[..., Tensor]]:
    """Functions of consecutive blocks that keep their saved tensors in host memory."""
    if not blocks:
        return []
    transfer = HostTransfer(next(blocks[0].parameters()).device)
    chain = _Chain()
    return [
        _offload_block(block, transfer, chain=chain, is_first=block is blocks[0])
        for block in blocks
    ]


def _offload_block(
    block: nn.Module, transfer: HostTransfer, *, chain: "_Chain", is_first: bool
) -> Callable[..., Tensor]:
    """A block that keeps its saved tensors in host memory."""

    def run(hidden: Tensor, *args: Any) -> Tensor:
        """Call the block, with its saved tensors moved to the host."""
        if not torch.is_grad_enabled():
            out: Tensor = block(hidden, *args)
            return out
        shared = [*block.parameters(), *_tensors_in(args)]
        saved = _SavedBlock(transfer, shared, previous=None if is_first else chain.last)
        chain.last = saved
        with saved_tensors_hooks(saved.pack, _unpack):
            out = block(hidden, *args)
        saved.forward_ended()
        return out

    return run


@dataclass
class _Chain:
    """The block of a stage whose forward ran last."""

    last: "_SavedBlock | None" = None


@dataclass
class _Stored:
    """A storage and its copy in host memory."""

    host: Tensor
    device: Tensor | None  # kept until the forward ends, so that no other storage gets its address
    num_unread: int = 0
    returning: Copy | None = None


@dataclass(frozen=True)
class _View:
    """A saved tensor as a view of a stored storage."""

    block: "_SavedBlock"
    stored: _Stored
    dtype: torch.dtype
    geometry: tuple[Any, ...]  # offset, size, stride


class _SavedBlock:
    """The saved tensors of one call of one block.

    Args:
        transfer: copies.
        shared: tensors whose storages stay.
        previous: the saved tensors of the previous block, whose backward comes next.
    """

    def __init__(
        self, transfer: HostTransfer, shared: Sequence[Tensor], *, previous: "_SavedBlock | None"
    ) -> None:
        self._transfer = transfer
        self._previous = previous
        # The storage object, not its address, which changes for a sharded parameter when it is
        # gathered.
        self._shared = {tensor.untyped_storage()._cdata for tensor in shared}
        self._stored: dict[int, _Stored] = {}

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """Start to copy the storage of a tensor, unless it stays."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._shared or storage.nbytes() < MIN_BYTES:
            return tensor
        stored = self._stored.get(storage._cdata)
        if stored is None:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            stored = self._stored[storage._cdata] = _Stored(self._transfer.to_host(whole), whole)
        stored.num_unread += 1
        geometry = (tensor.storage_offset(), tensor.size(), tensor.stride())
        return _View(self, stored, tensor.dtype, geometry)

    def forward_ended(self) -> None:
        """Free the tensors on the device."""
        for stored in self._stored.values():
            stored.device = None

    def start_return(self) -> None:
        """Start to copy everything back."""
        for stored in self._stored.values():
            if stored.returning is None and stored.device is None and stored.num_unread:
                stored.returning = self._transfer.start_return(stored.host)

    def read(self, view: _View) -> Tensor:
        """The saved tensor on the device; its storage is freed after the last view is read."""
        self.start_return()
        if self._previous is not None:
            self._previous.start_return()
            self._previous = None
        stored = view.stored
        if stored.device is None:
            assert stored.returning is not None, "all storages with unread views return"
            stored.device = stored.returning.wait()
        storage = stored.device.untyped_storage()
        empty = torch.empty(0, dtype=view.dtype, device=stored.device.device)
        stored.num_unread -= 1
        if stored.num_unread == 0:
            stored.device = stored.returning = None
        return empty.set_(storage, *view.geometry)


def _unpack(packed: Tensor | _View) -> Tensor:
    if isinstance(packed, _View):
        return packed.block.read(packed)
    return packed


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in tuples and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors_in(getattr(value, field.name))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors_in(item)
