"""`nanotrain plan`: memory and time of a run before it exists.

--world-size N --gpu NAME           the run of a command line: one screen
    --calibrate RUN                 with the speed that runs had on this machine
    --search                        the layouts of its model that fit, the fastest first
    --run                           when the run ends, with failures and restarts: plan_run.py
--rows FILE.tsv --output OUT.tsv    a prediction for every row of a table of measurements
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO

from nanotrain.cli.dry_run import complete
from nanotrain.cli.parser import ANY_FLAG, NUMBER_OF_GPUS, CommandParser
from nanotrain.cli.plan_run import add_run_flags, calendar_of, require_run
from nanotrain.cli.values import count, png_file, tokens, world_size
from nanotrain.config.flags import parse
from nanotrain.config.load import Loaded, load_line
from nanotrain.config.rules.check import validate_for_world
from nanotrain.paths import local_path
from nanotrain.system import importing_torch

if TYPE_CHECKING:
    from nanotrain.planner.hardware import GPU


PROGRESS_S = 0.5  # between two lines on the progress of a search


def plan(argv: Sequence[str]) -> int:
    """Predict memory, time and the best layout of a run on many GPUs, or of every row of a table of
    measurements.

    The exit code is 2 for a layout that does not fit into memory.
    """
    parser = plan_parser()
    args, rest = parser.parse_known_args(argv)
    if (args.rows is None) != (args.output is None):
        parser.error("--rows FILE.tsv and --output OUT.tsv belong together")
    require_run(args, parser)
    packages = args.kernel_packages or ()
    if "none" in packages and len(set(packages)) > 1:
        names = ", ".join(name for name in packages if name != "none")
        parser.error(f"--kernel-packages none beside {names}: leave none out, or the others")
    if args.rows is not None and rest:
        parser.error(f"--rows takes every setting from the table: leave out {rest[0]}")
    with importing_torch():
        from nanotrain.planner.rows.table import run_rows

    if args.rows is not None:
        print(run_rows(args.rows, args.output, engine=args.engine))
        return 0
    loaded = load_line(parse(rest))
    loaded = replace(loaded, config=complete(loaded))
    if (args.engine or "nanotrain") == "nanotrain":
        require_accepted(args, loaded)
    if args.search:
        outcome = search_layouts(args, loaded, rest=rest)
    else:
        outcome = predict_layout(args, loaded)
    print(json.dumps(outcome.value, indent=2) if args.json else outcome.value)
    return 0 if outcome.fits else 2


def require_accepted(args: argparse.Namespace, loaded: Loaded) -> None:
    """Check the settings as a run on the GPUs would, without a corpus.

    Raises:
        ConfigError: a run would refuse the settings.
    """
    from nanotrain.planner.limits import require_runnable

    if not args.search:
        size = loaded.data_parallel_size
        validate_for_world(loaded.config, args.world_size, expected_dp=size)
    require_runnable(loaded.config, chosen_gpu(args))


@dataclass(frozen=True)
class Outcome:
    """The text of a plan, and whether the layout fits into memory."""

    value: Any  # text, or values for JSON
    fits: bool


def plan_parser() -> CommandParser:
    """The parser of `nanotrain plan`."""
    parser = CommandParser("plan", plan, epilog=ANY_FLAG, other_flags=NUMBER_OF_GPUS)
    run_or_table = parser.add_mutually_exclusive_group(required=True)
    run_or_table.add_argument(
        "--world-size", type=world_size, metavar="N", help="number of GPUs of the run"
    )
    run_or_table.add_argument(
        "--rows", type=local_path, metavar="FILE.tsv", help="table of measurements"
    )
    parser.add_argument(
        "--gpu",
        default="h100",
        metavar="NAME",
        help="GPU of every rank: a100-80gb, h100, b200, mi300x ... (default: %(default)s)",
    )
    parser.add_argument(
        "--engine",
        metavar="NAME",
        help="program whose overlaps and bytes are modelled: nanotrain, megatron, fsdp2 or "
        "nanotron (default: nanotrain; --rows infers it from each row)",
    )
    parser.add_argument(
        "--kernel-packages",
        nargs="+",
        choices=("none", "fla", "mamba_ssm", "causal_conv1d"),
        metavar="NAME",
        help="packages of the machine with kernels of linear attention and Mamba-2: fla, "
        "mamba_ssm, causal_conv1d, or none (default: those that are installed here)",
    )
    parser.add_argument(
        "--train-tokens",
        type=tokens,
        metavar="T",
        help="also print the days and GPU-hours of a training of T tokens (2e12)",
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="also print every operator with its efficiency, and the formulas",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="search the layouts that fit, the fastest first; settings of the command line stay "
        "fixed",
    )
    parser.add_argument(
        "--max-tensor-parallel-size",
        type=count,
        metavar="N",
        help="largest tp of --search (default: the GPUs of a node)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_files(parser)
    add_run_flags(parser)
    return parser


def add_files(parser: CommandParser) -> None:
    """Add the arguments that name files and run folders."""
    parser.add_argument(
        "--png",
        type=png_file,
        metavar="FILE",
        help="draw the pipeline schedule of a step with the times of its actions",
    )
    parser.add_argument(
        "--calibrate",
        type=local_path,
        nargs="+",
        metavar="RUN",
        help="folders of finished runs on --gpu, whose speed is that of the machine",
    )
    parser.add_argument(
        "--output", type=local_path, metavar="OUT.tsv", help="file for the predictions of --rows"
    )


def predict_layout(args: argparse.Namespace, loaded: Loaded) -> Outcome:
    """The screen of one layout, or its values."""
    from nanotrain.planner.expert_overlap import decide_expert_overlap
    from nanotrain.planner.explain import explain
    from nanotrain.planner.prediction import predict
    from nanotrain.planner.scenario import scenario_of
    from nanotrain.planner.screen import as_values, draw, screen
    from nanotrain.planner.search import next_change

    engine = args.engine or "nanotrain"
    config = loaded.config
    gpu = chosen_gpu(args)
    overlap = ""
    if engine == "nanotrain":
        choice = decide_expert_overlap(config, args.world_size, gpu=gpu)
        config = choice.config
        overlap = choice.text
    scenario = scenario_of(config, args.world_size, gpu=gpu, engine=engine)
    prediction = predict(scenario)
    if args.png:
        draw(prediction, args.png)
    fits = prediction.headroom >= 0
    calendar = calendar_of(args, prediction) if args.run and fits else None
    if args.json:
        values = as_values(prediction, tokens=args.train_tokens)
        if calendar is not None:
            values["run"] = calendar.values()
        return Outcome(values, fits)
    text = screen(prediction, tokens=args.train_tokens, change=next_change(prediction))
    if overlap:
        text = f"{text}\n\n--overlap-moe-expert-parallel-comm is {overlap}"
    if calendar is not None:
        text = f"{text}\n\n{calendar.text()}"
    if args.explain and fits:
        text = f"{text}\n\n{explain(prediction)}"
    return Outcome(text, fits)


def search_layouts(args: argparse.Namespace, loaded: Loaded, *, rest: Sequence[str]) -> Outcome:
    """The fastest layouts and the command lines of the first, or their values."""
    from nanotrain.planner.screen import as_values, search_text, shown_layouts
    from nanotrain.planner.search import layout_of, search

    with progress_line(sys.stderr):
        result = search(
            loaded.config,
            args.world_size,
            gpu=chosen_gpu(args),
            engine=args.engine or "nanotrain",
            fixed=loaded.explicit,
            max_tensor_parallel_size=args.max_tensor_parallel_size,
        )
    if not args.json:
        text = search_text(result, loaded.config, arguments=shlex.join(rest))
        return Outcome(text, fits=True)
    predictions = []
    for prediction in shown_layouts(result):
        settings = layout_of(prediction.scenario.config)
        is_tie = prediction in result.ties
        predictions.append({"settings": settings, "tie": is_tie, **as_values(prediction)})
    return Outcome(predictions, fits=True)


@contextmanager
def progress_line(stream: TextIO) -> Iterator[None]:
    """Rewrite one line with the seconds of a search, on a terminal alone; erase it at the end."""
    if not stream.isatty():
        yield
        return
    start = monotonic()
    ended = Event()

    def show() -> None:
        while not ended.wait(PROGRESS_S):
            stream.write(f"\rsearching layouts, {monotonic() - start:.0f} s ")
            stream.flush()

    thread = Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        stream.write("\r\033[K")
        stream.flush()


def chosen_gpu(args: argparse.Namespace) -> "GPU":
    """The GPU, with the measured speed of the runs that --calibrate names."""
    from nanotrain.planner.hardware import gpu_of

    gpu = gpu_of(args.gpu)
    if args.kernel_packages is not None:
        gpu = replace(gpu, kernel_packages=frozenset(args.kernel_packages) - {"none"})
    if not args.calibrate:
        return gpu
    from nanotrain.planner.calibrate import calibrate, measured

    runs = [measured(run, gpu=gpu) for run in args.calibrate]
    return replace(gpu, calibration=calibrate(runs))
