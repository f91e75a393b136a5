"""The number of GPUs that a launch script names.

    batch_options(text)          the options of a script's #SBATCH lines
    ranks_of_launch(words, ...)  ranks by the options of launchers and of Slurm

A launcher such as torchrun starts several processes per task of Slurm, so tasks are ranks only
where Python is started directly.
"""

import re
from collections.abc import Mapping, Sequence

from nanotrain.audit.arguments import number_of

MAX_RANKS = 200_000
SBATCH = re.compile(r"^#SBATCH\s+([^#\n]*)", flags=re.MULTILINE)
# launchers, also as modules of Python, that start one process per GPU of a node
NODE_LAUNCHERS = (
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
    "deepspeed",
    "accelerate",
)
PYTHON = re.compile(r"python[\d.]*")
NODES = ("--nnodes", "--nodes", "-N", "--num_nodes", "--num_machines")
# options of torchrun and of DeepSpeed's launcher
PROCESSES_OF_NODE = ("--nproc-per-node", "--nproc_per_node", "--num_gpus")
# options of accelerate
PROCESSES_IN_ALL = ("--num_processes", "--num-processes")
# options of mpirun and of Slurm
TASKS_OF_NODE = ("--ntasks-per-node",)
TASKS_IN_ALL = ("-np", "--np", "--ntasks", "-n")
GPUS_OF_NODE = ("--gpus-per-node", "--gres")

Options = Mapping[str, str]


def batch_options(text: str) -> dict[str, str]:
    """The options of the #SBATCH lines of a script with their values.

    >>> batch_options("#SBATCH --nodes=2 --gres=gpu:8\\n")
    {'--nodes': '2', '--gres': 'gpu:8'}
    """
    options = {}
    for line in SBATCH.findall(text):
        options.update(launcher_options(line.split()))
    return options


def launcher_options(words: Sequence[str]) -> dict[str, str]:
    """The options of torchrun, srun and other launchers with their values."""
    options = {}
    for index, word in enumerate(words):
        flag, has_value, value = word.partition("=")
        following = words[index + 1] if index + 1 < len(words) else ""
        if flag.startswith("-"):
            options[flag] = value if has_value else following
    return options


def ranks_of_launch(words: Sequence[str], batch: Options) -> int | None:
    """The number of ranks of a launch; None where it is not known.

    Args:
        words: the launch up to its program.
        batch: `batch_options` of the script.

    >>> srun = ["srun", "torchrun", "--nproc_per_node", "$GPUS"]
    >>> ranks_of_launch(srun, {"--nodes": "2", "--ntasks": "2"}) is None
    True
    >>> ranks_of_launch(srun, {"--nodes": "2", "--gres": "gpu:8"})
    16
    """
    names = {word.rpartition("/")[2] for word in words}
    launch = launcher_options(words)
    if not names.isdisjoint(NODE_LAUNCHERS):
        return ranks_of_launcher(launch, batch)
    if any(PYTHON.fullmatch(name) for name in names):
        return ranks_of_tasks(launch, batch)
    return None


def ranks_of_launcher(launch: Options, batch: Options) -> int | None:
    """The ranks of a launcher that starts one process per GPU of a node."""
    in_all = first_count(PROCESSES_IN_ALL, launch)
    if in_all is not None:
        return limited(in_all)
    nodes = first_count(NODES, launch, batch)
    per_node = first_count(PROCESSES_OF_NODE, launch)
    if per_node is None:
        return product(nodes, first_count(GPUS_OF_NODE, launch, batch))
    if launch.keys().isdisjoint(NODES):  # the launcher's default
        nodes = 1
    return product(nodes, per_node)


def ranks_of_tasks(launch: Options, batch: Options) -> int | None:
    """The ranks where every task of mpirun or Slurm is one."""
    in_all = first_count(TASKS_IN_ALL, launch, batch)
    if in_all is not None:
        return limited(in_all)
    per_node = first_count(TASKS_OF_NODE + GPUS_OF_NODE, launch, batch)
    nodes = first_count(NODES, launch, batch)
    if nodes is None and launch.keys().isdisjoint(NODES):
        nodes = 1
    return product(nodes, per_node)


def first_count(names: Sequence[str], *groups: Options) -> int | None:
    """The value of the first of several options that is a number of at least 1."""
    for options in groups:
        for name in names:
            if name in options:
                count = count_in(count_text(name, options[name]))
                if count is not None:
                    return count
    return None


def count_text(name: str, value: str) -> str:
    """The number in the value of an option.

    >>> count_text("--gres", "nvme:1,gpu:h100:8"), count_text("--gpus-per-node", "h100:4")
    ('8', '4')
    """
    if name == "--gres":
        resources = [part for part in value.split(",") if part.startswith("gpu:")]
        value = resources[0] if resources else ""
    if name in GPUS_OF_NODE:
        return value.rpartition(":")[2]
    return value


def count_in(text: str) -> int | None:
    """A text as a number of at least 1; None for other texts."""
    number = number_of(text)
    is_count = number is not None and number >= 1 and number == int(number)
    return int(number) if number is not None and is_count else None


def product(nodes: int | None, per_node: int | None) -> int | None:
    """The ranks of nodes; None where a number is not known."""
    if nodes is None or per_node is None:
        return None
    return limited(nodes * per_node)


def limited(ranks: int | None) -> int | None:
    """A number of ranks; None above MAX_RANKS."""
    return ranks if ranks is not None and ranks <= MAX_RANKS else None
