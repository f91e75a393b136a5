"""The options of `nanotrain prepare`, checked; cli/commands.yaml declares its arguments."""

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

_BPE = "bpe:"


@dataclass(frozen=True)
class PrepareOptions:
    """The options of `nanotrain prepare`, named as its flags.

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


class Verify(argparse.Action):
    """The action of `--verify PREFIX`, which checks a corpus and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        prefix = Path(prefix_of(str(rest[1]))).expanduser()
        number = check_blocks(prefix)
        if not number:
            why = "an older version or another program wrote it"
            raise DataError(f"{prefix} has no checksums", why=why, fix="prepare it again to have them")
        print(f"{bin_path(prefix)}: sound ({count_of(number, 'block')}, all checksums match)")
        parser.exit()
