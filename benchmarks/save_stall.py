"""How long a save stops training: nanotrain in the background, blocking,
torch.distributed.checkpoint and torch.save.

    python benchmarks/save_stall.py
    python benchmarks/save_stall.py --mib 256 --rounds 7 --write benchmarks/results/save_stall.md
    python benchmarks/save_stall.py --address s3://bucket/stall    # also into object storage; credentials as always

One process trains a stack of linear layers; the saved state is its weights and two moments in fp32.
In every round each contender saves once and the step after its return is timed too, so that a
writer in the background that slows down training shows. The stall is the time until the call
returns, as a share of a plain step of the same round. The calls that return early are waited for
before the next contender starts.
"""

import argparse
import datetime
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed.checkpoint as dcp
from torch._C._distributed_c10d import HashStore

from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.checkpoint.remote_checkpointer import RemoteCheckpointer
from nanotrain.comm.group import Group
from nanotrain.spec.boxes import TensorBox
from nanotrain.storage.remote import parse

Wait = Callable[[], Any]
WIDTH = 1024


class Training:
    """Linear layers, their moments, and a step that changes all of them in place."""

    def __init__(self, mib: int) -> None:
        count = max(1, mib * 2**20 // (3 * 4 * WIDTH * WIDTH))
        self.model = torch.nn.Sequential(
            *(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.data = torch.randn(256, WIDTH)
        self.step()

    def step(self) -> float:
        """Run a step; returns its seconds."""
        start = time.perf_counter()
        self.model(self.data).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds."""
        saved = {f"model/{name}": weight.detach() for name, weight in self.model.named_parameters()}
        for name, weight in self.model.named_parameters():
            for moment in ("exp_avg", "exp_avg_sq"):
                saved[f"optimizer/{moment}/{name}"] = self.optimizer.state[weight][moment]
        return saved


def contenders(
    training: Training, folder: Path, address: str | None = None
) -> dict[str, Callable[[], Wait]]:
    """The calls to time; each returns what waits for its end."""
    writer = Checkpointer(folder / "nanotrain", group=Group.single_rank("world"), keep_last=1)
    if address:
        run = parse(address)
        staged = Checkpointer(folder / run.path / "checkpoints", group=writer.group, keep_last=1)
        remote = RemoteCheckpointer(staged, run, store=HashStore())
    steps = iter(range(1, 10**6))
    content: dict[str, Any] = {"objects": {}, "config": {}, "topology": {}}

    def boxes() -> dict[TensorBox, torch.Tensor]:
        return {
            TensorBox.full(name, tuple(tensor.shape)): tensor
            for name, tensor in training.tensors().items()
        }

    def nanotrain_async() -> Wait:
        writer.start_save(next(steps), boxes(), **content)
        return writer.wait

    def to_address() -> Wait:
        remote.start_save(next(steps), boxes(), **content)
        return remote.wait

    def nanotrain() -> Wait:
        writer.save(next(steps), boxes(), **content)
        return lambda: None

    def torch_save() -> Wait:
        with open(folder / "state.pt", "wb") as file:
            torch.save(training.tensors(), file)
            file.flush()
            os.fsync(file.fileno())
        return lambda: None

    def torch_dcp() -> Wait:
        dcp.save(training.tensors(), checkpoint_id=folder / f"dcp-{next(steps)}", no_dist=True)
        return lambda: None

    def torch_dcp_async() -> Wait:
        return dcp.async_save(
            training.tensors(), checkpoint_id=folder / f"dcp-{next(steps)}", no_dist=True
        ).result

    return {
        "nanotrain --async-save": nanotrain_async,
        **({f"nanotrain --async-save, {run.scheme}://": to_address} if address else {}),
        "torch DCP async_save": torch_dcp_async,
        "nanotrain": nanotrain,
        "torch DCP save": torch_dcp,
        "torch.save, fsync": torch_save,
    }


def measure(
    training: Training, folder: Path, *, rounds: int, address: str | None = None
) -> dict[str, list[tuple[float, float, float]]]:
    """Seconds of the stall, of the step after it, and of a plain step, per contender and round; one
    round warms up.
    """
    times: dict[str, list[tuple[float, float, float]]] = {}
    calls = contenders(training, folder, address)
    for number in range(rounds + 1):
        for name, call in calls.items():
            plain = min(training.step() for _ in range(2))
            start = time.perf_counter()
            wait = call()
            stall = time.perf_counter() - start
            after = training.step()
            wait()
            for old in folder.glob("dcp-*"):
                shutil.rmtree(old)
            if number:
                times.setdefault(name, []).append((stall, after, plain))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=192, help="MiB of saved state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write (default: a temporary folder)"
    )
    parser.add_argument(
        "--write", type=Path, default=None, help="also write the table to this file"
    )
    parser.add_argument("--address", help="an address of object storage, to which is saved too")
    options = parser.parse_args()
    lines = stall_table(
        options.mib, rounds=options.rounds, folder=options.folder, address=options.address
    )
    print("\n".join(lines))
    if options.write:
        options.write.write_text(
            "# Time for which a save stops training\n\n" + "\n".join(lines) + "\n"
        )


def stall_table(
    mib: int, *, rounds: int, folder: Path | None = None, address: str | None = None
) -> list[str]:
    """Measure, and return the lines of the table.

    Args:
        mib: the state in MiB.
        rounds: how often each contender saves.
        folder: where to write; None for a temporary folder.
        address: object storage that is written too.
    """
    torch.set_num_threads(1)
    training = Training(mib)
    nbytes = sum(tensor.nbytes for tensor in training.tensors().values())
    with tempfile.TemporaryDirectory(dir=folder) as target:
        times = measure(training, Path(target), rounds=rounds, address=address)
    lines = [
        f"{datetime.date.today()}, {os.cpu_count()}-core CPU shared with other work, torch {torch.__version__},"
        f" Python {platform.python_version()}; {nbytes / 2**20:.0f} MiB of state, median of {rounds} rounds.",
        "",
        "| writer | stall | share of a step | next step, relative to a plain one |",
        "|---|---|---|---|",
    ]
    for name, rows in times.items():
        stall = statistics.median(row[0] for row in rows)
        share, after = (statistics.median(row[i] / row[2] for row in rows) for i in (0, 1))
        lines.append(f"| {name} | {stall:.3f} s | {share:.1%} | {after:.2f}x |")
    return lines


if __name__ == "__main__":
    main()
