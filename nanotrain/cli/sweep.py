"""`nanotrain sweep --over NAME=V1,V2 ...`: one training for each value, each in a run folder of its
own.

    --over lr=1e-3,3e-4 --over seed=1,2      split_axis, once for each
         -> lr=1e-3,seed=1 | lr=1e-3,seed=2 | ...          plan_trials: every combination
         -> mistakes of all of them, before the first      check_trials
         -> one after another, each a process              run_trials

A trial that has finished is not run again, so the same command continues a sweep that was stopped.
"""

import itertools
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nanotrain.cli.launch import check_names, split_arguments
from nanotrain.cli.parser import CommandParser
from nanotrain.config.config import Config
from nanotrain.config.flags import parse
from nanotrain.config.load import Loaded, load_line
from nanotrain.config.rules.check import validate_start
from nanotrain.config.schema import nest, to_dict
from nanotrain.errors import ConfigError, NanotrainError
from nanotrain.paths import expanded
from nanotrain.system import handling_signals

if TYPE_CHECKING:
    from nanotrain.report.history import RunHistory

MAX_TRIALS = 1000
MAX_NAME = 200  # bytes of a folder name; file systems take 255
RUN_DIR = ("run_dir", "train.run_dir")
AXIS = re.compile(r"(?P<name>(--|\+)?[A-Za-z][\w.-]*)=(?P<values>.+)", re.DOTALL)


@dataclass(frozen=True)
class Trial:
    """One combination of values."""

    name: str  # of the folder, as lr=1e-3,seed=2
    settings: tuple[str, ...]  # arguments of the training that choose its values
    folder: Path = Path()
    train_iters: int = 0

    def arguments(self, shared: Sequence[str]) -> list[str]:
        """The arguments of the training: the last of two settings of a field counts."""
        return [*shared, *self.settings, f"--run-dir={self.folder}"]


def sweep(argv: Sequence[str]) -> int:
    """Train once for each of several values: one run after another, each in its own folder."""
    args, rest = CommandParser("sweep", sweep).parse_known_args(argv)
    options, shared = split_arguments(rest)
    trials = check_trials(plan_trials(args.over), shared=shared, options=options)
    command = args.launch_with or [sys.executable, "-m", "nanotrain", "train"]
    if args.print:
        shown = args.launch_with or ["nanotrain", "train"]
        print(
            "\n".join(shlex.join([*shown, *options, *trial.arguments(shared)]) for trial in trials)
        )
        return 0
    if args.launch_with is None and any(
        re.fullmatch("--nnodes=(?!1$).*", option) for option in options
    ):
        why, fix = (
            "the machines would not agree on the trial",
            "submit a job per trial with --launch-with, or --print",
        )
        raise ConfigError("a sweep on several machines", why=why, fix=fix)
    return run_trials(
        trials, [*command, *options], shared=shared, is_local=args.launch_with is None
    )


def plan_trials(axes: Sequence[str]) -> list[Trial]:
    """Every combination of the values.

    >>> [trial.name for trial in plan_trials(["lr=1,2", "data.split=969,30,1 9,1,0"])]
    ['lr=1,split=969,30,1', 'lr=1,split=9,1,0', 'lr=2,split=969,30,1', 'lr=2,split=9,1,0']

    Raises:
        ConfigError: a setting without values, or given twice; too many combinations.
    """
    by_name: dict[str, list[str]] = {}
    for axis in axes:
        name, values = split_axis(axis)
        if name in by_name:
            raise ConfigError(
                f"--over {name} is given twice", fix=f"--over {name}=V1,V2,... with all its values"
            )
        by_name[name] = values
    combinations = list(itertools.islice(itertools.product(*by_name.values()), MAX_TRIALS + 1))
    if len(combinations) > MAX_TRIALS:
        raise ConfigError(
            f"a sweep of more than {MAX_TRIALS:,} runs",
            why="every combination is run",
            fix="sweep less",
        )
    trials: dict[str, Trial] = {}
    for chosen in combinations:
        pairs = list(zip(by_name, chosen, strict=True))
        label = ",".join(f"{name.rpartition('.')[2].lstrip('-+')}={value}" for name, value in pairs)
        name = re.sub(r"[^\w.+=,-]", "_", label)[:MAX_NAME]
        if name in trials:
            raise ConfigError(
                f"two runs of the sweep would be in a folder {name}", fix="give each value once"
            )
        trials[name] = Trial(name, tuple(setting(name, value) for name, value in pairs))
    return list(trials.values())


def split_axis(axis: str) -> tuple[str, list[str]]:
    """The name of `--over NAME=V1,V2` and its values; with spaces between the values, they may hold
    commas.

    Raises:
        ConfigError: no name, or no value.
    """
    match = AXIS.fullmatch(axis.strip())
    if match is None:
        raise ConfigError(
            f"--over {axis}", why="it takes a setting and its values", fix="--over lr=1e-3,3e-4"
        )
    name = match["name"].removeprefix("--").replace("-", "_")
    text = match["values"].strip()
    values = text.split() if re.search(r"\s", text) else text.split(",")
    if not all(values):
        raise ConfigError(f"--over {axis} has an empty value", fix=f"--over {name}=V1,V2")
    if name in RUN_DIR:
        raise ConfigError(
            "--over run_dir",
            why="a sweep names the run folders itself",
            fix="--run-dir for all of them",
        )
    return name, values


