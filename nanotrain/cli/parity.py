"""`nanotrain parity`: a parallel layout compared with one rank."""

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanotrain.cli.parser import ANY_FLAG, NUMBER_OF_GPUS, CommandParser
from nanotrain.cli.values import count, positive, processes
from nanotrain.config.flags import parse
from nanotrain.config.load import Loaded, load_line
from nanotrain.errors import EXIT_CODE, ConfigError

if TYPE_CHECKING:
    from nanotrain.parity.bits import BitReport
    from nanotrain.parity.perturbed_report import PerturbedReport
    from nanotrain.parity.report import ParityReport

TOLERANCE = 1e-5  # of losses and norms, relative


def parity(argv: Sequence[str]) -> int:
    """Compare the training of a parallel layout with one rank: a shrunk model, on CPU processes of
    this machine; with --invariant in every bit.
    """
    args, rest = parity_parser().parse_known_args(argv)
    loaded = load_line(parse(rest))
    from nanotrain.prove.check import verdict

    result = _compare(loaded, args)
    if args.json:
        print(result.to_json())
    else:
        print(result.text())
        print("\n".join(verdict(loaded, args.world_size)))
    return 0 if result.holds else EXIT_CODE


def _compare(loaded: Loaded, args: Namespace) -> "ParityReport | PerturbedReport | BitReport":
    """The report of the comparison that the arguments ask for."""
    _check_judge(loaded, args)
    if loaded.config.precision.invariant:
        from nanotrain.parity.bits import check_bits

        return check_bits(loaded, args.world_size, num_steps=args.steps)
    if args.keep_precision:
        from nanotrain.parity.by_perturbation import check_by_perturbation

        return check_by_perturbation(loaded, args.world_size, num_steps=args.steps)
    from nanotrain.parity.check import check_parity

    tolerance = TOLERANCE if args.tolerance is None else args.tolerance
    return check_parity(loaded, args.world_size, num_steps=args.steps, tolerance=tolerance)


def _check_judge(loaded: Loaded, args: Namespace) -> None:
    """Check that the arguments ask for one judge: bits, changed inputs, or a tolerance.

    Raises:
        ConfigError: an argument has no part in the comparison.
    """
    is_invariant = loaded.config.precision.invariant
    if is_invariant and args.keep_precision:
        raise ConfigError(
            "--keep-precision has no effect with --invariant",
            why="bits are compared in the precision of the configuration",
            fix="leave --keep-precision out",
        )
    if args.tolerance is None:
        return
    if is_invariant:
        raise ConfigError(
            f"--tolerance {args.tolerance:g} has no effect with --invariant",
            why="all bits have to be equal",
            fix="leave --tolerance out",
        )
    if args.keep_precision:
        raise ConfigError(
            f"--tolerance {args.tolerance:g} has no effect with --keep-precision",
            why="differences are judged by those of inputs that are changed in the last bit",
            fix="leave --tolerance out",
        )


def parity_parser() -> CommandParser:
    """The parser of `nanotrain parity`."""
    parser = CommandParser("parity", parity, epilog=ANY_FLAG, other_flags=NUMBER_OF_GPUS)
    parser.add_argument(
        "--world-size",
        type=processes,
        metavar="N",
        required=True,
        help="number of ranks, one process per rank",
    )
    parser.add_argument(
        "--steps", type=count, default=3, metavar="K", help="optimizer steps (default: 3)"
    )
    parser.add_argument(
        "--tolerance",
        type=positive,
        metavar="T",
        help="largest relative difference; ten times that for gradients (default: "
        f"{TOLERANCE:g}); has no part with --invariant and with --keep-precision",
    )
    parser.add_argument(
        "--keep-precision",
        action="store_true",
        help="train in the precision of the configuration, and judge by how far inputs that are "
        "changed in the last bit move one rank",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser
