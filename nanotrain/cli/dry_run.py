"""`nanotrain dry-run`: the step of every kind of rank on the meta device, in this process."""

from collections.abc import Sequence

from nanotrain.cli.checks import check_names
from nanotrain.cli.parser import ANY_FLAG, NUMBER_OF_GPUS, CommandParser
from nanotrain.cli.values import seed, world_size
from nanotrain.config.config import Config
from nanotrain.config.flags import parse
from nanotrain.config.load import Loaded, load_line
from nanotrain.config.rules.check import validate_for_world
from nanotrain.config.schema import with_values
from nanotrain.errors import ConfigError
from nanotrain.system import importing_torch


def dry_run(argv: Sequence[str]) -> int:
    """Run a training step of any number of GPUs without them: check its communication, its buffers
    and its memory.
    """
    args, rest = dry_run_parser().parse_known_args(argv)
    loaded = load_line(parse(rest))
    config = complete(loaded)
    validate_for_world(config, args.world_size, expected_dp=loaded.data_parallel_size)
    check_names(config)
    last_rank = args.world_size - 1
    if args.rank is not None and args.rank > last_rank:
        raise ConfigError(
            f"there is no rank {args.rank}",
            why=f"the run has ranks 0 to {last_rank}",
            fix=f"set --rank {last_rank} or lower",
        )
    from nanotrain.dry_run.check import dry_run as run

    result = run(config, args.world_size, rank=args.rank)
    print(result.text())
    return 1 if result.faults else 0


def dry_run_parser() -> CommandParser:
    """The parser of `nanotrain dry-run`."""
    parser = CommandParser("dry-run", dry_run, epilog=ANY_FLAG, other_flags=NUMBER_OF_GPUS)
    parser.add_argument(
        "--world-size", type=world_size, metavar="N", required=True, help="number of ranks"
    )
    parser.add_argument(
        "--rank",
        type=seed,
        metavar="R",
        help="the only rank to run (default: two of every kind)",
    )
    return parser


def complete(loaded: Loaded) -> Config:
    """The configuration with the model that the run begins from, and with a vocabulary size.

    An unset size is that of the quick-start corpus.

    Raises:
        ConfigError: another corpus without a size, or a model that the layout does not fit.
    """
    with importing_torch():
        from nanotrain.train.inputs import with_known_model

    config = with_known_model(loaded.config, loaded.explicit)
    if config.model.vocab_size is not None:
        return config
    if not config.data.quickstart:
        raise ConfigError(
            "the vocabulary has no size",
            why="the tokenizer of the corpus is not read here",
            fix="set --vocab-size, such as 50257",
        )
    completed: Config = with_values(config, {"model.vocab_size": config.data.quickstart_vocab_size})
    return completed
