"""The only file that uses `torch.cuda`: choose a rank's device, and query or control it.

    pick_device, describe_unused_gpus, process_group_device, device_name, compute_capability
    cudnn_version, planned_cudnn
    memory_pool, allocating_in
    GraphPool       CUDA graphs that share memory
    synchronize
    HostTransfer    between the device and pinned host memory, overlapping computation
    same_stream     the current device and stream, for another thread
    HostCopy        a few numbers for the log, read on the host later
    Stopwatch       time of a step or of one of its phases
    trace_range     a named range in traces
    to_device, host_zeros
    reset_peak_memory, peak_memory, memory_per_rank, start_memory_history, write_memory_history
    set_arithmetic  algorithms and sums of the process

Most of `torch.cuda` raises on a CPU-only torch, so all callers go through these functions.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from nanotrain.comm.driver import hides_gpus, unseen_gpu_reason
from nanotrain.config.config import Config
from nanotrain.errors import EnvironmentFault
from nanotrain.quantities import count_of
from nanotrain.system import available_memory

# torch's allocator reads it at the first CUDA tensor. Expandable segments leave fewer gaps between
# tensors of varying sizes, such as batches and tokens of experts.
_ALLOCATOR = "PYTORCH_ALLOC_CONF"
# Read when cuBLAS and NCCL start. cuBLAS repeats its results with workspaces of fixed size; with
# NVLS the switch sets the order of sums, so Megatron-LM excludes it as well.
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS"}
# Hardware queues from the host; CUDA's 8 are fewer than the streams of a rank, and streams that
# share one wait for each other. Read when CUDA starts.
_CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
_MAX_ALLOCATIONS = 100_000  # newest allocations kept in a memory history; as Megatron-LM
# of a plan for GPUs on a machine without one: the first version that torch prefers
PLANNED_CUDNN = 91501
_CLEAR_PEAK = "5"  # man 5 proc, clear_refs: sets VmHWM back to the current size


def pick_device(
    kind: str, local_rank: int, *, environment: MutableMapping[str, str] = os.environ
) -> torch.device:
    """Choose this rank's device and make it the current one.

    If the launcher makes only one GPU visible to each rank (`srun --gpus-per-task=1`), it is that
    GPU. On a machine with fewer GPUs than ranks, "auto" is the CPU, so that commands for a CPU run
    there too (`describe_unused_gpus`).

    Args:
        kind: choice of the user: "auto" (cuda if available), "cpu" or "cuda".
        local_rank: index of this rank among the ranks of its machine.
        environment: environment of this process; settings of CUDA and its allocator are set in it
            unless there.

    Raises:
        EnvironmentFault: no GPU is visible, or the machine has more ranks than GPUs.
    """
    if kind == "cpu":
        return torch.device("cpu")
    environment.update(_CONNECTIONS | dict(environment))
    has_gpu = torch.cuda.is_available()
    if kind == "auto" and (not has_gpu or _has_too_few_gpus(environment)):
        return torch.device("cpu")
    if not has_gpu:
        raise EnvironmentFault(
            f"device {kind} is not available: torch {torch.__version__} finds no GPU",
            why=unseen_gpu_reason() or "torch.cuda.is_available() is false",
            fix="set --device cpu, or install a CUDA build of torch and check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES",
        )
    if environment.keys().isdisjoint((_ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF")):
        environment[_ALLOCATOR] = "expandable_segments:True"
    num_devices = torch.cuda.device_count()
    if _has_own_gpu(environment, str(local_rank)):
        local_rank = 0
    if local_rank >= num_devices:
        raise EnvironmentFault(
            f"local rank {local_rank} has no GPU: {num_devices} visible on this machine",
            why="every rank uses one GPU",
            fix=f"run torchrun with --nproc-per-node {num_devices}, or set --device cpu",
        )
    device = torch.device("cuda", local_rank)
    # Before other CUDA calls and the process group, or every rank opens a context on GPU 0.
    torch.cuda.set_device(device)
    return device


def describe_unused_gpus(kind: str, *, environment: Mapping[str, str] = os.environ) -> str:
    """A warning where "auto" is the CPU of a machine that has GPUs; else empty."""
    if kind != "auto":
        return ""
    if not torch.cuda.is_available():
        reason = "" if hides_gpus(environment) else unseen_gpu_reason()
        return f"training on the CPU of a machine with an NVIDIA GPU: {reason}" if reason else ""
    if not _has_too_few_gpus(environment):
        return ""
    num_ranks = environment["WORLD_SIZE"]
    num_devices = torch.cuda.device_count()
    return (
        f"training on the CPU: {num_ranks} ranks and {count_of(num_devices, 'GPU')} on this "
        f"machine, and every rank uses one; for the GPU start {num_devices}, for the CPU alone set "
        "--device cpu"
    )


def _has_too_few_gpus(environment: Mapping[str, str]) -> bool:
    """Whether all ranks are on one machine, which has fewer GPUs."""
    num_ranks = environment.get("LOCAL_WORLD_SIZE", "1")
    is_one_machine = num_ranks.isdecimal() and num_ranks == environment.get("WORLD_SIZE")
    if not is_one_machine or int(num_ranks) <= torch.cuda.device_count():
        return False
    return not _has_own_gpu(environment, environment.get("LOCAL_RANK", "0"))


def _has_own_gpu(environment: Mapping[str, str], local_rank: str) -> bool:
    """Whether Slurm or MPI gave this rank its only visible GPU."""
    numbers = {
        environment.get(name)
        for name in ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_LOCAL_RANK")
    }
    is_given = bool(environment.get("CUDA_VISIBLE_DEVICES")) and local_rank in numbers
    return is_given and "TORCHELASTIC_RUN_ID" not in environment and torch.cuda.device_count() == 1


def process_group_device(process_group: dist.ProcessGroup | None) -> torch.device:
    """The device whose tensors a process group communicates."""
    return torch.device("cuda" if dist.get_backend(process_group) == "nccl" else "cpu")


def device_name(device: torch.device) -> str:
    """The name that the driver reports ("NVIDIA H100 80GB HBM3"), or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """The CUDA compute capability; None on a CPU.

    It is (9, 0) for an H100 and for the meta device of a dry run.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)
    return (9, 0) if device.type == "meta" else None


def planned_cudnn() -> int:
    """The version of cuDNN that a plan for GPUs assumes: this machine's, if it has GPUs."""
    return cudnn_version() if torch.cuda.is_available() else PLANNED_CUDNN


