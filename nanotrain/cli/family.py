"""`nanotrain family COMMAND ...`: rows of families of Hugging Face.

add
"""

from collections.abc import Sequence

from nanotrain.cli.addresses import read_path, show, written_path
from nanotrain.cli.parser import Command, CommandParser


def add(argv: Sequence[str]) -> int:
    """Derive the row of a family from a folder, compare it with transformers and write it.

    config.json and modeling code are read as text: no code of the folder is run. A family that
    needs more than names ends with exit code 2 and a list of what it needs.
    """
    args = add_parser().parse_args(argv)
    from nanotrain.parity.added_family import add_family

    added = add_family(args.folder, output=args.output, in_tree=args.in_tree)
    show(added.to_json() if args.json else added.text())
    return 0


def add_parser() -> CommandParser:
    """The parser of `nanotrain family add`."""
    parser = CommandParser("family add", add)
    parser.add_argument(
        "folder",
        type=read_path,
        help="folder with config.json and safetensors, and modeling_*.py where it has one",
    )
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "--output",
        type=written_path,
        metavar="FILE",
        help="write the row to this file (default: nanotrain_family.yaml in the folder, which "
        "every command that opens the folder reads)",
    )
    target.add_argument(
        "--in-tree",
        action="store_true",
        help="write the row into families.yaml of this copy of nanotrain",
    )
    parser.add_argument("--json", action="store_true", help="print row and check as JSON")
    return parser


FAMILY_COMMANDS: dict[str, Command] = {"add": add}
