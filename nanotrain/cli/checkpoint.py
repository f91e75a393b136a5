"""`nanotrain checkpoint COMMAND ...`: one function per command.

inspect | verify | diff | average | prune | import-hf | export-hf | export-dcp |
export-megatron
"""

from collections.abc import Sequence

from nanotrain.cli.parser import Command, CommandParser
from nanotrain.errors import EXIT_CODE
from nanotrain.quantities import count_of


def inspect(argv: Sequence[str]) -> int:
    """Print the model, counters, layout and sizes of a checkpoint."""
    args = CommandParser("checkpoint inspect", inspect).parse_args(argv)
    from nanotrain.checkpoint.report import describe

    print(describe(args.path, tensors=args.tensors))
    return 0


def verify(argv: Sequence[str]) -> int:
    """Compare every byte of a checkpoint with its checksums; exit code 2 where one differs."""
    args = CommandParser("checkpoint verify", verify).parse_args(argv)
    from nanotrain.checkpoint.report import verify as verify_checkpoint

    outcome = verify_checkpoint(args.path)
    print(outcome.text())
    return 0 if outcome.is_sound else EXIT_CODE


def diff(argv: Sequence[str]) -> int:
    """Compare the values, settings and counters of two checkpoints; exit code 2 where they differ."""
    args = CommandParser("checkpoint diff", diff).parse_args(argv)
    from nanotrain.checkpoint.report import diff as diff_checkpoints

    outcome = diff_checkpoints(args.first, args.second)
    print(outcome.text())
    return 0 if outcome.is_equal else EXIT_CODE


def average(argv: Sequence[str]) -> int:
    """Average the weights of checkpoints, oldest first; the tokenizer stays, optimizer state is
    left out.
    """
    args = CommandParser("checkpoint average", average).parse_args(argv)
    from nanotrain.inference.checkpoint import average_with_tokenizer

    folder = average_with_tokenizer(args.paths, args.output, decay=args.ema_decay)
    print(f"{folder}: weights averaged over {count_of(len(args.paths), 'checkpoint')}")
    return 0


def prune(argv: Sequence[str]) -> int:
    """Delete the oldest complete checkpoints of a run."""
    args = CommandParser("checkpoint prune", prune).parse_args(argv)
    from nanotrain.checkpoint.retention import prune as prune_folder

    for path in prune_folder(args.path, args.keep_last, is_dry=args.dry_run):
        print(f"{'would delete' if args.dry_run else 'deleted'} {path}")
    return 0


def import_hf(argv: Sequence[str]) -> int:
    """Write the weights of a Hugging Face folder as a checkpoint, in fp32."""
    args = CommandParser("checkpoint import-hf", import_hf).parse_args(argv)
    from nanotrain.interop.hf.import_weights import import_hf as import_folder

    print(import_folder(args.folder, args.output))
    return 0


def export_hf(argv: Sequence[str]) -> int:
    """Write the weights of a checkpoint as a Hugging Face folder."""
    args = vars(CommandParser("checkpoint export-hf", export_hf).parse_args(argv))
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
    args = CommandParser("checkpoint export-dcp", export_dcp).parse_args(argv)
    from nanotrain.interop.dcp import export_dcp as export

    print(export(args.path, args.output))
    return 0


def export_megatron(argv: Sequence[str]) -> int:
    """Write the weights of a checkpoint for Megatron-LM (torch_dist)."""
    args = CommandParser("checkpoint export-megatron", export_megatron).parse_args(argv)
    from nanotrain.interop.megatron import export_megatron as export

    print(export(args.path, args.output, dtype=args.dtype))
    return 0


_ALL = (inspect, verify, diff, average, prune, import_hf, export_hf, export_dcp, export_megatron)
CHECKPOINT_COMMANDS: dict[str, Command] = {
    command.__name__.replace("_", "-"): command for command in _ALL
}
