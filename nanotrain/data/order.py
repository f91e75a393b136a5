"""The order in which a run reads its data, and the documents in it.

    RUN/data-order.jsonl   one row per start and rollback: counters, and the settings from which the order follows
    OrderStart             a row: the samples of any step until the next row, and the step of any sample
    DataOrder              the rows that count: documents of a step, steps of a document, tokens by corpus
    DocumentUse            the part of a document in a sample

The order is a pure function of the settings and the counters, so nothing is logged per step, and
steps that a run has yet to train are answered like those that it has trained. A start at an earlier
step replaces the rows after it.
"""

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nanotrain.config.config import Config
from nanotrain.config.schedules import batch_schedule, samples_of_steps
from nanotrain.config.schema import config_from_dict, to_dict
from nanotrain.data.batch import SampleDataset
from nanotrain.data.blend import BlendedDataset
from nanotrain.data.build import build_data, corpora_of, read_document, starting_stages
from nanotrain.data.gpt import GPTDataset
from nanotrain.data.indexed import IndexedTokens
from nanotrain.errors import ConfigError, DataError, EnvironmentFault
from nanotrain.quantities import count_of
from nanotrain.runs.files import disk_errors, open_append, write_all
from nanotrain.untrusted import object_of, read_rows, whole_number

ORDER_NAME = "data-order.jsonl"


@dataclass(frozen=True)
class DocumentUse:
    """The part of a document that is in a sample."""

    step: int
    sample: int  # index in the order of the run
    corpus: IndexedTokens
    epoch: int  # of the corpus, from 0
    document: int  # index in the corpus
    first_byte: int  # of the part, in the .bin
    last_byte: int  # after the part
    tokens: int  # tokens of the part; every token of a sample but its last label counts


