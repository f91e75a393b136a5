"""Time to save and load a sharded state: nanotrain, torch.save, torch.distributed.checkpoint and
plain bytes, in turn.

    python benchmarks/checkpoint.py                                  # 2 and 4 ranks x 64 and 256 MiB per rank
    python benchmarks/checkpoint.py --ranks 2 --mib 64 --rounds 7 --folder /mnt/disk
    python benchmarks/checkpoint.py --folder /dev/shm                # without a disk: the software alone
    python benchmarks/checkpoint.py --write benchmarks/results/checkpoint.md

All save the same tensors, sharded along their first dim over the ranks, fsync them, and load them
into existing tensors. The time is that of the slowest rank. Loads are measured warm (files in the
page cache) and cold (dropped from it before). Contenders run in turn for several rounds, in which
each follows each other one equally often: the speed of one depends on what the one before has left
in the memory. A ratio is the median over rounds of runs close in time, so a slow minute of the
machine affects both sides. Peak memory is the largest growth of a rank's resident memory during a
save or a load, beside the state itself, in a first round that is not timed. Last comes the time for
which a save stops training (save_stall.py).

torch.save writes one file per rank and nothing else: no manifest, no communication, and no other
layout can read it. "plain bytes" writes and reads one file per rank with `write` and `readinto`,
tensor after tensor: what the disk gives. Cold loads also measure the memory of the page cache: a
virtual machine whose host takes back free memory gets it again slowly (0.4 GiB/s seen), unless the
same memory was just released. Compare their medians on a machine of your own. nanotrain verifies a
checksum of every byte it loads; torch.load accepts damage silently (tried with a flipped bit).
"""

import argparse
import ctypes
import datetime
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from save_stall import stall_table
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.checkpoint.write import crc32
from nanotrain.comm.group import Group
from nanotrain.spec.boxes import Box, TensorBox
from nanotrain.topology.groups import GroupSpec

TENSOR_MIB, COLUMNS = 4, 1024
PHASES = ("save", "load warm", "load cold")
MIB = 2**20
Item = TypeVar("Item")


@dataclass(frozen=True)
class State:
    """One rank's shards: name -> rows of a global [size * rows, COLUMNS] tensor."""

    tensors: dict[str, torch.Tensor]
    rank: int
    size: int

    def boxes(self) -> dict[TensorBox, torch.Tensor]:
        """The shards as nanotrain's Checkpointer takes them."""
        boxes = {}
        for name, tensor in self.tensors.items():
            rows = len(tensor)
            box = Box((self.rank * rows, 0), ((self.rank + 1) * rows, COLUMNS))
            boxes[TensorBox(name, (self.size * rows, COLUMNS), box)] = tensor
        return boxes

    def dtensors(self, mesh: DeviceMesh) -> dict[str, DTensor]:
        """The shards as torch.distributed.checkpoint takes them."""
        return {
            name: DTensor.from_local(tensor, mesh, [Shard(0)])
            for name, tensor in self.tensors.items()
        }


@dataclass(frozen=True)
class Contender:
    save: Callable[[Path], None]
    load: Callable[[Path], None]


