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
from typing import TYPE_CHECKING

from nanotrain.cli.parser import CommandParser
from nanotrain.config.flags import parse
from nanotrain.config.load import Loaded, load_line
from nanotrain.errors import ConfigError

if TYPE_CHECKING:
    from nanotrain.planner.hardware import GPU


def plan(argv: Sequence[str]) -> int:
    """Predict memory, time and the best layout of a run on many GPUs, or of every row of a table of measurements."""
    parser = CommandParser("plan", plan)
    args, rest = parser.parse_known_args(argv)
    if (args.rows is None) != (args.output is None):
        parser.error("--rows FILE.tsv and --output OUT.tsv belong together")
    if (args.rows is None) == (args.world_size is None):
        parser.error("give --world-size N, or --rows FILE.tsv --output OUT.tsv")
    if args.rows is not None:
        if rest:
            parser.error(f"--rows takes every setting from the table: leave out {rest[0]}")
        from nanotrain.planner.rows import run_rows

        print(run_rows(args.rows, args.output, engine=args.engine))
        return 0
    line = parse(rest)
    loaded = load_line(line)
    if loaded.config.model.vocab_size is None:
        raise ConfigError("the vocabulary size is not set", why="no data is read", fix="set --vocab-size")
    print(_search(args, loaded, command=" ".join(rest)) if args.search else _predict(args, loaded))
    return 0


def _predict(args: argparse.Namespace, loaded: Loaded) -> str:
    """The screen of one layout, or its JSON."""
    from nanotrain.planner.explain import explain
    from nanotrain.planner.prediction import predict
    from nanotrain.planner.scenario import scenario_of
    from nanotrain.planner.screen import Training, as_json, draw, screen
    from nanotrain.planner.search import next_change

    prediction = predict(scenario_of(loaded.config, args.world_size, gpu=_gpu(args), engine=args.engine or "nanotrain"))
    if args.png:
        draw(prediction, args.png)
    training = Training.of(prediction, args.train_tokens) if args.train_tokens else None
    if args.json:
        return json.dumps(as_json(prediction, training=training), indent=2)
    text = screen(prediction, training=training, change=next_change(prediction))
    return f"{text}\n\n{explain(prediction)}" if args.explain else text


def _gpu(args: argparse.Namespace) -> "GPU":
    """The GPU, with the speed that runs had on it where --calibrate names some."""
    from nanotrain.planner.hardware import gpu_of

    gpu = gpu_of(args.gpu)
    if not args.calibrate:
        return gpu
    from nanotrain.planner.calibrate import calibrate, measured

    return replace(gpu, calibration=calibrate([measured(run, gpu=gpu) for run in args.calibrate]))


def _search(args: argparse.Namespace, loaded: Loaded, *, command: str) -> str:
    """The fastest layouts and the command line of the first."""
    from nanotrain.planner.screen import as_json, search_text
    from nanotrain.planner.search import search

    result = search(
        loaded.config,
        args.world_size,
        gpu=_gpu(args),
        engine=args.engine or "nanotrain",
        fixed=loaded.explicit,
        max_tensor_parallel_size=args.max_tensor_parallel_size,
    )
    if args.json:
        return json.dumps(
            [{"settings": dict(each.values), **as_json(each.prediction)} for each in result.best], indent=2
        )
    return search_text(result, loaded.config, command=f"nanotrain train {command}")