def cudnn_version() -> int:
    """The version of cuDNN, 91002 for 9.10.2; 0 without one that torch can use."""
    try:
        return torch.backends.cudnn.version() or 0
    except RuntimeError:  # another cuDNN in LD_LIBRARY_PATH than torch was built with
        return 0


def memory_pool(allocator: Any) -> Any:
    """A pool of GPU memory from another allocator, such as NCCL's."""
    return torch.cuda.MemPool(allocator)


def allocating_in(pool: Any, device: torch.device) -> AbstractContextManager[None]:
    """Allocate tensors of this thread on the device in a pool."""
    context: AbstractContextManager[None] = torch.cuda.use_mem_pool(pool, device)
    return context


class GraphPool:
    """CUDA graphs that share the memory of their temporaries, as they run one after another."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def capture(self) -> Iterator[Any]:
        """Record the work of the block, which is not run; yields the graph, with `replay`.

        The host waits for the device once. Other threads, such as NCCL's watchdog, may call CUDA
        meanwhile.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            yield graph


def synchronize(device: torch.device) -> None:
    """Block the host until all work queued on the device is complete."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak_memory(device: torch.device) -> None:
    """Restart the peak that `peak_memory` reports."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    # no such file or no permission: the peak then counts from the start of the process
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text(_CLEAR_PEAK)


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: allocated tensors on a GPU, the resident set of a process on a CPU.

    0 if it is unknown.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def memory_per_rank(device: torch.device, local_world_size: int) -> int | None:
    """Bytes that a rank may use: a GPU, or a share of the available host memory.

    None if they are unknown.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    available = available_memory()
    return None if available is None else available // local_world_size


def start_memory_history(device: torch.device) -> None:
    """Record allocations of a GPU from here on, with the Python stack of each."""
    torch.cuda.memory._record_memory_history(
        max_entries=_MAX_ALLOCATIONS, stacks="python", device=device
    )


def write_memory_history(path: Path) -> None:
    """Write the recorded allocations, for https://pytorch.org/memory_viz, and stop recording."""
    try:
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def set_arithmetic(config: Config, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torch's algorithms in the whole process, from here on.

    Args:
        config: `deterministic_mode` uses deterministic algorithms, and an operator that has none
            raises; `disable_bf16_reduced_precision_matmul` lets GPUs add the parts of a split bf16
            product in fp32.
        environment: gets the variables of cuBLAS and NCCL for deterministic algorithms, unless it
            has them.
    """
    if config.precision.disable_bf16_reduced_precision_matmul:  # torch's default adds in bf16
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if not config.train.deterministic_mode:
        return
    environment.update(_DETERMINISTIC | dict(environment))
    # with warn_only attention would keep its other algorithm, and warn
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    # memory that is not written is never read here, and to fill it takes a pass over every buffer
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which copies wait for collectives; one, as torch has a pool of 32 streams."""
    return torch.cuda.Stream(device)


def same_stream() -> Callable[[], AbstractContextManager[Any]]:
    """A context in which another thread has the current device and stream of this thread."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return nullcontext
    return partial(torch.cuda.stream, torch.cuda.current_stream())


class HostCopy:
    """A copy of a small tensor to the host; the host waits for the device only in `read`.

    Args:
        tensor: written by the current stream; must not change on a CPU, where it is not copied.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor
        self._event = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.current_stream(tensor.device).record_event()

    @classmethod
    def after(cls, work: Any, tensor: Tensor) -> "HostCopy":
        """Copy the output of a collective, for which the current stream of a GPU does not wait."""
        if tensor.device.type != "cuda":
            work.wait()
            return cls(tensor)
        stream = _side_stream(tensor.device)
        with torch.cuda.stream(stream):
            work.wait()
            copy = cls(tensor)
        tensor.record_stream(stream)
        return copy

    @property
    def is_ready(self) -> bool:
        """Whether `read` returns without waiting."""
        return self._event is None or self._event.query()

    def read(self) -> list[float]:
        """The numbers of a tensor [n]."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers


@contextmanager
def on_side_stream(*tensors: Tensor) -> Iterator[None]:
    """Queue the work inside the block on the stream of small copies, beside the current stream.

    Args:
        tensors: what the block reads and writes, allocated outside of it; the current stream may
            use the results once the host has read a copy that the block made last.
    """
    device = tensors[0].device
    if device.type != "cuda":
        yield
        return
    stream = _side_stream(device)
    with torch.cuda.stream(stream):
        yield
    for tensor in tensors:
        tensor.record_stream(stream)


class Stopwatch:
    """The time from its creation to `stop`: host time on a CPU, stream time on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start: Any = self._now()
        self._stop: Any = None  # a number on a CPU, an event on a GPU

    def stop(self) -> None:
        """End the measured time; on a GPU when the current stream reaches this point."""
        self._stop = self._now()

    @property
    def is_ready(self) -> bool:
        """Whether `seconds` returns without waiting."""
        if self._stop is None:
            return False
        return isinstance(self._stop, float) or bool(self._stop.query())

    def seconds(self) -> float:
        """The time in seconds."""
        if self._device.type != "cuda":
            return float(self._stop - self._start)
        self._stop.synchronize()
        return float(self._start.elapsed_time(self._stop)) / 1e3

    def _now(self) -> Any:
        """A CUDA event on the current stream, or the host's time on a CPU."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def trace_range(name: str, device: torch.device) -> ExitStack:
    """Begin a range in traces of torch's profiler and Nsight Systems (NVTX); `close` ends it."""
    ranges = ExitStack()
    ranges.enter_context(record_function(name))
    if device.type == "cuda":
        ranges.enter_context(torch.cuda.nvtx.range(name))
    return ranges


class HostTransfer:
    """Copies between a device and host memory.

    They run on a side stream of a GPU; on a CPU they are complete on return.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def wait_for_device(self) -> None:
        """Let later copies wait for the work that is queued on the current stream now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def start(self, target: Tensor, source: Tensor) -> "Copy":
        """Start to copy `source` to `target`, of the same dtype, after all earlier copies."""
        assert target.dtype == source.dtype, (
            "a conversion would need memory that is not pinned, and block the host"
        )
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return Copy(target, None if self._stream is None else self._stream.record_event())

    def to_host(self, tensor: Tensor) -> Tensor:
        """Start to copy a tensor of the current stream to new host memory."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._stream is not None)
        self.wait_for_device()
        self.start(host, tensor)
        if self._stream is not None:
            tensor.record_stream(self._stream)  # freed memory is not used again before it is copied
        return host

    def start_return(self, host: Tensor) -> "Copy":
        """Start to copy a tensor of `to_host` back to new memory on the device."""
        with torch.cuda.stream(self._stream):
            tensor = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        return self.start(tensor, host)

    def finish(self) -> None:
        """Let the current stream wait for all copies; the host does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


@dataclass(frozen=True)
class Copy:
    """A copy that was started."""

    target: Tensor
    event: torch.Event | None

    def wait(self) -> Tensor:
        """The target, on the device; the current stream waits for the copy."""
        if self.event is not None:
            stream = torch.cuda.current_stream(self.target.device)
            stream.wait_event(self.event)
            # allocated on the side stream, freed after its use on this one
            self.target.record_stream(stream)
        return self.target

    def wait_on_host(self) -> None:
        """Block the host until it may read the target and write the source."""
        if self.event is not None:
            self.event.synchronize()


def to_device(values: Sequence[float], device: torch.device) -> Tensor:
    """[n] fp64 of host numbers on a device, copied to a GPU from pinned memory without a sync."""
    host = torch.tensor(values, dtype=torch.float64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def host_zeros(numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in host memory, pinned where the device is a GPU."""
    return torch.zeros(numel, dtype=dtype, pin_memory=device.type == "cuda")
