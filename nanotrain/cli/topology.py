"""`nanotrain topology`: the process groups of a layout, and pictures of pipeline schedules."""

from argparse import Namespace
from collections.abc import Sequence

from nanotrain.cli.parser import ANY_FLAG, NUMBER_OF_GPUS, CommandParser
from nanotrain.cli.values import count, png_file, world_size
from nanotrain.config.flags import parse
from nanotrain.config.load import Loaded, load_line
from nanotrain.config.rules.check import check_data_parallel_size
from nanotrain.config.schema import check_choice


def topology(argv: Sequence[str]) -> int:
    """Print the process groups of a number of ranks, or draw a pipeline schedule."""
    parser = topology_parser()
    args, rest = parser.parse_known_args(argv)
    check_combination(parser, args)
    if args.schedule is not None:
        from nanotrain.parallel.pp.schedules import SCHEDULES

        check_choice("pipeline_schedule", args.schedule, known=SCHEDULES)
    loaded = load_line(parse(rest), to_train=False)
    if args.schedule is not None and "parallel.pipeline_schedule" in loaded.explicit:
        parser.error("--schedule and --pipeline-schedule are both given")
    if args.world_size is not None:
        print_groups(args, loaded)
    if args.schedule is not None:
        print_schedule(args, loaded)
    return 0


def topology_parser() -> CommandParser:
    """The parser of `nanotrain topology`."""
    parser = CommandParser("topology", topology, epilog=ANY_FLAG, other_flags=NUMBER_OF_GPUS)
    parser.add_argument(
        "--world-size", type=world_size, metavar="N", help="print the process groups of N ranks"
    )
    parser.add_argument("--schedule", metavar="NAME", help="draw this pipeline schedule")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the groups as JSON: {name: [[rank, ...], ...]}",
    )
    parser.add_argument(
        "--num-microbatches",
        type=count,
        metavar="M",
        help="microbatches of the schedule (default: 2 per rank)",
    )
    parser.add_argument(
        "--png", type=png_file, metavar="FILE", help="also write the schedule to a PNG file"
    )
    return parser


def check_combination(parser: CommandParser, args: Namespace) -> None:
    """Check that the arguments belong together.

    Raises:
        ConfigError: neither groups nor a schedule, or an argument of the one without it.
    """
    has_schedule = args.schedule is not None
    has_ranks = args.world_size is not None
    if not has_ranks and not has_schedule:
        parser.error("give --world-size N, --schedule NAME or both")
    if args.json and (has_schedule or not has_ranks):
        parser.error("--json prints groups: it needs --world-size and excludes --schedule")
    if not has_schedule and (args.num_microbatches is not None or args.png is not None):
        parser.error("--num-microbatches and --png belong to --schedule")


def print_groups(args: Namespace, loaded: Loaded) -> None:
    """Print the groups of all ranks."""
    from nanotrain.topology.picture import run_topology

    parallel = loaded.config.parallel
    has_expert_layout = (
        parallel.expert_model_parallel_size > 1 or parallel.expert_tensor_parallel_size is not None
    )
    has_experts = has_expert_layout or loaded.config.model.moe is not None
    text = run_topology(parallel, args.world_size, as_json=args.json, has_experts=has_experts)
    dp = parallel.data_parallel_size(args.world_size)
    check_data_parallel_size(dp, loaded.data_parallel_size, world_size=args.world_size)
    print(text)


def print_schedule(args: Namespace, loaded: Loaded) -> None:
    """Print the actions of a schedule over time."""
    from nanotrain.parallel.pp.actions import PipelineShape
    from nanotrain.parallel.pp.draw import draw_schedule

    parallel = loaded.config.parallel
    num_microbatches = args.num_microbatches or 2 * parallel.pipeline_model_parallel_size
    shape = PipelineShape.of(parallel, num_microbatches)
    print(draw_schedule(args.schedule, shape, png=args.png))
