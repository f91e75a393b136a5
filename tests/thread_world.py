"""Ranks as threads of one process: the process group `threads`, whose collectives copy between
tensors.

    rank 0 --post--> one slot per collective of the group --> the last rank computes all outputs -->
    Work done rank 1 --post-->

Collectives start without waiting and complete when all ranks have started them, as on NCCL and
gloo; sums are in rank order. A world of processes over gloo spends most of its time in system calls
(1.5 ms per rank for an all-reduce of four ranks), which shows nothing about the arithmetic of a
layout. The flat collectives take the same calls as on NCCL.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

BACKEND = "threads"


class Abandoned(RuntimeError):
    """Another rank of the world has failed, so a collective will not complete."""


class ThreadWork(dist.Work):
    """Complete when all ranks of a collective, or both of a message, have started it."""

    def __init__(self) -> None:
        super().__init__()
        self._ended, self._is_complete = threading.Event(), False

    def finish(self) -> None:
        """The outputs are there."""
        self._is_complete = True
        self._ended.set()

    def abandon(self) -> None:
        """A rank has failed."""
        self._ended.set()

    def is_completed(self) -> bool:
        """Whether the outputs are there."""
        return self._is_complete

    def wait(self, timeout: Any = None) -> bool:
        """Block until the outputs are there."""
        self._ended.wait()
        if not self._is_complete:
            raise Abandoned("Connection closed by peer")
        return True


@dataclass
class _Slot:
    """A collective that some ranks of a group have started."""

    op: str
    posts: dict[int, tuple[Any, ThreadWork]] = field(default_factory=dict)


@dataclass
class World:
    """What the ranks of a world share.

    Attributes: lock: protects all other fields. failed: whether a rank has failed. slots:
        collectives under way, by group and number. messages: those whose other side has not
        started, in order, by side, group, sender, receiver and tag.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    failed: bool = False
    slots: dict[tuple[str, int], _Slot] = field(default_factory=dict)
    messages: dict[tuple[str, str, int, int, int], list[tuple[Tensor, ThreadWork]]] = field(
        default_factory=dict
    )

    def fail(self) -> None:
        """End all waits with an error."""
        with self.lock:
            self.failed = True
            posts = [post for slot in self.slots.values() for post in slot.posts.values()]
            for _, work in [
                *posts,
                *(each for waiting in self.messages.values() for each in waiting),
            ]:
                work.abandon()

    def check(self) -> None:
        """Raise where a rank has failed; the caller holds the lock."""
        if self.failed:
            raise Abandoned("Connection closed by peer")


