"""The options of `nanotrain prepare`, checked; cli/prepare.py declares its arguments."""

import argparse
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from nanotrain.data.checksums import check_blocks
from nanotrain.data.token_format import prefix_of
from nanotrain.errors import DataError
from nanotrain.paths import local_path
from nanotrain.prepare.inputs import Limits
from nanotrain.quantities import count_of

_BPE = "bpe:"
_PART = re.compile(r"\d{1,6}/\d{1,6}")


class Share(NamedTuple):
    """Number of a share of the input, and the number of shares."""

    number: int  # from 1
    total: int


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
    text_column: str | None = None
    text_suffix: tuple[str, ...] = ()
    format: str = "text"
    chat_template: str | None = None
    subset: str | None = None
    split_name: str = "train"
    streaming: bool = False
    max_documents: int | None = None
    append_eod: bool = True
    parse_special: bool = False
    dtype: str = "auto"
    overwrite: bool = False
    max_document_bytes: int = Limits.document_bytes
    max_inflation: int = Limits.inflation
    part: str | None = None
    executor: str = "local"
    sbatch: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_tokenizer()
        if not self.output.name:
            raise DataError(
                "--output names no file",
                why="it is the prefix of PREFIX.bin",
                fix="write for example corpus",
            )
        if self.max_documents is not None and not self.streaming:
            raise DataError(
                "--max-documents has no effect without --streaming",
                fix="add --streaming or leave it out",
            )
        self._check_part()
        self._check_executor()

    def _check_tokenizer(self) -> None:
        """Check --tokenizer, also against --format chat and --chat-template."""
        if not self.tokenizer:
            raise DataError(
                "--tokenizer is empty",
                why="it names the tokenizer",
                fix="write for example bpe:8192",
            )
        if self.trains_bpe and not self.tokenizer.removeprefix(_BPE).isdecimal():
            raise DataError(
                f"--tokenizer {self.tokenizer} has no size", fix="write for example bpe:8192"
            )
        if self.tokenizer == "bytes" and (self.is_chat or self.chat_template is not None):
            what = "--format chat" if self.is_chat else "--chat-template"
            raise DataError(
                f"{what} with --tokenizer bytes",
                why="the chat template of a tokenizer turns conversations into text",
                fix="name the tokenizer of a chat model, or another one with --chat-template",
            )
        if self.is_chat and self.trains_bpe:
            raise DataError(
                f"--format chat with --tokenizer {self.tokenizer}",
                why="a tokenizer is trained on text, and a model that has read it goes on with it",
                fix="prepare the text of pretraining with --chat-template chatml, then the "
                "conversations with the PREFIX.tokenizer of it",
            )
        if self.is_chat and self.parse_special:
            raise DataError(
                "--parse-special has no effect with --format chat",
                why="the chat template writes the special tokens of conversations",
                fix="leave it out",
            )

    def _check_part(self) -> None:
        """Check that --part is I/N with I from 1 to N."""
        if self.part is None:
            return
        is_valid = _PART.fullmatch(self.part) and 1 <= self.share.number <= self.share.total
        if not is_valid:
            raise DataError(
                f"--part {self.part} cannot be read",
                why="it is I/N: this process tokenizes the I-th of N shares of the input",
                fix="write for example --part 1/4",
            )

    def _check_executor(self) -> None:
        """Check that --executor, --sbatch, --part and --streaming can be combined."""
        has_part = self.part is not None
        has_executor = self.executor != "local"
        if self.sbatch and self.executor != "slurm":
            raise DataError(
                "--sbatch has no effect", why="it is for --executor slurm", fix="leave it out"
            )
        if self.streaming and (has_part or has_executor):
            raise DataError(
                "--streaming with --part or --executor",
                why="a stream is read by one machine, in order",
                fix="leave --streaming out",
            )
        if has_part and has_executor:
            raise DataError(
                "--part with --executor",
                why="the executor divides the input",
                fix="leave --part out",
            )

    @property
    def share(self) -> Share:
        """The share of the parts that this process writes."""
        number, _, total = (self.part or "1/1").partition("/")
        return Share(int(number), int(total))

    @property
    def trains_bpe(self) -> bool:
        """Whether a BPE is trained, and no tokenizer loaded."""
        return self.tokenizer.startswith(_BPE)

    @property
    def bpe_vocab_size(self) -> int | None:
        """Vocabulary of the BPE to train; None to load a tokenizer."""
        return int(self.tokenizer.removeprefix(_BPE)) if self.trains_bpe else None

    @property
    def is_chat(self) -> bool:
        """Whether documents are conversations."""
        return self.format == "chat"

    @property
    def column(self) -> str:
        """The field with the text or the messages."""
        return self.text_column or ("messages" if self.is_chat else "text")

    @property
    def limits(self) -> Limits:
        """Limits on the size of an input."""
        return Limits(self.max_document_bytes, self.max_inflation)

    @property
    def parts(self) -> Path:
        """The folder of part files."""
        return self.output.with_name(self.output.name + ".parts")

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "PrepareOptions":
        """The options of a parsed command line."""
        values = {field.name: getattr(args, field.name) for field in fields(cls)}
        values["input"] = tuple(args.input)
        values["text_suffix"] = tuple(
            f".{suffix.lstrip('.').lower()}" for suffix in args.text_suffix
        )
        values["output"] = local_path(prefix_of(args.output))
        values["sbatch"] = tuple(
            word if word.startswith("-") else f"--{word}" for word in args.sbatch
        )
        return cls(**values)

    def for_part(self, number: int, count: int) -> list[str]:
        """The arguments of `nanotrain prepare` for one of `count` shares, wherever it runs."""
        words = ["--part", f"{number}/{count}"]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("part", "executor", "sbatch", "workers") or value == field.default:
                continue
            name = field.name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{name}" if value else f"--no-{name}")
            elif isinstance(value, tuple):
                words += [f"--{name}", *map(str, value)]
            else:
                words += [f"--{name}", str(value)]
        return words


class Verify(argparse.Action):
    """The action of `--verify PREFIX`, which checks a corpus and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        # rest: namespace, PREFIX, option string
        prefix = local_path(prefix_of(str(rest[1])))
        checked = check_blocks(prefix)
        if not any(checked.values()):
            why = "an older version or another program wrote it"
            raise DataError(
                f"{prefix} has no checksums", why=why, fix="prepare it again to have them"
            )
        for path, num_blocks in checked.items():
            verdict = "not checked: it has no checksums, prepare the corpus again to have them"
            if num_blocks:
                verdict = f"sound ({count_of(num_blocks, 'block')}, all checksums match)"
            print(f"{path}: {verdict}")
        parser.exit()
