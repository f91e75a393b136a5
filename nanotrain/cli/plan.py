"""`nanotrain plan`: memory and time of a run before it exists.

--rows FILE.tsv --output OUT.tsv    a prediction for every row of a table of measurements
"""

from collections.abc import Sequence

from nanotrain.cli.parser import CommandParser


def plan(argv: Sequence[str]) -> int:
    """Predict the memory and the time of runs: of every row of a table of measurements."""
    parser = CommandParser("plan", plan)
    args = parser.parse_args(argv)
    if (args.rows is None) != (args.output is None):
        parser.error("--rows FILE.tsv and --output OUT.tsv belong together")
    if args.rows is None:
        parser.error("give --rows FILE.tsv --output OUT.tsv")
    from nanotrain.planner.rows import run_rows

    print(run_rows(args.rows, args.output, engine=args.engine))
    return 0
