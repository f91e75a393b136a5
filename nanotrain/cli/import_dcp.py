"""`nanotrain checkpoint import-dcp`: a run of torchtitan, or of a program with FSDP2, moves in."""

from collections.abc import Sequence

from nanotrain.cli.addresses import read_path, show, written_path
from nanotrain.cli.parser import ANY_FLAG, CommandParser
from nanotrain.config.flags import parse
from nanotrain.log import start_logging


def import_dcp(argv: Sequence[str]) -> int:
    """Write a checkpoint of torch.distributed.checkpoint (torchtitan, FSDP2) as one of ours, with
    the state of AdamW.
    """
    parser = CommandParser("checkpoint import-dcp", import_dcp, epilog=ANY_FLAG)
    parser.add_argument(
        "folder", type=read_path, help="folder with .metadata, or of a run with step-N in it"
    )
    parser.add_argument("output", type=written_path, help="the folder to write")
    parser.add_argument(
        "--model-config",
        type=read_path,
        metavar="FOLDER",
        help="folder with the config.json of the model (unset: settings, and shapes of tensors)",
    )
    parser.add_argument(
        "--no-optim", action="store_true", help="weights alone: the next run begins at step 0"
    )
    args, rest = parser.parse_known_args(argv)
    line = parse(rest, listed_by="nanotrain train --help")
    from nanotrain.interop.dcp.import_run import import_dcp as import_folder

    start_logging()
    lines = import_folder(
        args.folder,
        args.output,
        line=line,
        model_folder=args.model_config,
        optim=not args.no_optim,
    )
    show(lines)
    return 0
