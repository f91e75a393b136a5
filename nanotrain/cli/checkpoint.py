"""`nanotrain checkpoint COMMAND ...`: one function per command.

inspect | verify | diff | average | prune | import-hf | export-hf | export-dcp |
export-megatron
"""

from collections.abc import Sequence

from nanotrain.cli.parser import Command, CommandParser, argument, count, positive
from nanotrain.errors import EXIT_CODE
from nanotrain.paths import expanded, local_path
from nanotrain.quantities import count_of

PATH_HELP = "step folder, or run folder for its newest step"
PATH = argument("path", type=local_path, help=PATH_HELP)
OUTPUT = argument("output", type=local_path, help="the folder to write")
DTYPE_HELP = "data type of the weights (default: fp32)"
DTYPE = argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help=DTYPE_HELP)


def inspect(argv: Sequence[str]) -> int:
    """Print the model, counters, layout and sizes of a checkpoint."""
    tensors = argument("--tensors", action="store_true", help="also list every tensor")
    args = CommandParser("checkpoint inspect", inspect, PATH, tensors).parse_args(argv)
    from nanotrain.checkpoint.report import describe

    print(describe(args.path, tensors=args.tensors))
    return 0


def verify(argv: Sequence[str]) -> int:
    """Compare every byte of a checkpoint with its checksums; exit code 2 where one differs."""
    args = CommandParser("checkpoint verify", verify, PATH).parse_args(argv)
    from nanotrain.checkpoint.report import verify as verify_checkpoint

    outcome = verify_checkpoint(args.path)
    print(outcome.text())
    return 0 if outcome.is_sound else EXIT_CODE


def diff(argv: Sequence[str]) -> int:
    """Compare the values, settings and counters of two checkpoints; exit code 2 where they differ."""
    both = [argument(name, type=local_path, help=PATH_HELP) for name in ("first", "second")]
    args = CommandParser("checkpoint diff", diff, *both).parse_args(argv)
    from nanotrain.checkpoint.report import diff as diff_checkpoints

    outcome = diff_checkpoints(args.first, args.second)
    print(outcome.text())
    return 0 if outcome.is_equal else EXIT_CODE


def average(argv: Sequence[str]) -> int:
    """Average the weights of checkpoints, oldest first; optimizer state is left out."""
    ema_help = "weight of a checkpoint relative to the next one (default: 1, the mean)"
    args = CommandParser(
        "checkpoint average",
        average,
        argument("paths", type=local_path, nargs="+", metavar="PATH", help=PATH_HELP),
        argument("--output", type=local_path, required=True, metavar="FOLDER", help="the folder to write"),
        argument("--ema-decay", type=positive, metavar="D", help=ema_help),
    ).parse_args(argv)
    from nanotrain.checkpoint.rewrite import average as average_checkpoints

    folder = average_checkpoints(args.paths, args.output, decay=args.ema_decay)
    print(f"{folder}: weights averaged over {count_of(len(args.paths), 'checkpoint')}")
    return 0


def prune(argv: Sequence[str]) -> int:
    """Delete the oldest complete checkpoints of a run."""
    args = CommandParser(
        "checkpoint prune",
        prune,
        argument("path", type=local_path, help="run folder, or its checkpoints folder"),
        argument("--keep-last", type=count, required=True, metavar="N", help="number of checkpoints to keep"),
        argument("--dry-run", action="store_true", help="only print what would be deleted"),
    ).parse_args(argv)
    from nanotrain.checkpoint.retention import prune as prune_folder

    for path in prune_folder(args.path, args.keep_last, is_dry=args.dry_run):
        print(f"{'would delete' if args.dry_run else 'deleted'} {path}")
    return 0


def import_hf(argv: Sequence[str]) -> int:
    """Write the weights of a Hugging Face folder as a checkpoint, in fp32."""
    folder = argument("folder", type=local_path, help="the Hugging Face folder")
    args = CommandParser("checkpoint import-hf", import_hf, folder, OUTPUT).parse_args(argv)
    from nanotrain.interop.hf.import_weights import import_hf as import_folder

    print(import_folder(args.folder, args.output))
    return 0


def export_hf(argv: Sequence[str]) -> int:
    """Write the weights of a checkpoint as a Hugging Face folder."""
    family_help = "Hugging Face model_type, for example llama; unset: the first that fits the model"
    push_help = "then upload the folder to this repository of the hub; without a network print the command for later"
    args = vars(
        CommandParser(
            "checkpoint export-hf",
            export_hf,
            PATH,
            argument("folder", type=local_path, help="the Hugging Face folder to write"),
            DTYPE,
            argument("--family", help=family_help),
            argument(
                "--tokenizer", type=expanded, help="the one to write next to the weights, or none; unset: the run's"
            ),
            argument("--ema", action="store_true", help="write the moving average of the weights (--ema-decay)"),
            argument("--push", metavar="OWNER/NAME", help=push_help),
        ).parse_args(argv)
    )
    repository = args.pop("push")
    from nanotrain.inference.checkpoint import export_checkpoint
    from nanotrain.interop.hf.hub import check_repository, name_card, push_folder

    if repository is not None:
        check_repository(repository)
    print(export_checkpoint(**args))
    if repository is not None:
        name_card(args["folder"], repository)
        print(push_folder(args["folder"], repository))
    return 0


def export_dcp(argv: Sequence[str]) -> int:
    """Write a checkpoint in the format of torch.distributed.checkpoint."""
    args = CommandParser("checkpoint export-dcp", export_dcp, PATH, OUTPUT).parse_args(argv)
    from nanotrain.interop.dcp import export_dcp as export

    print(export(args.path, args.output))
    return 0


def export_megatron(argv: Sequence[str]) -> int:
    """Write the weights of a checkpoint for Megatron-LM (torch_dist)."""
    folder = argument("output", type=local_path, help="the folder to write, for --load of Megatron-LM")
    args = CommandParser("checkpoint export-megatron", export_megatron, PATH, folder, DTYPE).parse_args(argv)
    from nanotrain.interop.megatron import export_megatron as export

    print(export(args.path, args.output, dtype=args.dtype))
    return 0


_ALL = (inspect, verify, diff, average, prune, import_hf, export_hf, export_dcp, export_megatron)
CHECKPOINT_COMMANDS: dict[str, Command] = {command.__name__.replace("_", "-"): command for command in _ALL}
