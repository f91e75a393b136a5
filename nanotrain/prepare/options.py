"""The options of `nanotrain prepare`: its arguments, parsed and checked."""

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nanotrain.data.checksums import check_blocks
from nanotrain.data.token_format import bin_path, prefix_of
from nanotrain.errors import DataError
from nanotrain.paths import local_path
from nanotrain.prepare.inputs import Limits
from nanotrain.quantities import count_of
from nanotrain.system import usable_cores

_BPE = "bpe:"


@dataclass(frozen=True)
class PrepareOptions:
    """The options of `nanotrain prepare`, named as its flags (see `add_arguments`).

    Raises:
        DataError: values that are invalid or contradict each other.
    """

    input: tuple[str, ...]
    output: Path
    tokenizer: str
    workers: int = 1
    text_column: str = "text"
    subset: str | None = None
    split_name: str = "train"
    streaming: bool = False
    max_documents: int | None = None
    append_eod: bool = True
    dtype: str = "auto"
    overwrite: bool = False
    max_document_bytes: int = Limits.document_bytes
    max_inflation: int = Limits.inflation

    def __post_init__(self) -> None:
        if not self.tokenizer:
            raise DataError("--tokenizer is empty", why="it names the tokenizer", fix="write for example bpe:8192")
        if self.tokenizer.startswith(_BPE) and not self.tokenizer.removeprefix(_BPE).isdecimal():
            raise DataError(f"--tokenizer {self.tokenizer} has no size", fix="write for example bpe:8192")
        if not self.output.name:
            raise DataError(
                "--output names no file", why="it is the prefix of PREFIX.bin", fix="write for example corpus"
            )
        if self.workers < 1:
            raise DataError(f"--workers {self.workers} is not positive", fix="give at least 1")
        if min(self.max_document_bytes, self.max_inflation) < 1:
            fix = "give at least 1"
            raise DataError("--max-document-bytes and --max-inflation are limits above 0", fix=fix)
        if self.max_documents is not None and not self.streaming:
            raise DataError("--max-documents has no effect without --streaming", fix="add --streaming or leave it out")

    @property
    def bpe_vocab_size(self) -> int | None:
        """Vocabulary of the BPE to train; None to load a tokenizer."""
        return int(self.tokenizer.removeprefix(_BPE)) if self.tokenizer.startswith(_BPE) else None

    @property
    def limits(self) -> Limits:
        return Limits(self.max_document_bytes, self.max_inflation)

    @property
    def parts(self) -> Path:
        """The folder of part files."""
        return self.output.with_name(self.output.name + ".parts")

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "PrepareOptions":
        """The options of a parsed command line."""
        values = {field.name: getattr(args, field.name) for field in fields(cls)}
        return cls(**values | {"input": tuple(args.input), "output": local_path(prefix_of(args.output))})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `nanotrain prepare`."""
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="NAME",
        help="files (.txt .md .jsonl .parquet .gz .zst ...), folders, patterns or hub names",
    )
    add("--output", required=True, metavar="PREFIX", help="write PREFIX.bin and PREFIX.idx")
    tokenizer_help = "Hugging Face name or folder, tokenizer.json, bytes, bpe:SIZE"
    add("--tokenizer", required=True, metavar="NAME", help=tokenizer_help)
    add("--workers", type=int, default=usable_cores(), help="processes (default: all cores, %(default)s)")
    add("--text-column", default="text", metavar="NAME", help="field that holds the text (default: %(default)s)")
    add("--subset", metavar="NAME", help="configuration of a hub dataset")
    add("--split-name", default="train", metavar="NAME", help="split of a hub dataset (default: %(default)s)")
    add("--streaming", action="store_true", help="stream hub datasets instead of storing them on disk")
    add("--max-documents", type=int, metavar="N", help="rows to read per dataset; requires --streaming")
    add("--append-eod", action=argparse.BooleanOptionalAction, default=True, help="end documents with the eod token")
    dtype_help = "token dtype (default: the smallest that holds the vocabulary)"
    add("--dtype", choices=["auto", "uint8", "uint16", "int32"], default="auto", help=dtype_help)
    document_help = "limit of the bytes of a document (default: %(default)s)"
    add("--max-document-bytes", type=int, default=Limits.document_bytes, metavar="N", help=document_help)
    inflation_help = "limit of the bytes in a compressed file per byte of the file (default: %(default)s)"
    add("--max-inflation", type=int, default=Limits.inflation, metavar="N", help=inflation_help)
    add("--overwrite", action="store_true", help="replace an existing PREFIX")
    add("--verify", action=_Verify, metavar="PREFIX", help="only compare every token of PREFIX.bin with its checksums")


class _Verify(argparse.Action):
    """Checks a corpus and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        prefix = Path(prefix_of(str(rest[1]))).expanduser()
        number = check_blocks(prefix)
        if not number:
            why = "an older version or another program wrote it"
            raise DataError(f"{prefix} has no checksums", why=why, fix="prepare it again to have them")
        print(f"{bin_path(prefix)}: sound ({count_of(number, 'block')}, all checksums match)")
        parser.exit()
