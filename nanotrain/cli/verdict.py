"""`nanotrain verdict`: what to do after the failure of a run: restart, exclude a host, or stop.

RUN                                   the verdict on its newest failure
RUN --exit-code N                     judge an attempt that ended with code N
--exit-code N TRAINING ARGUMENTS      the same of the run that a command line trains

A script reads the first word of the output; `exclude` is followed by hosts, `a,b:`.
"""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from nanotrain.cli.parser import ANY_FLAG, CommandParser
from nanotrain.cli.values import not_negative, number
from nanotrain.config.flags import parse
from nanotrain.config.load import load_line
from nanotrain.errors import ConfigError, EnvironmentFault
from nanotrain.paths import local_path
from nanotrain.runs.failures import RankFailure
from nanotrain.runs.folder import RunFolder
from nanotrain.runs.verdict import Evidence, Verdict, judge, judge_run, read_verdicts

exit_code = number("exit code from 0 to 255", low=0, high=255)


def verdict(argv: Sequence[str]) -> int:
    """Print what to do after a failure of a run: restart, exclude hosts, or stop; with evidence."""
    parser = verdict_parser()
    args, rest = parser.parse_known_args(argv)
    if (args.run is None) == (not rest):
        parser.error("name a run folder, or the arguments of its training")
    if args.since is not None and args.exit_code is None:
        parser.error("--since without --exit-code has no effect: add --exit-code")
    if args.exit_code is None:
        found = newest_verdict(args.run or folder_of(rest))
    else:
        found = judge_attempt(args.run, rest, code=args.exit_code, since_s=args.since or 0.0)
    if args.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        print(found.line)
    return 0


def verdict_parser() -> CommandParser:
    """The parser of `nanotrain verdict`."""
    parser = CommandParser("verdict", verdict, epilog=ANY_FLAG)
    parser.add_argument("run", type=local_path, nargs="?", metavar="RUN", help="run folder")
    parser.add_argument(
        "--exit-code",
        type=exit_code,
        metavar="N",
        help="judge the attempt that ended with this code, and append the verdict to "
        "verdicts.jsonl of the run folder (default: print the newest verdict)",
    )
    parser.add_argument(
        "--since",
        type=not_negative,
        metavar="S",
        help="when that attempt began, in seconds since 1970 (default: after the last verdict)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with the evidence")
    return parser


def newest_verdict(folder: Path) -> Verdict:
    """The newest verdict of a run.

    Raises:
        EnvironmentFault: the folder is not there, or has none.
    """
    if not folder.is_dir():
        raise EnvironmentFault(
            f"{folder} is no run folder",
            why="there is no such folder",
            fix="check its path, or name --run-dir as in the training",
        )
    verdicts = read_verdicts(folder)
    if not verdicts:
        raise EnvironmentFault(
            f"{folder} has no verdict",
            why="none of its attempts failed, or none was judged",
            fix="judge the newest attempt with --exit-code N",
        )
    return verdicts[-1]


def judge_attempt(
    run: Path | None, arguments: Sequence[str], *, code: int, since_s: float
) -> Verdict:
    """Judge an attempt of a run.

    Args:
        run: the run folder; None for the one that the arguments name.
        arguments: arguments of the training; mistakes in them are the cause of the failure.
        code: exit code of the attempt.
        since_s: when the attempt began, in seconds since 1970.
    """
    try:
        folder = run or folder_of(arguments)
    except ConfigError as error:
        failure = RankFailure.of(error, rank=0)
        return judge(Evidence(job_exit_code=code, failures=[failure]))
    return judge_run(folder, since_s=since_s, job_exit_code=code, host=platform.node())


def folder_of(arguments: Sequence[str]) -> Path:
    """The run folder of a command line; of a run in object storage the local one.

    Raises:
        ConfigError: arguments that no training takes.
    """
    return RunFolder.of(load_line(parse(arguments)).config).path
