"""`nanotrain checkpoint COMMAND ...`: one function per command.

inspect | verify | diff | average | prune | import-hf | import-dcp | import-megatron | export-hf |
export-dcp | export-megatron | publish
"""

from collections.abc import Sequence

from nanotrain.cli.addresses import read_name, read_path, show, written_path
from nanotrain.cli.export_megatron import export_megatron
from nanotrain.cli.import_dcp import import_dcp
from nanotrain.cli.import_megatron import import_megatron
from nanotrain.cli.parser import Command, CommandParser
from nanotrain.cli.publish_checkpoint import publish_checkpoint
from nanotrain.cli.values import count, positive
from nanotrain.errors import EXIT_CODE
from nanotrain.log import start_logging
from nanotrain.quantities import count_of

CHECKPOINT = "step folder, or run folder for its newest step"


def inspect(argv: Sequence[str]) -> int:
    """Print the model, counters, layout and sizes of a checkpoint."""
    parser = CommandParser("checkpoint inspect", inspect)
    parser.add_argument("path", type=read_path, help=CHECKPOINT)
    parser.add_argument("--tensors", action="store_true", help="also list every tensor")
    args = parser.parse_args(argv)
    from nanotrain.checkpoint.report import describe

    show(describe(args.path, tensors=args.tensors))
    return 0


def verify(argv: Sequence[str]) -> int:
    """Compare every byte of a checkpoint with its checksums; exit code 2 where one differs."""
    parser = CommandParser("checkpoint verify", verify)
    parser.add_argument("path", type=read_path, help=CHECKPOINT)
    args = parser.parse_args(argv)
    from nanotrain.checkpoint.report import verify as verify_checkpoint

    outcome = verify_checkpoint(args.path)
    show(outcome.text())
    return 0 if outcome.is_sound else EXIT_CODE


def diff(argv: Sequence[str]) -> int:
    """Compare values, settings and counters of two checkpoints; exit code 2 where they differ."""
    parser = CommandParser("checkpoint diff", diff)
    parser.add_argument("first", type=read_path, help=CHECKPOINT)
    parser.add_argument("second", type=read_path, help=CHECKPOINT)
    args = parser.parse_args(argv)
    from nanotrain.checkpoint.report import diff as diff_checkpoints

    outcome = diff_checkpoints(args.first, args.second)
    show(outcome.text())
    return 0 if outcome.is_equal else EXIT_CODE


def average(argv: Sequence[str]) -> int:
    """Average the weights of checkpoints, oldest first; the tokenizer stays, optimizer state is
    left out.
    """
    parser = CommandParser("checkpoint average", average)
    parser.add_argument("paths", type=read_path, nargs="+", metavar="PATH", help=CHECKPOINT)
    parser.add_argument(
        "--output", type=written_path, required=True, metavar="FOLDER", help="the folder to write"
    )
    parser.add_argument(
        "--ema-decay",
        type=positive,
        metavar="D",
        help="weight of a checkpoint relative to the next one (default: 1, the mean)",
    )
    args = parser.parse_args(argv)
    from nanotrain.inference.checkpoint import average_with_tokenizer

    folder = average_with_tokenizer(args.paths, args.output, decay=args.ema_decay)
    show(f"{folder}: weights averaged over {count_of(len(args.paths), 'checkpoint')}")
    return 0


def prune(argv: Sequence[str]) -> int:
    """Delete the oldest complete checkpoints of a run."""
    parser = CommandParser("checkpoint prune", prune)
    parser.add_argument("path", type=read_path, help="run folder, or its checkpoints folder")
    parser.add_argument(
        "--keep-last", type=count, required=True, metavar="N", help="number of checkpoints to keep"
    )
    parser.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    args = parser.parse_args(argv)
    from nanotrain.checkpoint.retention import prune as prune_folder

    for path in prune_folder(args.path, args.keep_last, is_dry=args.dry_run):
        show(f"{'would delete' if args.dry_run else 'deleted'} {path}")
    return 0


def import_hf(argv: Sequence[str]) -> int:
    """Write the weights of a Hugging Face folder as a checkpoint, in fp32."""
    parser = CommandParser("checkpoint import-hf", import_hf)
    parser.add_argument("folder", type=read_path, help="the Hugging Face folder")
    parser.add_argument("output", type=written_path, help="the folder to write")
    args = parser.parse_args(argv)
    from nanotrain.interop.hf.import_weights import import_hf as import_folder

    start_logging()
    show(import_folder(args.folder, args.output))
    return 0


def export_hf(argv: Sequence[str]) -> int:
    """Write the weights of a checkpoint as a Hugging Face folder."""
    args = vars(export_hf_parser().parse_args(argv))
    repository = args.pop("push")
    from nanotrain.inference.checkpoint import export_checkpoint
    from nanotrain.interop.hf.hub import check_repository, name_card, push_folder

    start_logging()
    if repository is not None:
        check_repository(repository)
    show(export_checkpoint(**args))
    if repository is not None:
        name_card(args["folder"], repository)
        show(push_folder(args["folder"], repository))
    return 0


def export_hf_parser() -> CommandParser:
    """The parser of `nanotrain checkpoint export-hf`; arguments as for `export_checkpoint`."""
    parser = CommandParser("checkpoint export-hf", export_hf)
    parser.add_argument("path", type=read_path, help=CHECKPOINT)
    parser.add_argument("folder", type=written_path, help="the Hugging Face folder to write")
    add_dtype(parser, "auto", help_of_others="; auto: that of each tensor before its import")
    parser.add_argument(
        "--family",
        help="Hugging Face model_type, for example llama; unset: the first that fits the model",
    )
    parser.add_argument(
        "--tokenizer",
        type=read_name,
        help="the one to write next to the weights, or none; unset: the run's",
    )
    parser.add_argument(
        "--ema",
        action="store_true",
        help="write the moving average of the weights (--ema-decay)",
    )
    parser.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help="then upload the folder to this repository of the hub; without a network print the "
        "command for later",
    )
    return parser


def add_dtype(parser: CommandParser, *others: str, help_of_others: str = "") -> None:
    """Add the argument for the data type of exported weights, with further choices."""
    parser.add_argument(
        "--dtype",
        choices=["fp32", "bf16", "fp16", *others],
        default="fp32",
        help=f"data type of the weights (default: fp32){help_of_others}",
    )


def export_dcp(argv: Sequence[str]) -> int:
    """Write a checkpoint in the format of torch.distributed.checkpoint."""
    parser = CommandParser("checkpoint export-dcp", export_dcp)
    parser.add_argument("path", type=read_path, help=CHECKPOINT)
    parser.add_argument("output", type=written_path, help="the folder to write")
    args = parser.parse_args(argv)
    from nanotrain.interop.dcp.export import export_dcp as export

    show(export(args.path, args.output))
    return 0


CHECKPOINT_COMMANDS: dict[str, Command] = {
    "inspect": inspect,
    "verify": verify,
    "diff": diff,
    "average": average,
    "prune": prune,
    "import-hf": import_hf,
    "import-dcp": import_dcp,
    "import-megatron": import_megatron,
    "export-hf": export_hf,
    "export-dcp": export_dcp,
    "export-megatron": export_megatron,
    "publish": publish_checkpoint,
}
