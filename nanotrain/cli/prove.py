"""`nanotrain prove`: whether a layout sums every gradient exactly once, without numbers."""

from collections.abc import Sequence

from nanotrain.cli.checks import check_names
from nanotrain.cli.parser import ANY_FLAG, NUMBER_OF_GPUS, CommandParser
from nanotrain.cli.values import world_size
from nanotrain.config.flags import parse
from nanotrain.config.load import load_line
from nanotrain.config.rules.check import validate_for_world
from nanotrain.system import importing_torch


def prove(argv: Sequence[str]) -> int:
    """Prove that a layout sums every gradient once over its ranks, by types of tensors: no GPU, no
    data, no numbers.
    """
    args, rest = prove_parser().parse_known_args(argv)
    loaded = load_line(parse(rest))
    with importing_torch():
        from nanotrain.prove.check import prove as run
        from nanotrain.train.inputs import with_known_model

    config = with_known_model(loaded.config, loaded.explicit)
    validate_for_world(config, args.world_size, expected_dp=loaded.data_parallel_size)
    check_names(config)
    proof = run(config, args.world_size)
    print(proof.text())
    return 1 if proof.faults else 0


def prove_parser() -> CommandParser:
    """The parser of `nanotrain prove`."""
    parser = CommandParser("prove", prove, epilog=ANY_FLAG, other_flags=NUMBER_OF_GPUS)
    parser.add_argument(
        "--world-size", type=world_size, metavar="N", required=True, help="number of ranks"
    )
    return parser