def setting(name: str, value: str) -> str:
    """The argument that sets a field, by key, by flag, or `+config=NAME`.

    >>> setting("optim.lr", "1"), setting("weight_decay", "0"), setting("+config", "tiny")
    ('optim.lr=1', '--weight-decay=0', '+config=tiny')
    """
    # model=NAME chooses a file of a section
    files = {"config", *(section.name for section in fields(Config))}
    by_key = "." in name or name.startswith("+") or name in files
    return f"{name}={value}" if by_key else f"--{name.replace('_', '-')}={value}"


def check_trials(
    trials: Sequence[Trial], *, shared: Sequence[str], options: Sequence[str]
) -> list[Trial]:
    """The trials with their folders, after a check of all of them.

    Args:
        trials: trials from `plan_trials`.
        shared: arguments of every training; a `--run-dir` is the folder of the folders.
        options: torchrun's options.

    Raises:
        ConfigError: the first trial that cannot be trained, and why.
    """
    placed: list[Trial] = []
    for trial in trials:
        try:
            arguments = [*shared, *trial.settings]
            loaded = load_line(parse(arguments))
            check_names(loaded.config)
            if options:
                from nanotrain.launch.start_ranks import check_ranks

                check = partial(
                    validate_start, loaded.config, expected_dp=loaded.data_parallel_size
                )
                check_ranks(["nanotrain.train", *arguments], options=options, check=check)
        except NanotrainError as error:
            raise ConfigError(f"run {trial.name}: {error}") from None
        run_dir = expanded(str(loaded.config.train.run_dir))  # refuses addresses
        base = Path(run_dir if "train.run_dir" in loaded.explicit else f"{run_dir}-sweep")
        folder = (placed[0].folder.parent if placed else base) / trial.name
        if run := _run_of(folder):
            _check_same_run(run, loaded)
        placed.append(replace(trial, folder=folder, train_iters=loaded.config.train.train_iters))
    return placed


def _run_of(folder: Path) -> "RunHistory | None":
    """The run of a trial; None before it was started."""
    from nanotrain.report.history import RunHistory

    return RunHistory.read(folder) if (folder / "config.yaml").is_file() else None


def _check_same_run(run: "RunHistory", loaded: Loaded) -> None:
    """Refuse a run folder that was trained with other values of the settings that a command line
    gives.
    """
    from nanotrain.train.resume.restore import changed_settings

    saved, given = nest(run.config), to_dict(loaded.config)
    changed = [
        each for each in changed_settings(saved, given) if each.split()[0] in loaded.explicit
    ]
    if changed:
        why, fix = (
            f"it was trained with others: {', '.join(changed)}",
            "choose another --run-dir, or remove the folder",
        )
        raise ConfigError(f"run folder {run.folder} is not of these settings", why=why, fix=fix)


def run_trials(
    trials: Sequence[Trial], command: Sequence[str], *, shared: Sequence[str], is_local: bool
) -> int:
    """Run the trials one after another; one that fails does not end the others.

    Args:
        trials: trials with their folders.
        command: command of a training, to which its arguments are added.
        shared: arguments of every training.
        is_local: whether the command returns when the training has ended, not when it was
            submitted.

    Returns:
        The exit code: 0, or that of the first trial that failed.
    """
    running: list[subprocess.Popen[bytes]] = []
    stops: list[int] = []
    failures: dict[str, int] = {}

    def on_signal(number: int) -> None:
        """A stop lets the training save and end, and ends the sweep after it; SIGUSR1 lets it save
        and continue.
        """
        is_stop = number != signal.SIGUSR1
        stops.extend([number] * is_stop)
        for process in running:
            process.send_signal(signal.SIGTERM if is_stop else number)

    with handling_signals(on_signal):
        for number, trial in enumerate(trials, start=1):
            if stops:
                break
            progress = f"run {number} of {len(trials)}: {trial.name}"
            before = _run_of(trial.folder) if is_local else None
            if before is not None and before.last_step >= trial.train_iters:
                print(f"{progress} has finished before", flush=True)
                continue
            print(progress, flush=True)
            running[:] = [_start([*command, *trial.arguments(shared)])]
            if stops:  # a signal came while it was started
                running[0].send_signal(signal.SIGTERM)
            if code := running[0].wait():
                failures[trial.name] = 128 - code if code < 0 else code
    if is_local:
        _list(trials)
    for name, code in failures.items():
        print(f"error: run {name} ended with exit code {code}", file=sys.stderr)
    return next(iter(failures.values()), 0)


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a command in a process group of its own, so that a signal reaches it once, from here."""
    try:
        return subprocess.Popen(command, process_group=0)
    except OSError as error:
        fix = "--launch-with names a program and its first arguments, as 'sbatch scripts/launch_slurm'"
        raise ConfigError(
            f"{command[0]} cannot be started", why=error.strerror or str(error), fix=fix
        ) from None


def _list(trials: Sequence[Trial]) -> None:
    """The runs there are, the lowest validation or training loss first."""
    from nanotrain.report.terminal import list_runs, terminal

    runs = [run for trial in trials if (run := _run_of(trial.folder))]
    ranked = sorted(
        runs, key=lambda run: run.last("valid_loss") or run.last("loss") or float("inf")
    )
    list_runs(ranked, console=terminal())
    if len(ranked) > 1:
        print(f"nanotrain compare {shlex.join(str(run.folder) for run in ranked[:2])}")
        print(f"nanotrain report {ranked[0].folder.parent}/*")