@dataclass(frozen=True)
class OrderStart:
    """The settings and counters of a start, from which the order of its samples follows."""

    step: int  # steps done
    consumed_samples: int
    skipped_samples: int  # left out after spikes
    curve_batch_size: int  # global batch size at step 0
    vocab_size: int
    config: Config  # sections data and train, with the global batch size

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "OrderStart":
        """A row of data-order.jsonl.

        Raises:
            ValueError: it has other fields.
            ConfigError: settings of another version.
        """
        names = ("step", "consumed_samples", "skipped_samples", "curve_batch_size", "vocab_size")
        counters = {name: whole_number(row.get(name), name) for name in names}
        return cls(**counters, config=config_from_dict(object_of(row.get("config"), "config")))

    def append_to(self, folder: Path) -> None:
        """Append the row to the file of a run folder.

        Raises:
            EnvironmentFault: the disk is full or the folder cannot be written.
        """
        sections = {
            name: values
            for name, values in to_dict(self.config).items()
            if name in ("data", "train")
        }
        row = {name: value for name, value in vars(self).items() if isinstance(value, int)} | {
            "config": sections
        }
        with open_append(folder / ORDER_NAME) as file, disk_errors(folder / ORDER_NAME):
            write_all(file, json.dumps(row).encode() + b"\n")

    @cached_property
    def dataset(self) -> SampleDataset:
        """The training samples.

        Raises:
            DataError: a corpus is missing or damaged.
        """
        data = self.config.data
        train = build_data(
            data, vocab_size=self.vocab_size, seed=self.config.train.seed, required=("train",)
        ).train
        assert train is not None, "a required split"
        schedule, size = batch_schedule(self.config), self.curve_batch_size or self._batch_size
        return starting_stages(
            train,
            data,
            samples_of=lambda n: samples_of_steps(schedule, n) if schedule else n * size,
        )

    @cached_property
    def corpora(self) -> tuple[GPTDataset, ...]:
        """The corpora of the training samples.

        Raises:
            DataError: the samples are random tokens.
        """
        corpora = corpora_of(self.dataset)
        if not corpora:
            raise DataError(
                "the samples of the run have no documents",
                why="they are random",
                fix="name another run",
            )
        return corpora

    def samples(self, step: int) -> range:
        """The samples of a step after this start, as indices of the dataset."""
        schedule, steps, consumed = (
            batch_schedule(self.config),
            step - 1 - self.step,
            self.consumed_samples,
        )
        consumed = (
            samples_of_steps(schedule, steps, consumed=consumed)
            if schedule
            else consumed + steps * self._batch_size
        )
        first, size = (
            consumed + self.skipped_samples,
            schedule.size_at(consumed) if schedule else self._batch_size,
        )
        return range(first, first + size)

    def read_by(self, index: int) -> list[int]:
        """By corpus, the samples among the first `index` of the dataset."""
        return self.dataset.read_by(index) if isinstance(self.dataset, BlendedDataset) else [index]

    def documents(self, step: int) -> Iterator[DocumentUse]:
        """The documents of a step after this start, sample after sample."""
        for sample in self.samples(step):
            source, index = (
                self.dataset.locate(sample)
                if isinstance(self.dataset, BlendedDataset)
                else (0, sample)
            )
            dataset = self.corpora[source]
            corpus, length = dataset.corpus, dataset.config.seq_length
            for part in dataset.parts(index):
                stop = min(part.stop, part.start + length - part.place)  # without the last label
                if part.document in dataset.excluded or stop <= part.start:
                    continue
                yield DocumentUse(
                    step,
                    sample,
                    corpus,
                    epoch=index // dataset.samples_per_epoch,
                    document=part.document,
                    first_byte=corpus.byte_of(part.start),
                    last_byte=corpus.byte_of(stop - 1) + corpus.dtype.itemsize,
                    tokens=stop - part.start,
                )

    def samples_of(self, corpus: int, document: int, *, steps: range) -> Iterator[tuple[int, int]]:
        """Every step of a range, and sample in it, that holds a token of a document of one of the
        corpora.
        """
        part, samples = (
            self.corpora[corpus],
            range(self.samples(steps[0]).start, self.samples(steps[-1]).stop),
        )
        before, after = self.read_by(samples.start)[corpus], self.read_by(samples.stop)[corpus]
        if before == after or document in part.excluded:
            return
        windows = part.windows_with(document)
        epochs = range(before // part.samples_per_epoch, (after - 1) // part.samples_per_epoch + 1)
        indices = sorted(part.index_of(window, epoch) for epoch in epochs for window in windows)
        for index in indices:
            if before <= index < after:
                sample = samples[
                    bisect_left(samples, index + 1, key=lambda n: self.read_by(n + 1)[corpus])
                ]
                yield (
                    steps[bisect_right(steps, sample, key=lambda step: self.samples(step).stop)],
                    sample,
                )

    @property
    def _batch_size(self) -> int:
        size = self.config.train.global_batch_size
        assert size is not None, "the hook sets it"
        return size


class DataOrder:
    """The order of a run.

    Args:
        starts: rows of data-order.jsonl in the order in which they were written; those of steps
            that a later row repeats are left out.
    """

    def __init__(self, starts: Iterable[OrderStart]) -> None:
        self.starts: list[OrderStart] = []
        for start in starts:
            while self.starts and self.starts[-1].step >= start.step:
                self.starts.pop()
            self.starts.append(start)

    @classmethod
    def read(cls, folder: Path) -> "DataOrder":
        """Read the order of a run folder.

        Raises:
            EnvironmentFault: there is none.
        """
        starts, file = [], folder / ORDER_NAME
        try:
            starts = [OrderStart.from_row(row) for row in read_rows(file)]
            why = (
                "it has no rows"
                if file.is_file()
                else "it does not exist: the folder is no run's, or of an older version"
            )
        except (ValueError, ConfigError) as error:
            why = str(error)
        if not starts:
            raise EnvironmentFault(
                f"{file} cannot be read", why=why, fix="name the folder of a run"
            )
        return cls(starts)

    def document(self, text: str) -> tuple[Path, int]:
        """A document of the run by PREFIX:INDEX; of the prefix its last part is enough.

        Raises:
            DataError: no corpus of the run has it.
        """
        known = {
            part.corpus.prefix: part.corpus.num_documents
            for start in self.starts
            for part in start.corpora
        }
        try:
            named, document = read_document(text)
            prefix = next(prefix for prefix in known if named in (prefix, Path(prefix.name)))
            if document < known[prefix]:
                return prefix, document
            why = f"{prefix} has {count_of(known[prefix], 'document')}"
        except (ValueError, StopIteration):
            why = f"a document is PREFIX:INDEX, and the corpora are {', '.join(map(str, known))}"
        raise DataError(
            f"{text} names no document of the run", why=why, fix="write for example web:1200"
        )

    @property
    def train_iters(self) -> int:
        """The last step of the run, as it is configured now."""
        return self.starts[-1].config.train.train_iters

    def documents(self, step: int) -> Iterator[DocumentUse]:
        """The documents of a step, sample after sample.

        Raises:
            DataError: the step is before the first start in the folder, or the corpora cannot be
                read.
        """
        for start, steps in self.ranges(step):
            if step in steps:
                return start.documents(step)
        first = self.starts[0].step + 1
        raise DataError(
            f"step {step} is not in the run",
            why=f"its first step is {first}",
            fix="name a later step",
        )

    def samples_of(
        self, corpus: Path, document: int, *, last_step: int
    ) -> Iterator[tuple[int, int]]:
        """Every step up to `last_step`, and sample in it, that holds a token of a document of a
        corpus.
        """
        for start, steps in self.ranges(last_step):
            for number, part in enumerate(start.corpora):
                if part.corpus.prefix == corpus:
                    yield from start.samples_of(number, document, steps=steps)

    def tokens_by_corpus(self, last_step: int) -> dict[str, tuple[int, float]]:
        """By corpus, the tokens read up to a step and how many epochs they are."""
        read: dict[str, tuple[int, float]] = {}
        for start, steps in self.ranges(last_step):
            before, after = (
                start.read_by(start.samples(steps[0]).start),
                start.read_by(start.samples(steps[-1]).stop),
            )
            for part, first, last in zip(start.corpora, before, after, strict=True):
                tokens, epochs = read.get(str(part.corpus.prefix), (0, 0.0))
                tokens, epochs = (
                    tokens + part.num_tokens(first, last),
                    epochs + (last - first) / part.samples_per_epoch,
                )
                read[str(part.corpus.prefix)] = tokens, epochs
        return read

    def ranges(self, last_step: int) -> Iterator[tuple[OrderStart, range]]:
        """Every start with its steps, up to `last_step`."""
        ends = [*(start.step for start in self.starts[1:]), last_step]
        for start, end in zip(self.starts, ends, strict=True):
            steps = range(start.step + 1, min(end, last_step) + 1)
            if steps:
                yield start, steps


def document_hash(corpus: IndexedTokens, document: int) -> str:
    """The hash of the tokens of a document, 16 hexadecimal digits; equal texts of one tokenizer
    have equal hashes.
    """
    start, stop = corpus.document_start(document), corpus.document_start(document + 1)
    tokens = corpus.read(start, stop).astype("<i8").tobytes() if stop > start else b""
    return hashlib.blake2b(tokens, digest_size=8).hexdigest()