def contenders(state: State) -> dict[str, Contender]:
    """The contenders, on the same state."""
    mesh = DeviceMesh("cpu", list(range(state.size)))
    group = Group(GroupSpec("world", tuple(range(state.size)), state.rank), dist.group.WORLD)

    def save_nanotrain(folder: Path) -> None:
        Checkpointer(folder, group=group).save(1, state.boxes(), objects={}, config={}, topology={})

    def load_nanotrain(folder: Path) -> None:
        Checkpointer(folder, group=group).restore(folder / "step-00000001", state.boxes())

    def save_torch(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        with open(folder / f"{state.rank}.pt", "wb") as file:
            torch.save(state.tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def load_torch(folder: Path) -> None:
        for name, tensor in torch.load(folder / f"{state.rank}.pt").items():
            state.tensors[name].copy_(tensor)

    def save_dcp(folder: Path) -> None:
        dcp.save(state.dtensors(mesh), checkpoint_id=folder)

    def load_dcp(folder: Path) -> None:
        dcp.load(state.dtensors(mesh), checkpoint_id=folder)

    def save_plain(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        with open(folder / f"{state.rank}.bin", "wb", buffering=0) as file:
            for tensor in state.tensors.values():
                file.write(tensor.numpy().data)
            os.fsync(file.fileno())

    def load_plain(folder: Path) -> None:
        with open(folder / f"{state.rank}.bin", "rb", buffering=0) as file:
            for tensor in state.tensors.values():
                file.readinto(tensor.numpy().data)

    return {
        "nanotrain": Contender(save_nanotrain, load_nanotrain),
        "plain bytes": Contender(save_plain, load_plain),
        "torch.save": Contender(save_torch, load_torch),
        "torch DCP": Contender(save_dcp, load_dcp),
    }


def run_rank(rank: int, size: int, mib: int, rounds: int, folder: str) -> None:
    """Run all contenders in turn on one rank; rank 0 writes the times to `times.pt`."""
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(size)  # as torchrun does
    store = dist.FileStore(f"{folder}/rendezvous", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    rows = TENSOR_MIB * MIB // 4 // COLUMNS
    state = State(
        {f"model/{i}": torch.randn(rows, COLUMNS) for i in range(mib // TENSOR_MIB)}, rank, size
    )
    expected = {name: tensor.double().sum() for name, tensor in state.tensors.items()}
    # MiB of the first round, then seconds of every phase, by round
    times: dict[str, list[list[float]]] = {}
    for number in range(rounds + 1):
        for name, contender in in_turn(list(contenders(state).items()), number):
            target = Path(folder) / name
            measured = [
                _timed(contender.save, target, trims=number == 0),
                _timed(contender.load, target, trims=number == 0),
            ]
            for tensor in state.tensors.values():
                tensor.zero_()
            _drop_from_page_cache(target)
            measured.append(_timed(contender.load, target, trims=number == 0))
            assert all(
                state.tensors[key].double().sum() == total for key, total in expected.items()
            ), f"{name} lost data"
            dist.barrier()
            if rank == 0:
                shutil.rmtree(target)
            seconds, peaks = zip(*measured, strict=True)
            times.setdefault(name, []).append(list(seconds if number else peaks))
    if rank == 0:
        torch.save(times, f"{folder}/times.pt")
    dist.destroy_process_group()


def in_turn(contenders: Sequence[Item], number: int) -> list[Item]:
    """The order of an even number of contenders in a round; over as many rounds each follows each
    other one once.

    Source: Williams 1949, "Experimental designs balanced for the estimation of residual effects of
    treatments".

    >>> [in_turn("abcd", number) for number in range(4)]
    [['a', 'b', 'd', 'c'], ['b', 'c', 'a', 'd'], ['c', 'd', 'b', 'a'], ['d', 'a', 'c', 'b']]
    """
    size = len(contenders)
    steps = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(size)]
    return [contenders[(number + step) % size] for step in steps]


def rows_of(times: dict[str, list[list[float]]], *, size: int, mib: int) -> list[str]:
    """The table rows of one setting."""
    rows = []
    for name, (peaks, *rounds) in times.items():
        cells = []
        for phase in range(len(PHASES)):
            seconds = statistics.median(round_[phase] for round_ in rounds)
            quotients = [
                other[phase] / ours[phase]
                for ours, other in zip(times["nanotrain"][1:], rounds, strict=True)
            ]
            ratio = "" if name == "nanotrain" else f" ({statistics.median(quotients):.2f}x)"
            cells.append(f"{seconds:.3f} s, {size * mib / 1024 / seconds:.2f} GiB/s{ratio}")
        cells += [f"{peak:.0f} MiB" for peak in peaks[:2]]
        rows.append(f"| {size} x {mib} MiB | {name} | " + " | ".join(cells) + " |")
    return rows


def _timed(work: Callable[[Path], None], folder: Path, *, trims: bool) -> tuple[float, float]:
    """Run and return the seconds of the slowest rank, and the MiB of the one whose memory grew
    most.

    `trims` gives back what earlier phases have freed, which would be used again without a growth.
    """
    if trims:
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = _memory("VmRSS")
    dist.barrier()
    start = time.perf_counter()
    work(folder)
    measured = torch.tensor([time.perf_counter() - start, (_memory("VmHWM") - before) / MIB])
    dist.all_reduce(measured, op=dist.ReduceOp.MAX)
    seconds, peak = measured.tolist()
    return seconds, peak


def _memory(field: str) -> int:
    """Bytes of a line of the process status."""
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(f"{field}:")
    )
    return int(line.split()[1]) * 1024


def _drop_from_page_cache(folder: Path) -> None:
    dist.barrier()
    for file in folder.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.fsync(handle)  # only clean pages can be dropped
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256], help="MiB per rank")
    parser.add_argument(
        "--rounds", type=int, default=8, help="a multiple of 4, for balanced orders"
    )
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write (default: a temporary folder)"
    )
    parser.add_argument(
        "--write", type=Path, default=None, help="also write the table to this file"
    )
    options = parser.parse_args()
    lines = [
        f"{datetime.date.today()}, {os.cpu_count()}-core CPU shared with other work, torch {torch.__version__},"
        f" Python {platform.python_version()}; median of {options.rounds} rounds; nanotrain's checksums by"
        f" {crc32.__module__}.",
        "In brackets: time / nanotrain's time in the same round (above 1: nanotrain is faster).",
        "",
        "| state | writer | " + " | ".join(PHASES) + " | peak memory, save | load |",
        "|---|---|" + "---|" * (len(PHASES) + 2),
    ]
    print("\n".join(lines))
    for size in options.ranks:
        for mib in options.mib:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                mp.spawn(run_rank, args=(size, mib, options.rounds, folder), nprocs=size)
                rows = rows_of(torch.load(f"{folder}/times.pt"), size=size, mib=mib)
            print("\n".join(rows), flush=True)
            lines += rows
    stall = ["", "## Time for which a save stops training", ""]
    stall += stall_table(192, rounds=options.rounds, folder=options.folder)
    print("\n".join(stall))
    lines += stall
    if options.write:
        options.write.write_text("# Saving and loading checkpoints\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
