"""`nanotrain prepare`: tokenize text into token files."""

from argparse import BooleanOptionalAction
from collections.abc import Sequence

from nanotrain.cli.addresses import written_path
from nanotrain.cli.parser import CommandParser
from nanotrain.cli.values import count, words
from nanotrain.errors import ConfigError
from nanotrain.paths import expanded
from nanotrain.storage.remote import is_address
from nanotrain.system import usable_cores

# flags of Megatron-LM's tools/preprocess_data.py
OTHER_FLAGS = {
    "--output-prefix": "--output PREFIX",
    "--json-keys": "--text-column NAME",
    "--tokenizer-model": "--tokenizer NAME",
    "--tokenizer-type": "--tokenizer NAME alone, its files determine the type",
    "--vocab-file": "--tokenizer FOLDER with that file",
    "--merge-file": "--tokenizer FOLDER with that file",
    "--partitions": "--workers N alone, or --part I/N",
    "--dataset-impl": "nothing, the format is .bin/.idx",
    "--log-interval": "nothing, progress is shown",
}


def prepare(argv: Sequence[str]) -> int:
    """Tokenize text into token files (.bin/.idx) for --data-path."""
    from nanotrain.data.token_format import prefix_of
    from nanotrain.prepare.corpus import prepare_corpus
    from nanotrain.prepare.options import PrepareOptions

    args = prepare_parser().parse_args(argv)
    if is_address(args.output):
        if args.part is not None or args.executor != "local":
            raise ConfigError(
                f"--output {args.output} on several machines",
                why="machines put their parts together in a folder that all of them see",
                fix="write to a shared folder",
            )
        args.output = str(written_path(prefix_of(args.output), suffix=".idx"))
    prepare_corpus(PrepareOptions.from_args(args))
    return 0


def prepare_parser() -> CommandParser:
    """The parser of `nanotrain prepare`."""
    from nanotrain.prepare.inputs import Limits
    from nanotrain.prepare.options import Verify

    parser = CommandParser("prepare", prepare, other_flags=OTHER_FLAGS)
    _add_input(parser)
    _add_output(parser)
    parser.add_argument(
        "--verify",
        action=Verify,
        metavar="PREFIX",
        help="only compare every token of PREFIX.bin with its checksums",
    )
    parser.set_defaults(
        workers=usable_cores(),
        max_document_bytes=Limits.document_bytes,
        max_inflation=Limits.inflation,
    )
    return parser


def _add_input(parser: CommandParser) -> None:
    """Arguments on the text and how it is read."""
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="NAME",
        help="files (.txt .md .jsonl .parquet .gz .zst ...), folders, patterns or hub names",
    )
    parser.add_argument(
        "--output", required=True, metavar="PREFIX", help="write PREFIX.bin and PREFIX.idx"
    )
    parser.add_argument(
        "--tokenizer",
        type=expanded,
        required=True,
        metavar="NAME",
        help="Hugging Face name or folder, tokenizer.json, bytes, bpe:SIZE",
    )
    parser.add_argument("--workers", type=count, help="processes (default: all cores, %(default)s)")
    parser.add_argument(
        "--text-column",
        metavar="NAME",
        help="field that holds the text (default: text; of --format chat: messages)",
    )
    parser.add_argument(
        "--text-suffix",
        nargs="+",
        default=[],
        metavar="SUFFIX",
        help="further types of files that are text, one document per file, as .py .rs",
    )
    parser.add_argument(
        "--format",
        choices=["text", "chat"],
        default="text",
        help="chat: messages by the tokenizer's chat template, with a loss mask for the "
        "assistant's (default: text)",
    )
    parser.add_argument(
        "--chat-template",
        metavar="NAME",
        help="chat template to store with the tokenizer: chatml, or a file (default: the "
        "tokenizer's own); a BPE is trained with its special tokens of the form <|name|>",
    )
    parser.add_argument("--subset", metavar="NAME", help="configuration of a hub dataset")
    parser.add_argument(
        "--split-name",
        default="train",
        metavar="NAME",
        help="split of a hub dataset (default: %(default)s)",
    )
    parser.add_argument(
        "--streaming",
        action="store_true",
        help="stream hub datasets instead of storing them on disk",
    )
    parser.add_argument(
        "--max-documents",
        type=count,
        metavar="N",
        help="rows to read per dataset; requires --streaming",
    )


def _add_output(parser: CommandParser) -> None:
    """Arguments on the token files, and on the machines that write them."""
    parser.add_argument(
        "--append-eod",
        action=BooleanOptionalAction,
        default=True,
        help="end documents with the eod token",
    )
    parser.add_argument(
        "--parse-special",
        action="store_true",
        help="a special token written in a document becomes its id (default: it stays text)",
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", "uint8", "uint16", "int32"],
        default="auto",
        help="token dtype (default: the smallest that holds the vocabulary)",
    )
    parser.add_argument(
        "--max-document-bytes",
        type=count,
        metavar="N",
        help="limit of the bytes of a document (default: %(default)s)",
    )
    parser.add_argument(
        "--max-inflation",
        type=count,
        metavar="N",
        help="limit of the bytes in a compressed file per byte of the file (default: %(default)s)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing PREFIX")
    parser.add_argument(
        "--part",
        metavar="I/N",
        help="tokenize only the I-th of N shares; the same command without --part joins them "
        "when all are done",
    )
    parser.add_argument(
        "--executor",
        choices=["local", "ray", "slurm"],
        default="local",
        help="where --workers run: processes here, tasks of a running Ray cluster, or a Slurm "
        "array (default: local)",
    )
    parser.add_argument(
        "--sbatch",
        type=words,
        default=[],
        metavar="OPTIONS",
        help="options of sbatch, as 'partition=cpu mem=8G'",
    )
