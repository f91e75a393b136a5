"""`nanotrain sweep --over NAME=V1,V2 ...`: one training per value, each in its own run folder.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nanotrain.cli.checks import check_names
from nanotrain.cli.launch import split_arguments
from nanotrain.cli.parser import CommandParser
from nanotrain.cli.values import words
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

    name: str  # name of its folder, as lr=1e-3,seed=2
    settings: tuple[str, ...]  # arguments of the training that choose its values
    folder: Path = Path()
    train_iters: int = 0

    def arguments(self, shared: Sequence[str]) -> list[str]:
        """The arguments of the training: the last of two settings of a field counts."""
        return [*without_run_dir(shared), *self.settings, f"--run-dir={self.folder}"]


def without_run_dir(arguments: Sequence[str]) -> list[str]:
    """The arguments without `--run-dir FOLDER`, as each run of a sweep has its own folder.

    >>> without_run_dir(["+config=tiny", "--run-dir", "runs/lr", "--bf16", "run_dir=runs/b"])
    ['+config=tiny', '--bf16']
    """
    kept: list[str] = []
    is_value = False  # of the flag before
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_run_dir = name.lstrip("-+").replace("-", "_") in RUN_DIR
        if not is_run_dir and not is_value:
            kept.append(argument)
        is_value = is_run_dir and not equals
    return kept


def sweep(argv: Sequence[str]) -> int:
    """Train once for each of several values: one run after another, each in its own folder."""
    args, rest = sweep_parser().parse_known_args(argv)
    options, shared = split_arguments(rest)
    trials = check_trials(plan_trials(args.over), shared=shared, options=options)
    if args.print:
        command = args.launch_with or ["nanotrain", "train"]
        for trial in trials:
            print(shlex.join([*command, *options, *trial.arguments(shared)]))
        return 0
    is_local = args.launch_with is None
    if is_local and any(re.fullmatch("--nnodes=(?!1$).*", option) for option in options):
        raise ConfigError(
            "a sweep on several machines",
            why="the machines would not agree on the trial",
            fix="submit a job per trial with --launch-with, or --print",
        )
    command = args.launch_with or [sys.executable, "-m", "nanotrain", "train"]
    return run_trials(trials, [*command, *options], shared=shared, is_local=is_local)


def sweep_parser() -> CommandParser:
    """The parser of `nanotrain sweep`."""
    parser = CommandParser(
        "sweep",
        sweep,
        epilog="the arguments of `nanotrain train` follow, for example --nproc-per-node 2 "
        "+config=tiny --run-dir runs/lr",
    )
    parser.add_argument(
        "--over",
        action="append",
        required=True,
        metavar="NAME=V1,V2",
        help="a setting and its values, as lr=1e-3,3e-4; may be repeated, and every combination "
        "is run",
    )
    parser.add_argument(
        "--launch-with",
        type=words,
        metavar="COMMAND",
        help="start each run with this instead of `nanotrain train`, as 'sbatch "
        "scripts/launch_slurm'",
    )
    parser.add_argument(
        "--print", action="store_true", help="print the command of each run and start none"
    )
    return parser


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
        values_by_name = dict(zip(by_name, chosen, strict=True))
        folder_name = trial_name(values_by_name)
        if folder_name in trials:
            raise ConfigError(
                f"two runs of the sweep would be in a folder {folder_name}",
                fix="give each value once",
            )
        settings = tuple(setting(name, value) for name, value in values_by_name.items())
        trials[folder_name] = Trial(folder_name, settings)
    return list(trials.values())


def trial_name(values: Mapping[str, str]) -> str:
    """The name of a trial's folder.

    >>> trial_name({"optim.lr": "1", "+config": "my/own"})
    'lr=1,config=my_own'
    """
    parts = [f"{name.rpartition('.')[2].lstrip('-+')}={value}" for name, value in values.items()]
    return re.sub(r"[^\w.+=,-]", "_", ",".join(parts))[:MAX_NAME]


def split_axis(axis: str) -> tuple[str, list[str]]:
    """The name of `--over NAME=V1,V2` and its values; values may hold commas if spaces divide them.

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
    """Check all trials; returns them with their folders.

    Args:
        trials: trials from `plan_trials`.
        shared: arguments of every training; a `--run-dir` is the folder of the folders.
        options: torchrun's options.

    Raises:
        ConfigError: the first trial that cannot be trained, and why.
    """
    checked: list[Trial] = []
    base: Path | None = None  # the folder of all run folders, which the first trial names
    for trial in trials:
        try:
            loaded = load_trial(trial, shared=shared, options=options)
        except NanotrainError as error:
            raise ConfigError(f"run {trial.name}: {error}") from None
        run_dir = expanded(str(loaded.config.train.run_dir))  # refuses addresses
        if base is None:
            base = Path(run_dir if "train.run_dir" in loaded.explicit else f"{run_dir}-sweep")
        folder = base / trial.name
        run = read_run(folder)
        if run is not None:
            check_same_run(run, loaded)
        checked.append(replace(trial, folder=folder, train_iters=loaded.config.train.train_iters))
    return checked