class ThreadGroup(dist.ProcessGroup):
    """One rank's side of a group of threads."""

    def __init__(self, world: World, name: str, *, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._world, self._name, self._rank, self._size, self._count = world, name, rank, size, 0

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return self._name

    def _get_backend(self, device: torch.device) -> "ThreadGroup":
        """Torch 2.15 reads from it whether messages of a batch are coalesced."""
        return self

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> ThreadWork:
        return self._post("all_reduce", tensors[0], _all_reduce, op=opts.reduceOp)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> ThreadWork:
        return self._post("broadcast", tensors[0], _broadcast, op=opts.rootRank)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> ThreadWork:
        return self._post("all_gather", (outputs[0], inputs[0]), _all_gather)

    def gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> ThreadWork:
        return self._post("gather", (outputs[0] if outputs else [], inputs[0]), _all_gather)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> ThreadWork:
        return self._post(
            "all_gather", (list(output.view(self._size, -1)), tensor.view(-1)), _all_gather
        )

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> ThreadWork:
        posted = (output.view(-1), tensor.view(self._size, -1))
        return self._post("reduce_scatter", posted, _reduce_scatter, op=opts.reduceOp)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> ThreadWork:
        posted = (_rows(output, output_splits, self._size), _rows(tensor, input_splits, self._size))
        return self._post("all_to_all", posted, _all_to_all)

    # the names of torch before 2.13
    _allgather_base, _reduce_scatter_base, alltoall_base = (
        all_gather_single,
        reduce_scatter_single,
        all_to_all_single,
    )

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> ThreadWork:
        return self._message("send", tensors[0], (self._name, self._rank, peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> ThreadWork:
        return self._message("receive", tensors[0], (self._name, peer, self._rank, tag))

    def _post(
        self, name: str, tensors: Any, compute: Callable[..., None], *, op: Any = None
    ) -> ThreadWork:
        """Take part in this group's next collective; the last rank computes the outputs of all."""
        world, work = self._world, ThreadWork()
        self._count += 1
        with world.lock:
            world.check()
            slot = world.slots.setdefault((self._name, self._count), _Slot(name))
            assert slot.op == name, (
                f"rank {self._rank} of {self._name} starts {name}, another one {slot.op}"
            )
            slot.posts[self._rank] = (tensors, work)
            if len(slot.posts) < self._size:
                return work
            del world.slots[self._name, self._count]
        with torch.no_grad():
            compute([slot.posts[rank][0] for rank in range(self._size)], op)
        for _, each in slot.posts.values():
            each.finish()
        return work

    def _message(self, side: str, tensor: Tensor, key: tuple[str, int, int, int]) -> ThreadWork:
        """Start one side of a message; the second side copies it."""
        world, work = self._world, ThreadWork()
        with world.lock:
            world.check()
            waiting = world.messages.get(("receive" if side == "send" else "send", *key))
            if not waiting:
                world.messages.setdefault((side, *key), []).append((tensor, work))
                return work
            peer_tensor, peer_work = waiting.pop(0)
        source, target = (tensor, peer_tensor) if side == "send" else (peer_tensor, tensor)
        with torch.no_grad():
            target.data.copy_(source)
        peer_work.finish()
        work.finish()
        return work


# `.data` has a version counter of its own: as on NCCL and gloo, autograd does not see what a
# collective writes.


def _all_reduce(posts: Sequence[Tensor], op: Any) -> None:
    reduced = _reduce(posts, op)
    for tensor in posts:
        tensor.data.copy_(reduced)


def _broadcast(posts: Sequence[Tensor], root: int) -> None:
    for rank, tensor in enumerate(posts):
        if rank != root:
            tensor.data.copy_(posts[root])


def _all_gather(posts: Sequence[tuple[list[Tensor], Tensor]], op: None) -> None:
    inputs = [tensor.clone() for _, tensor in posts]  # an input may be its slice of the output
    for outputs, _ in posts:
        for output, tensor in zip(outputs, inputs, strict=False):
            output.data.copy_(tensor.view_as(output))


def _reduce_scatter(posts: Sequence[tuple[Tensor, Tensor]], op: Any) -> None:
    reduced = _reduce([tensor for _, tensor in posts], op)
    for (output, _), part in zip(posts, reduced, strict=True):
        output.data.copy_(part)


def _all_to_all(posts: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]], op: None) -> None:
    for rank, (outputs, _) in enumerate(posts):
        for output, (_, inputs) in zip(outputs, posts, strict=True):
            output.data.copy_(inputs[rank])


def _reduce(tensors: Sequence[Tensor], op: Any) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        if op == dist.ReduceOp.MAX:
            total = torch.maximum(total, tensor)
        elif op == dist.ReduceOp.MIN:
            total = torch.minimum(total, tensor)
        else:
            total += tensor
    return total.div_(len(tensors)) if op == dist.ReduceOp.AVG else total


def _rows(tensor: Tensor, splits: Sequence[int], size: int) -> Sequence[Tensor]:
    return tensor.split(list(splits)) if splits else tensor.chunk(size)


def _in_turn(choose: Callable[..., Any]) -> Callable[..., Any]:
    """`sdpa_kernel` of one thread at a time: what it chooses holds for the whole process."""
    lock = threading.Lock()

    @contextmanager
    def chosen(*args: Any, **options: Any) -> Iterator[None]:
        with lock, choose(*args, **options):
            yield

    return chosen


@cache
def _prepare_process() -> None:
    """Make one per thread what torch has one of per process."""
    dist.distributed_c10d._world = ThreadLocalWorld()  # type: ignore[assignment]
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # names of groups
    nn.attention.sdpa_kernel = _in_turn(nn.attention.sdpa_kernel)
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
    # MKL chooses the kernel of a function at its first call. Of threads that call it first at the
    # same time, one in a thousand has another kernel, whose results are off by 1e-3 in fp32 and by
    # 7e-9 in fp64.
    for x in (torch.full((8,), 0.5), torch.full((8,), 0.5, dtype=torch.float64)):
        for function in (
            torch.cos,
            torch.erf,
            torch.exp,
            torch.expm1,
            torch.log,
            torch.log1p,
            torch.sin,
            torch.tanh,
        ):
            function(x)


def _create(options: Any, _: Any) -> ThreadGroup:
    return ThreadGroup(
        _thread.world, options.group_id, rank=options.group_rank, size=options.group_size
    )


_thread = threading.local()  # its world


def run_in_threads(num_ranks: int, function: Callable[[int], Any]) -> list[Any]:
    """Call `function(rank)` on a thread per rank, each in a default process group of all; its
    results by rank.

    For a process that does nothing else: torch's table of process groups becomes one per thread.

    Args:
        num_ranks: size of the world.
        function: returns its result, and whether this rank is sound; when it is not, all others are
            ended.
    """
    world, store, replies = World(), dist.HashStore(), [None] * num_ranks
    _prepare_process()

    def run(rank: int) -> None:
        _thread.world = world
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=num_ranks)
        replies[rank], is_sound = function(rank)
        if not is_sound:
            world.fail()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(num_ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return replies
