"""`nanotrain plan`: memory and time of a run before it exists.

--world-size N --gpu NAME           the run of a command line: one screen
    --calibrate RUN                 with the speed that runs had on this machine
    --search                        the layouts of its model that fit, the fastest first
--rows FILE.tsv --output OUT.tsv    a prediction for every row of a table of measurements
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanotrain.cli.dry_run import complete
from nanotrain.cli.parser import CommandParser
from nanotrain.config.flags import parse
from nanotrain.config.load import Loaded, load_line
from nanotrain.system import importing_torch

if TYPE_CHECKING:
    from nanotrain.planner.hardware import GPU


def plan(argv: Sequence[str]) -> int:
    """Predict memory, time and the best layout of a run on many GPUs, or of every row of a table of
    measurements.
    """
    parser = CommandParser("plan", plan)
    args, rest = parser.parse_known_args(argv)
    if (args.rows is None) != (args.output is None):
        parser.error("--rows FILE.tsv and --output OUT.tsv belong together")
    if args.rows is not None and rest:
        parser.error(f"--rows takes every setting from the table: leave out {rest[0]}")
    with importing_torch():
        from nanotrain.planner.rows.table import run_rows

    if args.rows is not None:
        print(run_rows(args.rows, args.output, engine=args.engine))
        return 0
    loaded = load_line(parse(rest))
    loaded = replace(loaded, config=complete(loaded))
    found = _search(args, loaded, rest=rest) if args.search else _predict(args, loaded)
    print(json.dumps(found, indent=2) if args.json else found)
    return 0


def _predict(args: argparse.Namespace, loaded: Loaded) -> Any:
    """The screen of one layout, or its values."""
    from nanotrain.planner.explain import explain
    from nanotrain.planner.prediction import predict
    from nanotrain.planner.scenario import scenario_of
    from nanotrain.planner.screen import as_values, draw, screen
    from nanotrain.planner.search import next_change

    prediction = predict(
        scenario_of(
            loaded.config, args.world_size, gpu=_gpu(args), engine=args.engine or "nanotrain"
        )
    )
    if args.png:
        draw(prediction, args.png)
    if args.json:
        return as_values(prediction, tokens=args.train_tokens)
    text = screen(prediction, tokens=args.train_tokens, change=next_change(prediction))
    return f"{text}\n\n{explain(prediction)}" if args.explain else text


def _search(args: argparse.Namespace, loaded: Loaded, *, rest: Sequence[str]) -> Any:
    """The fastest layouts and the command line of the first, or their values."""
    from nanotrain.planner.screen import as_values, search_text
    from nanotrain.planner.search import layout_of, search

    result = search(
        loaded.config,
        args.world_size,
        gpu=_gpu(args),
        engine=args.engine or "nanotrain",
        fixed=loaded.explicit,
        max_tensor_parallel_size=args.max_tensor_parallel_size,
    )
    if args.json:
        return [
            {"settings": layout_of(each.scenario.config), **as_values(each)} for each in result.best
        ]
    return search_text(result, loaded.config, command=f"nanotrain train {' '.join(rest)}")


def _gpu(args: argparse.Namespace) -> "GPU":
    """The GPU, with the speed that runs had on it where --calibrate names some."""
    from nanotrain.planner.hardware import gpu_of

    gpu = gpu_of(args.gpu)
    if args.calibrate:
        from nanotrain.planner.calibrate import calibrate, measured

        gpu = replace(
            gpu, calibration=calibrate([measured(run, gpu=gpu) for run in args.calibrate])
        )
    return gpu
