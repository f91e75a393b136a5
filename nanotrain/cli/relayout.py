"""`nanotrain relayout`: another layout for a running job, or the bytes that one would send."""

import argparse
import json
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanotrain.cli.data import REQUESTS_ARE_LOCAL
from nanotrain.cli.parser import ANY_FLAG, CommandParser
from nanotrain.cli.values import count, world_size
from nanotrain.config.config import Config
from nanotrain.config.load import load
from nanotrain.errors import ConfigError, EnvironmentFault
from nanotrain.paths import local_path
from nanotrain.quantities import describe_bytes, table_lines
from nanotrain.runs.lock import is_in_use
from nanotrain.system import importing_torch

if TYPE_CHECKING:
    from nanotrain.plan.relayout import RelayoutPlan


def relayout(argv: Sequence[str]) -> int:
    """Ask the running job of a run folder to go on in another layout, without a restart.

    With --plan, print what the ranks would send, and ask nothing.
    """
    parser = relayout_parser()
    args, rest = parser.parse_known_args(argv)
    require_combination(parser, args)
    with importing_torch():
        from nanotrain.plan.plan import plan_run
        from nanotrain.plan.relayout import plan_relayout
        from nanotrain.runs.relayout import request_layout, require_change, with_layout

    before, num_ranks = layout_before(args)
    ranks = args.ranks or num_ranks
    if ranks > num_ranks:
        raise ConfigError(
            f"--ranks {ranks}",
            why=f"there are {num_ranks}, and no process is started",
            fix="stop the run, and start it on more ranks: a checkpoint loads in any layout",
        )
    after = with_layout(before, rest, world_size=ranks)
    plan_run(after, ranks, rank=0)
    if args.plan:
        plan = plan_relayout(before, after, ranks=(num_ranks, ranks))
        print_plan(plan, args)
        return 0
    require_change(before, after, ranks=(num_ranks, ranks))
    require_steps_left(args.run, before)
    require_job(args.run)
    if request_layout(args.run, rest, ranks=args.ranks):
        print(f"{args.run}: a request that the job had not taken is replaced")
    print(f"{args.run}: the job takes the request at its next logged step")
    return 0


def relayout_parser() -> CommandParser:
    """The parser of `nanotrain relayout`."""
    parser = CommandParser("relayout", relayout, epilog=ANY_FLAG)
    parser.add_argument(
        "run",
        nargs="?",
        type=partial(local_path, why=REQUESTS_ARE_LOCAL),
        metavar="RUN",
        help="run folder of the job",
    )
    parser.add_argument(
        "--ranks",
        type=count,
        metavar="N",
        help="ranks that stay, the first ones; the others end (default: all)",
    )
    parser.add_argument(
        "--plan", action="store_true", help="print the bytes and seconds, and ask nothing"
    )
    parser.add_argument(
        "--from",
        dest="layout_before",
        metavar="FLAGS",
        help="with --plan, a command line in place of a run: its layout now",
    )
    parser.add_argument(
        "--world-size", type=world_size, metavar="N", help="with --from, its number of ranks"
    )
    parser.add_argument(
        "--gpu",
        default="h100",
        metavar="NAME",
        help="with --plan, the GPU of every rank, for the seconds (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="with --plan, print JSON")
    return parser


def require_combination(parser: CommandParser, args: argparse.Namespace) -> None:
    """Check that the arguments belong together."""
    if (args.run is None) == (args.layout_before is None):
        parser.error("give RUN, or --plan --from FLAGS --world-size N")
    if (args.layout_before is None) != (args.world_size is None):
        parser.error("--from FLAGS and --world-size N belong together")
    if args.layout_before is not None and not args.plan:
        parser.error("--from FLAGS needs --plan: no job runs with them")
    if args.json and not args.plan:
        parser.error("--json belongs to --plan")


def layout_before(args: argparse.Namespace) -> tuple[Config, int]:
    """The configuration of the run now, and its number of ranks.

    Raises:
        EnvironmentFault: the folder has no run.
    """
    from nanotrain.cli.dry_run import complete
    from nanotrain.config.flags import parse
    from nanotrain.config.load import load_line

    if args.layout_before is not None:
        loaded = load_line(parse(shlex.split(args.layout_before)))
        return complete(loaded), args.world_size
    from nanotrain.report.history import RunHistory

    history = RunHistory.read(args.run)
    file = args.run / "config.yaml"
    if not file.is_file() or not history.starts:
        raise EnvironmentFault(
            f"{args.run} has no {file.name if history.starts else 'starts.jsonl'}",
            why="a job writes it after its first step",
            fix="wait for the first step of the job",
        )
    return load([f"+config={file.resolve()}"]).config, history.starts[-1].world_size


def require_steps_left(run: Path, config: Config) -> None:
    """Check that a step of the run is left.

    Raises:
        ConfigError: it is finished.
    """
    from nanotrain.runs.metrics_file import last_step

    done = last_step(run / "metrics.jsonl")
    if done >= config.train.train_iters:
        raise ConfigError(
            f"step {done:,} of {config.train.train_iters:,} is done",
            why="no step is left for another layout",
            fix="start the run again with a larger --train-iters and the layout",
        )


def require_job(run: Path) -> None:
    """Check that a job has the run folder.

    Raises:
        EnvironmentFault: none has it.
    """
    if not is_in_use(run):
        raise EnvironmentFault(
            f"no job trains in {run}",
            why="only a running job takes a request",
            fix="start the run with the flags of the layout: a checkpoint loads in any",
        )


def print_plan(plan: "RelayoutPlan", args: argparse.Namespace) -> None:
    """Print bytes, rounds and seconds of a relayout."""
    numbers = plan_numbers(plan, gpu_name=args.gpu)
    if args.json:
        print(json.dumps(numbers))
        return
    rows = []
    for name, value in numbers.items():
        text = f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"
        if name.endswith("_bytes"):
            text = describe_bytes(int(value))
        rows.append([name.removesuffix("_bytes").replace("_", " "), text])
    print("\n".join(table_lines(rows)))


def plan_numbers(plan: "RelayoutPlan", *, gpu_name: str) -> dict[str, Any]:
    """The numbers of a plan by name; seconds at the bandwidth of the slowest link alone."""
    from nanotrain.checkpoint.live import MEMORY_BYTES
    from nanotrain.planner.hardware import gpu_of

    gpu = gpu_of(gpu_name)
    most = max([*plan.sent_by, *plan.received_by])
    between_nodes = plan.most_between_nodes(gpu.gpus_per_node)
    network_s = between_nodes / (gpu.network.bandwidth * gpu.network_efficiency)
    node_s = most / gpu.node.bandwidth
    return {
        "state_of_all_ranks_bytes": sum(plan.state_bytes),
        "sent_by_all_ranks_bytes": plan.transfers.sent_bytes,
        "most_sent_by_a_rank_bytes": max(plan.sent_by),
        "most_received_by_a_rank_bytes": max(plan.received_by),
        "most_of_a_rank_between_nodes_bytes": between_nodes,
        "buffers_of_a_rank_bytes": MEMORY_BYTES,
        "rounds": plan.num_rounds,
        "seconds_of_sending": max(network_s, node_s),
    }