def load_trial(trial: Trial, *, shared: Sequence[str], options: Sequence[str]) -> Loaded:
    """The checked configuration of a trial.

    Raises:
        NanotrainError: a mistake in its arguments or in torchrun's options.
    """
    arguments = [*shared, *trial.settings]
    loaded = load_line(parse(arguments))
    check_names(loaded.config)
    if options:
        from nanotrain.launch.start_ranks import check_ranks

        check = partial(validate_start, loaded.config, expected_dp=loaded.data_parallel_size)
        check_ranks(["nanotrain.train", *arguments], options=options, check=check)
    return loaded


def read_run(folder: Path) -> "RunHistory | None":
    """The run of a trial; None before it was started."""
    from nanotrain.report.history import RunHistory

    return RunHistory.read(folder) if (folder / "config.yaml").is_file() else None


def check_same_run(run: "RunHistory", loaded: Loaded) -> None:
    """Check that a run folder was trained with the settings that a command line gives.

    Raises:
        ConfigError: some have other values.
    """
    from nanotrain.train.resume.restore import changed_settings

    changes = changed_settings(nest(run.config), to_dict(loaded.config))
    explicit_changes = [change for change in changes if change.split()[0] in loaded.explicit]
    if explicit_changes:
        raise ConfigError(
            f"run folder {run.folder} is not of these settings",
            why=f"it was trained with others: {', '.join(explicit_changes)}",
            fix="choose another --run-dir, or remove the folder",
        )


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
    runner = TrialRunner()
    with handling_signals(runner.on_signal):
        for number, trial in enumerate(trials, start=1):
            if runner.is_stopped:
                break
            progress = f"run {number} of {len(trials)}: {trial.name}"
            if is_local and has_finished(trial):
                print(f"{progress} has finished before", flush=True)
                continue
            print(progress, flush=True)
            runner.run(trial, [*command, *trial.arguments(shared)])
    if is_local:
        list_by_loss(trials)
    for name, code in runner.failures.items():
        print(f"error: run {name} ended with exit code {code}", file=sys.stderr)
    return next(iter(runner.failures.values()), 0)


def has_finished(trial: Trial) -> bool:
    """Whether the run of a trial has all its steps."""
    run = read_run(trial.folder)
    return run is not None and run.last_step >= trial.train_iters


@dataclass
class TrialRunner:
    """Runs trials one after another: the running process, and the exit codes so far."""

    process: "subprocess.Popen[bytes] | None" = None
    is_stopped: bool = False  # a signal ends the sweep
    failures: dict[str, int] = field(default_factory=dict)  # exit codes by trial

    def on_signal(self, number: int) -> None:
        """Pass on a signal: SIGUSR1 lets the training save, others also end it and the sweep."""
        is_stop = number != signal.SIGUSR1
        if is_stop:
            self.is_stopped = True
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM if is_stop else number)

    def run(self, trial: Trial, command: Sequence[str]) -> None:
        """Run a command to its end."""
        self.process = start_process(command)
        if self.is_stopped:  # a signal came while it was started
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait()
        if code != 0:
            self.failures[trial.name] = 128 - code if code < 0 else code


def start_process(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a command in its own process group, so that a signal reaches it once, from here."""
    try:
        return subprocess.Popen(command, process_group=0)
    except OSError as error:
        raise ConfigError(
            f"{command[0]} cannot be started",
            why=error.strerror or str(error),
            fix="--launch-with names a program and its first arguments, as "
            "'sbatch scripts/launch_slurm'",
        ) from None


def list_by_loss(trials: Sequence[Trial]) -> None:
    """List the runs there are, the lowest validation or training loss first."""
    from nanotrain.report.terminal import list_runs, terminal

    runs = []
    for trial in trials:
        run = read_run(trial.folder)
        if run is not None:
            runs.append(run)
    ranked = sorted(
        runs, key=lambda run: run.last("valid_loss") or run.last("loss") or float("inf")
    )
    list_runs(ranked, console=terminal())
    if len(ranked) > 1:
        print(f"nanotrain compare {shlex.join(str(run.folder) for run in ranked[:2])}")
        print(f"nanotrain report {ranked[0].folder.parent}/*")
