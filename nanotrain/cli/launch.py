"""`nanotrain train --nproc-per-node N ...`: torchrun's options, also for evaluate and generate.

    argv -> torchrun's options, training arguments       split_arguments, without torch
         -> mistakes, --help, --cfg job                   answered once, before any rank starts
         -> one process per rank                          launch/start_ranks.py
     -> after a failure the verdict on it             runs/verdict.py

Without one of torchrun's options, `nanotrain train` trains in this process.
"""

import platform
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path

from nanotrain.cli.checks import refuse_inside_torchrun
from nanotrain.config.flags import known_flags, parse
from nanotrain.config.load import load_line, reply
from nanotrain.config.overrides import begins_argument
from nanotrain.config.rules.check import validate_start
from nanotrain.config.suggest import by_spelling
from nanotrain.errors import ConfigError, NanotrainError
from nanotrain.paths import expanded
from nanotrain.runs.failures import is_run_folder
from nanotrain.runs.folder import RunFolder
from nanotrain.runs.verdict import judge_run
from nanotrain.system import importing_torch
from nanotrain.topology.smaller_world import largest_world, require_smaller_world

# The options of torchrun that are accepted; each takes a value, except the ones in SWITCHES.
OPTIONS = (
    "--nproc-per-node",
    "--nnodes",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--local-addr",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--max-restarts",
    "--monitor-interval",
    "--log-dir",
    "--redirects",
    "--tee",
    "--local-ranks-filter",
    "--numa-binding",
)
SWITCHES = ("--standalone",)


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Torchrun's options, in its spelling with hyphens, and the training arguments.

    >>> split_arguments(["--nproc_per_node=2", "+config=tiny", "--nnodes", "1", "--lr", "1e-3"])
    (['--nproc-per-node=2', '--nnodes=1'], ['+config=tiny', '--lr', '1e-3'])

    Raises:
        ConfigError: an option without its value, or a misspelled one.
    """
    options, rest = take_options(argv)
    require_no_misspelled(rest)
    return options, rest


def require_no_misspelled(arguments: Sequence[str]) -> None:
    """Check that no argument is a misspelled option of torchrun.

    Raises:
        ConfigError: one is.
    """
    known = known_flags()
    for argument in arguments:
        flag = argument.partition("=")[0]
        if not flag.startswith("--") or flag in known or by_spelling(flag, known):
            continue
        meant = by_spelling(flag, (*OPTIONS, *SWITCHES))
        if meant is not None:
            raise ConfigError(
                f"unknown flag {flag}",
                why="neither nanotrain nor torchrun has such a flag",
                fix=f"did you mean {meant}?",
            )


def take_options(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Torchrun's options, in its spelling with hyphens, and all other arguments as they are.

    Raises:
        ConfigError: an option without its value, or an address for --log-dir.
    """
    options: list[str] = []
    rest: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        name, has_value, value = argument.partition("=")
        name = name.replace("_", "-")
        if name in SWITCHES:
            options.append(name)
        elif name in OPTIONS:
            if not has_value:
                value = next(arguments, "")
            if not value or (not has_value and begins_argument(value)):
                raise ConfigError(
                    f"{argument} has no value",
                    why="torchrun's option takes one",
                    fix=f"{name} VALUE",
                )
            if name == "--log-dir":
                value = expanded(value)
            options.append(f"{name}={value}")
        else:
            rest.append(argument)
    return options, rest


def launch(
    options: Sequence[str], arguments: Sequence[str], *, environment: MutableMapping[str, str]
) -> int:
    """Check the training arguments, then train on one process per rank.

    Args:
        options: torchrun's options, from `split_arguments`.
        arguments: arguments of the training.
        environment: environment of this process, which the ranks inherit; OMP_NUM_THREADS is set
            in it.

    Returns:
        The exit code: 0 after the last step or a saved stop, otherwise the code of the first rank
        that failed.

    Raises:
        NanotrainError: a mistake in the options or the arguments, or machines that do not meet.
    """
    refuse_inside_torchrun("train", options=options, environment=environment)
    line = parse(arguments)
    text = reply(line)
    if text is not None:
        print(text)
    if line.help_topic is not None:
        return 0
    loaded = load_line(line)
    check = partial(validate_start, loaded.config, expected_dp=loaded.data_parallel_size)
    program = ["nanotrain.train", *arguments]
    with importing_torch():
        from nanotrain.launch.start_ranks import check_ranks, start_ranks
        from nanotrain.launch.supervisor import Limits
        from nanotrain.train.inputs import check_local_files

    train = loaded.config.train
    in_place = None
    if train.inprocess_restart:
        in_place = Limits(
            train.inprocess_max_iterations,
            largest_world=partial(largest_world, loaded.config),
            require_smaller_world=partial(require_smaller_world, loaded.config),
        )
    if text is not None:
        check_ranks(program, options=options, check=check, in_place=in_place)
        return 0
    check_local_files(loaded)
    folder = RunFolder.of(loaded.config).path
    return start_ranks(
        program,
        options=options,
        environment=environment,
        check=check,
        on_failure=partial(print_verdict, folder, since_s=time.time()),
        in_place=in_place,
    )


def print_verdict(folder: Path, exit_codes: Mapping[int, int], *, since_s: float) -> None:
    """Judge a failed attempt of a run, and print the verdict.

    Args:
        folder: run folder; without one the message of the ranks says all.
        exit_codes: exit codes of ranks of this machine.
        since_s: when the attempt began, in seconds since the epoch.
    """
    if not is_run_folder(folder):
        return
    try:
        verdict = judge_run(folder, since_s=since_s, exit_codes=exit_codes, host=platform.node())
    except NanotrainError as error:
        print(f"no verdict: {error}", file=sys.stderr, flush=True)
        return
    print(f"verdict: {verdict.line}", file=sys.stderr, flush=True)
