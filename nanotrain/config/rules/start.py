"""Rules that are checked before a run starts: on every device, on a CPU, on a GPU."""

from nanotrain.config.rules.settings import Errors, Settings
from nanotrain.config.schema import typed
from nanotrain.errors import ConfigError


def check_corpus(c: Settings) -> Errors:
    """A run needs data."""
    data = c.data
    has_corpus = bool(data.data_path or data.train_data_path or data.stages)
    if not has_corpus and not data.mock_data and not data.quickstart:
        yield ConfigError(
            "there is no corpus to train on",
            why="data_path is empty, and only the recipes tiny* set quickstart",
            fix="prepare one with `nanotrain prepare` and set --data-path PREFIX, or set "
            "--mock-data",
        )


def check_cpu(c: Settings) -> Errors:
    """Check settings of host memory and of GPU memory, on a CPU."""
    flags = []
    if c.optim.optimizer_cpu_offload:
        flags.append("--optimizer-cpu-offload")
    if c.memory.cpu_offloading:
        flags.append("--cpu-offloading")
    if flags:
        yield ConfigError(
            f"offloading has no effect: {' and '.join(flags)}",
            why="the device is a CPU: optimizer state and activations are in host memory already",
            fix=f"leave out {' and '.join(flags)}",
        )
    if c.parallel.uses_deep_ep:
        yield ConfigError(
            "--moe-flex-dispatcher-backend deepep on CPUs",
            why="DeepEP's kernels run on GPUs",
            fix="leave the flag out, or set --moe-hierarchical-dispatch 1 in its place, which "
            "sends the same rows by all-to-all",
        )
    if c.train.cuda_graph_impl != "none":
        yield ConfigError(
            f"--cuda-graph-impl {c.train.cuda_graph_impl} has no effect",
            why="the device is a CPU, which runs operators as they come",
            fix="leave it out",
        )
    snapshot = c.train.memory_snapshot_path
    if snapshot is not None:
        yield ConfigError(
            f"--memory-snapshot-path {typed(snapshot)} on a CPU",
            why="torch records the allocations of GPUs only",
            fix="leave it out, and --record-memory-history; the end of a run states the peak "
            "memory of its process",
        )


def check_gpu(c: Settings) -> Errors:
    """Check settings of CPUs, on a GPU."""
    if c.train.log_straggler:
        yield ConfigError(
            "--log-straggler on a GPU",
            why="the host does not wait for other ranks there, so the time of a step without waits "
            "is not measured",
            fix="leave it out; --profile and `nanotrain timeline RUN` show kernels and waits of "
            "each rank",
        )
