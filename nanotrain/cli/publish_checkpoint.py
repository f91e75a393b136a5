"""`nanotrain checkpoint publish`: a checkpoint as a repository of the Hugging Face hub.

1. check the checkpoint, the names of repository and license, and that the hub can be reached
2. export the weights and the tokenizer to a folder
3. write the model card, the loss curve and the checksums
4. upload the folder; with --dry-run list it
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nanotrain.cli.addresses import read_name, read_path
from nanotrain.cli.parser import CommandParser
from nanotrain.errors import ConfigError, NanotrainError
from nanotrain.paths import local_path
from nanotrain.quantities import describe_bytes

if TYPE_CHECKING:
    from nanotrain.report.history import RunHistory
    from nanotrain.report.model_card import PublishedModel

DTYPES = ("fp32", "bf16", "fp16")


def publish_checkpoint(argv: Sequence[str]) -> int:
    """Upload a checkpoint of a run to the hub, with a model card, a loss curve and checksums."""
    args = publish_parser().parse_args(argv)
    from nanotrain.checkpoint.store import find_manifest
    from nanotrain.interop.hf.hub import check_repository, push_folder, require_hub
    from nanotrain.report.history import RunHistory

    step_folder, manifest = find_manifest(args.path)
    run = RunHistory.read(step_folder.parent.parent)
    check_repository(args.repository, flag="REPOSITORY")
    check_license(args.license)
    folder = args.output or Path(args.repository.rpartition("/")[2])
    if not args.dry_run:
        require_hub(fix="add --dry-run to write the folder, and upload it later")
    export_for_hub(args, step_folder, folder=folder)
    model = describe_model(args, run, step=manifest.step, folder=folder)
    write_card(model, folder)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        print(f"{file.relative_to(folder)}  {describe_bytes(file.stat().st_size)}")
    if args.dry_run:
        print(f"nothing is uploaded; later: hf upload {args.repository} {folder}")
    else:
        print(push_folder(folder, args.repository, is_private=not args.public))
    return 0


def publish_parser() -> CommandParser:
    """The parser of `nanotrain checkpoint publish`."""
    parser = CommandParser("checkpoint publish", publish_checkpoint)
    parser.add_argument(
        "path", type=read_path, help="run folder for its newest step, or step folder"
    )
    parser.add_argument("repository", metavar="OWNER/NAME", help="repository of the hub")
    parser.add_argument(
        "--output",
        type=local_path,
        metavar="FOLDER",
        help="write the repository here, and keep it (default: NAME)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="write and list the folder, and upload nothing"
    )
    parser.add_argument(
        "--license", metavar="ID", help="license of the weights on the hub, as apache-2.0"
    )
    parser.add_argument(
        "--public", action="store_true", help="make a new repository public (default: private)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bf16", help="data type of the weights (default: bf16)"
    )
    parser.add_argument(
        "--family", help="Hugging Face model_type; unset: the first that fits the model"
    )
    parser.add_argument("--tokenizer", type=read_name, help="the one to publish; unset: the run's")
    parser.add_argument(
        "--ema", action="store_true", help="publish the moving average of the weights"
    )
    return parser


def check_license(identifier: str | None) -> None:
    """Check the form of a license identifier.

    Raises:
        ConfigError: the hub has no such form of name.
    """
    if identifier is None:
        print("no --license, so the model card says that no license was stated", flush=True)
    elif not identifier or not all(letter.isalnum() or letter in ".-" for letter in identifier):
        raise ConfigError(
            f"--license {identifier}",
            why="an identifier of the hub has letters, digits, dots and hyphens",
            fix="write for example --license apache-2.0, mit, cc-by-4.0 or other",
        )


def export_for_hub(args: argparse.Namespace, step_folder: Path, *, folder: Path) -> None:
    """Export weights and tokenizer of a checkpoint as a Hugging Face folder."""
    from nanotrain.inference.checkpoint import export_checkpoint

    summary = export_checkpoint(
        step_folder,
        folder,
        dtype=args.dtype,
        family=args.family,
        tokenizer=args.tokenizer,
        ema=args.ema,
    )
    print(summary)


def describe_model(
    args: argparse.Namespace, run: "RunHistory", *, step: int, folder: Path
) -> "PublishedModel":
    """The content of the model card of an exported checkpoint.

    Args:
        args: arguments of the command.
        run: the run of the checkpoint.
        step: step of the checkpoint.
        folder: the exported folder.
    """
    from nanotrain.report.model_card import PublishedModel

    return PublishedModel(
        run=run,
        step=step,
        repository=args.repository,
        dtype=args.dtype,
        family=exported_family(folder),
        license=args.license,
        has_tokenizer=(folder / "tokenizer_config.json").is_file(),
        tokens_by_corpus=tokens_read(run.folder, step),
    )


def tokens_read(run_folder: Path, step: int) -> Mapping[str, tuple[int, float]]:
    """Tokens and epochs by corpus up to a step; empty, with a line, where they are unknown."""
    from nanotrain.data.order import DataOrder

    try:
        return DataOrder.read(run_folder).tokens_by_corpus(step)
    except NanotrainError as error:
        print(f"the model card has no tokens by corpus: {error}", flush=True)
        return {}


def exported_family(folder: Path) -> str:
    """The model_type of an exported folder."""
    from nanotrain.interop.hf.companions import CONFIG_FILE

    return str(json.loads((folder / CONFIG_FILE).read_text())["model_type"])


def write_card(model: "PublishedModel", folder: Path) -> None:
    """Write the model card, the loss curve and the checksums into an exported folder."""
    from nanotrain.interop.hf.hub import CARD_FILE
    from nanotrain.report import model_card
    from nanotrain.runs.files import write_text

    model_card.draw_loss(model, folder / model_card.CURVE_FILE)
    write_text(folder / CARD_FILE, model_card.publishing_card(model))
    checksums = model_card.checksum_lines(folder)
    write_text(folder / model_card.CHECKSUM_FILE, checksums)
