"""`nanotrain doctor`: a test of machines within seconds, without a model.

Without options of torchrun it tests this machine with one rank; `--nproc-per-node 8` starts one per
GPU, `torchrun -m nanotrain doctor` runs on several machines.
"""

import json
import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from nanotrain.cli.checks import refuse_inside_torchrun
from nanotrain.cli.launch import take_options
from nanotrain.cli.parser import CommandParser
from nanotrain.cli.values import number
from nanotrain.config.config import Config
from nanotrain.paths import local_path
from nanotrain.scheduler import require_one_task
from nanotrain.system import importing_torch

OUTLIERS = 1  # exit code
factor = number("factor above 1 and at most 1000", low=1.000001, high=1000.0)


def doctor(argv: Sequence[str]) -> int:
    """Test machines within seconds: matrix products, messages between ranks, collectives, disk and
    clocks; name ranks, pairs and hosts that are slower than the median.

    The exit code is 1 where there is an outlier.
    """
    options, arguments = take_options(argv)
    args = doctor_parser().parse_args(arguments)
    if not options:
        require_one_task(os.environ)
        return doctor_on_rank(args)
    refuse_inside_torchrun("doctor", options=options, environment=os.environ)
    with importing_torch():
        from nanotrain.launch.start_ranks import start_ranks

    return start_ranks(
        ["nanotrain", "doctor", *arguments],
        options=options,
        environment=os.environ,
        check=lambda world_size: None,
    )


def doctor_parser() -> CommandParser:
    """The parser of `nanotrain doctor`."""
    parser = CommandParser(
        "doctor", doctor, epilog="--nproc-per-node and other options of torchrun may follow"
    )
    parser.add_argument(
        "--folder",
        type=local_path,
        default=Path("."),
        metavar="DIR",
        help="folder of the disk that is tested (default: the current one)",
    )
    parser.add_argument(
        "--factor",
        type=factor,
        default=2.0,
        metavar="F",
        help="multiple of the median above which something is an outlier (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device of every rank (default: %(default)s: cuda where available)",
    )
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON")
    return parser


def doctor_on_rank(args: Namespace) -> int:
    """Measure on this rank, and print on the first one."""
    with importing_torch():
        from nanotrain.comm.parallel_context import Launch, ParallelContext
        from nanotrain.topology.topology import Topology
        from nanotrain.watch.sniff import describe, measure, outliers

    world_size = Launch.of(os.environ).world_size
    topology = Topology.of(Config().parallel, world_size)
    with ParallelContext.start(topology, device=args.device, timeout_s=120.0) as context:
        measurements = measure(context, args.folder)
        found = outliers(measurements, factor=args.factor)
        if context.rank == 0 and args.json:
            values = {
                "measurements": [asdict(measurement) for measurement in measurements],
                "outliers": [asdict(outlier) for outlier in found],
            }
            print(json.dumps(values), flush=True)
        elif context.rank == 0:
            print(describe(measurements, found), flush=True)
    return OUTLIERS if found else 0
