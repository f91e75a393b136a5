"""`nanotrain checkpoint import-megatron`: a run of Megatron-LM moves in."""

from collections.abc import Sequence

from nanotrain.cli.addresses import read_path, show, written_path
from nanotrain.cli.parser import CommandParser
from nanotrain.log import start_logging


def import_megatron(argv: Sequence[str]) -> int:
    """Write a torch_dist checkpoint of Megatron-LM as one of ours, with the optimizer's state."""
    parser = CommandParser("checkpoint import-megatron", import_megatron)
    parser.add_argument(
        "folder", type=read_path, help="folder of --save of Megatron-LM, or one iter_NNNNNNN of it"
    )
    parser.add_argument("output", type=written_path, help="the folder to write")
    parser.add_argument(
        "--no-optim", action="store_true", help="weights alone: the next run begins at step 0"
    )
    args = parser.parse_args(argv)
    from nanotrain.interop.imported import naming_flag
    from nanotrain.interop.megatron.import_run import import_megatron as import_folder

    start_logging()
    with naming_flag("--no-optim"):
        lines = import_folder(args.folder, args.output, optim=not args.no_optim)
    show(lines)
    return 0
