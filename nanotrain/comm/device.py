"""The one file that says `torch.cuda`: which device a rank uses, and its memory, streams and seeds.

    pick_device, backend_of, home_of, device_name    which device, and what speaks for it
    synchronize, manual_seed, to_device              work on it
    reset_peak_memory, peak_memory                   what it held at most
    Stream                                           a side stream; a null object on a CPU

On a CPU-only torch most of `torch.cuda` raises, so every caller goes through these.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from nanotrain.errors import EnvironmentFault

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_CLEAR_PEAK = "5"  # man 5 proc, clear_refs: sets VmHWM back to the current size


def pick_device(kind: str, local_rank: int) -> torch.device:
    """Choose this rank's device and make it the current one.

    Args:
        kind: "auto" (cuda where there is one), "cpu" or "cuda".
        local_rank: this rank's number on its machine.

    Raises:
        EnvironmentFault: no GPU is there, or fewer than ranks on this machine.
    """
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise EnvironmentFault(
            f"device {kind} was asked for but torch {torch.__version__} sees no GPU",
            why="torch.cuda.is_available() is false",
            fix="set --device cpu, or install a CUDA build of torch and check nvidia-smi and CUDA_VISIBLE_DEVICES",
        )
    num_devices = torch.cuda.device_count()
    if local_rank >= num_devices:
        raise EnvironmentFault(
            f"local rank {local_rank} has no GPU: {num_devices} visible on this machine",
            why="every rank needs a GPU of its own",
            fix=f"run torchrun with --nproc-per-node {num_devices}, or set --device cpu",
        )
    device = torch.device("cuda", local_rank)
    # Before any other CUDA call and before the process group, or every rank opens a context on GPU 0.
    torch.cuda.set_device(device)
    return device


def backend_of(device: torch.device) -> str:
    """The torch.distributed backend that moves this device's tensors."""
    return _BACKENDS[device.type]


def home_of(process_group: dist.ProcessGroup | None) -> torch.device:
    """The device whose tensors a process group takes."""
    return torch.device("cuda" if dist.get_backend(process_group) == "nccl" else "cpu")


def device_name(device: torch.device) -> str:
    """The vendor's name ("NVIDIA H100 80GB HBM3"), or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def synchronize(device: torch.device) -> None:
    """Block the host until everything queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def manual_seed(seed: int, device: torch.device) -> None:
    """Seed torch's default generators of the host and of the device."""
    torch.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; from host to GPU through pinned memory, without stopping the host."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def reset_peak_memory(device: torch.device) -> None:
    """Let `peak_memory` count from now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    clear_refs = Path("/proc/self/clear_refs")
    try:
        clear_refs.write_text(_CLEAR_PEAK)
    except OSError:
        return  # another kernel, or a locked-down one: the peak then counts from the start of the process


def peak_memory(device: torch.device) -> int:
    """Bytes held at most: allocated tensors on a GPU, the resident process on a CPU (0 where unknown)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


class Stream:
    """A side stream of a GPU; on a CPU the same calls do nothing, since everything there is in order.

    Memory used inside must be long-lived or waited for: a block freed by its owner while the side stream still reads
    it is handed out again.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def use(self) -> Iterator[None]:
        """Queue what runs inside on this stream, after everything queued on the current stream so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the current stream wait for everything queued on this one."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
