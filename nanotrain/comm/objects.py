"""Objects and numbers of the host over gloo groups, in one collective each; `collectives.py` is the interface.

    gather_along       every rank's object on the first rank
    broadcast_along    the first rank's object on every rank
    reduce_along       every rank's numbers, reduced, on every rank

All take the groups of a tree that this rank is in, from the leaves up; a single group is a tree of one level. Objects
travel as pickles, which only the last receiver reads.

torch sends an object in two collectives, its size and then its bytes, and gloo's all-reduce is a ring of 2 * (size - 1)
messages in a row. Ranks that share cores wait for a time slice in each message: on 4 ranks of 2 cores torch's broadcast
of an object takes 2.5 ms and one packet 0.3 ms, torch's gather 6 and 0.8 ms, an all-reduce of 16 numbers 5.5 ms and a
gather and a broadcast of them 1 ms (measured).
"""

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanotrain.comm.group import Group

PACKET_BYTES = 2**15  # sent whatever the length; on one machine 16 to 64 KiB take equally long (measured)
LENGTH_BYTES = 8  # of its length, at the beginning of a packet
_REDUCE: dict[str, Callable[..., Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


def gather_along(levels: Sequence[Group], obj: Any) -> list[Any] | None:
    """Every rank's object, in group order, on the root; None on the others."""
    messages = [pickle.dumps(obj)]
    for level in levels:
        gathered = _gather(pickle.dumps(messages), level)
        if gathered is None:
            return None
        messages = [message for part in gathered for message in pickle.loads(part)]
    return [pickle.loads(message) for message in messages]


def broadcast_along(levels: Sequence[Group], obj: Any) -> Any:
    """The root's object; every other rank passes any."""
    is_root = all(level.is_first for level in levels)
    message = pickle.dumps(obj) if is_root else b""
    for level in reversed(levels):
        message = _broadcast(message, level)
    return obj if is_root else pickle.loads(message)


def reduce_along(levels: Sequence[Group], numbers: Sequence[float], *, op: str) -> list[float]:
    """Numbers reduced elementwise, the same bits on every rank; `op` is "sum", "max" or "min"."""
    total = torch.tensor(numbers, dtype=torch.float64)
    for level in levels:
        parts = [torch.empty_like(total) for _ in level.ranks] if level.is_first else None
        dist.gather(total, parts, group=level.process_group, group_dst=0)
        if parts is None:
            break
        total = _REDUCE[op](torch.stack(parts), dim=0)
    for level in reversed(levels):
        dist.broadcast(total, group=level.process_group, group_src=0)
    reduced: list[float] = total.tolist()
    return reduced


def _broadcast(message: bytes, group: Group) -> bytes:
    """The first rank's message: a packet, and what does not fit into it in a second broadcast."""
    packet = _packet(message)
    dist.broadcast(packet, group=group.process_group, group_src=0)
    start, missing = _start_of(packet)
    if missing:
        rest = _rest(message) if group.is_first else torch.empty(missing, dtype=torch.uint8)
        dist.broadcast(rest, group=group.process_group, group_src=0)
        start += _bytes(rest)
    return start


def _gather(message: bytes, group: Group) -> list[bytes] | None:
    """Every rank's message on the first rank: packets, and what does not fit into them from rank after rank."""
    packets = [torch.empty(PACKET_BYTES, dtype=torch.uint8) for _ in group.ranks] if group.is_first else None
    dist.gather(_packet(message), packets, group=group.process_group, group_dst=0)
    if packets is None:
        rest = _rest(message)
        if len(rest):
            group.wait(_started(dist.isend(rest, group=group.process_group, group_dst=0)))
        return None
    messages = [message]
    for index, packet in enumerate(packets[1:], start=1):
        start, missing = _start_of(packet)
        if missing:
            rest = torch.empty(missing, dtype=torch.uint8)
            group.wait(_started(dist.irecv(rest, group=group.process_group, group_src=index)))
            start += _bytes(rest)
        messages.append(start)
    return messages


def _packet(message: bytes) -> Tensor:
    """The length of a message and as much of it as fits."""
    start = len(message).to_bytes(LENGTH_BYTES, "little") + message[: PACKET_BYTES - LENGTH_BYTES]
    return torch.frombuffer(bytearray(start.ljust(PACKET_BYTES, b"\0")), dtype=torch.uint8)


def _start_of(packet: Tensor) -> tuple[bytes, int]:
    """The part of a message that is in its packet, and the number of its bytes that are not."""
    content = _bytes(packet)
    length = int.from_bytes(content[:LENGTH_BYTES], "little")
    start = content[LENGTH_BYTES:][:length]
    return start, length - len(start)


def _rest(message: bytes) -> Tensor:
    rest = bytearray(message[PACKET_BYTES - LENGTH_BYTES :])
    return torch.frombuffer(rest, dtype=torch.uint8) if rest else torch.empty(0, dtype=torch.uint8)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _started(handle: dist.Work | None) -> dist.Work:
    assert handle is not None, "torch returns None only on ranks outside the group"
    return handle
