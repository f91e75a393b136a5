"""The order in which a run reads its data, and the documents in it.

    RUN/data-order.jsonl   one row per start and rollback: counters, and the settings from which the
                           order follows
    OrderStart             a row: samples of any step until the next row, and the step of any sample
    DataOrder              the rows that count: documents of a step, steps of a document, tokens by
                           corpus
    DocumentUse            the part of a document in a sample
    document_hash          the hash of a document's tokens

The order is a pure function of the settings and the counters, so nothing is logged per step, and
future steps of a run are listed like past steps. A start at an earlier step replaces the rows
after it.
"""

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from nanotrain.config.config import Config, DataConfig
from nanotrain.config.schedules import batch_schedule, samples_of_steps
from nanotrain.config.schema import config_from_dict, to_dict
from nanotrain.data.batch import SampleDataset
from nanotrain.data.blend import BlendedDataset
from nanotrain.data.build import (
    addresses_of,
    build_data,
    corpora_of,
    read_document,
    starting_stages,
)
from nanotrain.data.gpt import GPTDataset
from nanotrain.data.indexed import IndexedTokens
from nanotrain.data.origin import DataOrigin, continued
from nanotrain.data.run_tokenizer import tokenizer_of_stored, uses_quickstart
from nanotrain.data.token_format import prefix_of
from nanotrain.errors import ConfigError, DataError, EnvironmentFault
from nanotrain.quantities import count_of
from nanotrain.runs.files import disk_errors, open_append, write_all
from nanotrain.storage.remote import redacted
from nanotrain.untrusted import object_of, read_rows, whole_number

ORDER_NAME = "data-order.jsonl"
COUNTERS = ("step", "consumed_samples", "skipped_samples", "curve_batch_size", "vocab_size")


@dataclass(frozen=True)
class DocumentUse:
    """The part of a document that is in a sample."""

    step: int
    sample: int  # index in the order of the run
    corpus: IndexedTokens
    epoch: int  # epoch of the corpus, from 0
    document: int  # index in the corpus
    first_byte: int  # first byte of the part in the .bin
    last_byte: int  # the byte after the part
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
    opens_addresses: bool = True  # whether corpora in object storage are opened
    origin: DataOrigin | None = None  # of data that was changed at a resume

    @classmethod
    def from_row(cls, row: Mapping[str, Any], *, opens_addresses: bool) -> "OrderStart":
        """A row of data-order.jsonl.

        Raises:
            ValueError: it has other fields.
            ConfigError: settings of another version.
        """
        counters = {name: whole_number(row.get(name), name) for name in COUNTERS}
        config = config_from_dict(object_of(row.get("config"), "config"))
        whole_number(config.train.global_batch_size, "global_batch_size", low=1)
        origin = None
        if row.get("origin") is not None:
            origin = DataOrigin.from_json(row["origin"])
        return cls(**counters, config=config, opens_addresses=opens_addresses, origin=origin)

    def append_to(self, folder: Path) -> None:
        """Append the row to the file of a run folder.

        Raises:
            EnvironmentFault: the disk is full or the folder cannot be written.
        """
        row: dict[str, Any] = {name: getattr(self, name) for name in COUNTERS}
        if self.origin is not None:
            row["origin"] = self.origin.to_json()
        sections = to_dict(self.config)
        row["config"] = {name: sections[name] for name in ("data", "train") if name in sections}
        with open_append(folder / ORDER_NAME) as file, disk_errors(folder / ORDER_NAME):
            write_all(file, json.dumps(row).encode() + b"\n")

    def with_moved(self, moved: Mapping[str, str]) -> "OrderStart":
        """The start with the new prefixes of corpora that were renamed later."""
        if not moved:
            return self
        data = self.config.data
        data = replace(
            data,
            data_path=_with_prefixes(data.data_path, moved),
            train_data_path=_with_prefixes(data.train_data_path, moved),
            stages=_with_prefixes(data.stages, moved),
        )
        origin = self.origin
        if origin is not None:
            read = {moved.get(prefix, prefix): count for prefix, count in origin.read.items()}
            origin = replace(origin, read=read)
        config = replace(self.config, data=data)
        return replace(self, config=config, origin=origin)

    @cached_property
    def dataset(self) -> SampleDataset:
        """The training samples.

        Raises:
            DataError: a corpus is missing or damaged.
        """
        data = self.config.data
        if uses_quickstart(data):
            raise DataError(
                "the settings of the run name no corpus",
                why="they are damaged, or the corpus was that of the quick start",
                fix="name another run",
            )
        if not self.opens_addresses:
            _require_local(data)
        seed = self.config.train.seed
        splits = build_data(data, vocab_size=self.vocab_size, seed=seed, required=("train",))
        assert splits.train is not None, "a required split"
        samples = starting_stages(splits.train, data, samples_of=self._samples_of_steps)
        return continued(samples, self.origin)

    def _samples_of_steps(self, num_steps: int) -> int:
        """The number of samples in the first steps of the run."""
        schedule = batch_schedule(self.config)
        if schedule:
            return samples_of_steps(schedule, num_steps)
        batch_size = self.curve_batch_size or self._batch_size
        return num_steps * batch_size

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
        schedule = batch_schedule(self.config)
        num_steps = step - 1 - self.step
        consumed = self.consumed_samples
        if schedule:
            consumed = samples_of_steps(schedule, num_steps, consumed=consumed)
            size = schedule.size_at(consumed)
        else:
            size = self._batch_size
            consumed += num_steps * size
        first = consumed + self.skipped_samples
        return range(first, first + size)

    def read_by(self, index: int) -> list[int]:
        """The number of samples per corpus among the first `index` of the dataset."""
        if isinstance(self.dataset, BlendedDataset):
            return self.dataset.read_by(index)
        return [index]

    def _locate(self, sample: int) -> tuple[int, int]:
        """The corpus of a sample, and the sample's index in it."""
        if isinstance(self.dataset, BlendedDataset):
            return self.dataset.locate(sample)
        return 0, sample

    def documents(self, step: int) -> Iterator[DocumentUse]:
        """The documents of a step after this start, sample after sample."""
        for sample in self.samples(step):
            source, index = self._locate(sample)
            dataset = self.corpora[source]
            corpus = dataset.corpus
            for part in dataset.parts(index):
                # without the last label of the sample
                length = dataset.config.seq_length - part.offset
                stop = min(part.stop, part.start + length)
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
        """Steps, and samples in them, that hold a token of a document.

        Args:
            corpus: number of the corpus.
            document: index in it.
            steps: the steps to search.
        """
        part = self.corpora[corpus]
        samples = range(self.samples(steps[0]).start, self.samples(steps[-1]).stop)
        before = self.read_by(samples.start)[corpus]
        after = self.read_by(samples.stop)[corpus]
        if before == after or document in part.excluded:
            return
        windows = part.windows_with(document)
        indices = []
        for epoch in range(
            before // part.samples_per_epoch, (after - 1) // part.samples_per_epoch + 1
        ):
            indices += [part.index_of(window, epoch) for window in windows]

        def num_read(sample: int) -> int:
            return self.read_by(sample + 1)[corpus]

        def last_sample(step: int) -> int:
            return self.samples(step).stop

        for index in sorted(indices):
            if before <= index < after:
                sample = samples[bisect_left(samples, index + 1, key=num_read)]
                yield steps[bisect_right(steps, sample, key=last_sample)], sample

    @property
    def _batch_size(self) -> int:
        """Samples of a step."""
        size = self.config.train.global_batch_size
        assert size is not None, "the hook sets it"
        return size


class DataOrder:
    """The order of a run.

    Args:
        starts: rows of data-order.jsonl in the order in which they were written; rows at steps
            that a later row repeats are left out.
    """

    def __init__(self, starts: Iterable[OrderStart]) -> None:
        self.starts: list[OrderStart] = []
        for start in starts:
            while self.starts and self.starts[-1].step >= start.step:
                self.starts.pop()
            moved = start.origin.moved if start.origin is not None else {}
            self.starts = [earlier.with_moved(moved) for earlier in self.starts]
            self.starts.append(start)

    @classmethod
    def read(cls, folder: Path, *, opens_addresses: bool = False) -> "DataOrder":
        """Read the order of a run folder.

        Args:
            folder: the run folder.
            opens_addresses: whether its corpora in object storage are opened; the folder may be
                somebody else's.

        Raises:
            EnvironmentFault: there is none.
        """
        file = folder / ORDER_NAME
        if not file.is_file():
            why = (
                "it does not exist: the folder is no run's or of an older version, or the run "
                "reads no corpus (--mock-data)"
            )
        else:
            why = "it has no rows"
        starts = []
        try:
            starts = [
                OrderStart.from_row(row, opens_addresses=opens_addresses) for row in read_rows(file)
            ]
        except (ValueError, ConfigError) as error:
            why = str(error)
        if not starts:
            raise EnvironmentFault(
                f"{file} cannot be read", why=why, fix="name the folder of a run"
            )
        return cls(starts)

    def document(self, text: str) -> tuple[Path, int]:
        """A document of the run by PREFIX:INDEX; the last part of a prefix is enough.

        Raises:
            DataError: no corpus of the run has it.
        """
        sizes: dict[Path, int] = {}
        for start in self.starts:
            for part in start.corpora:
                sizes[part.corpus.prefix] = part.corpus.num_documents
        why = f"a document is PREFIX:INDEX, and the corpora are {', '.join(map(str, sizes))}"
        try:
            named, document = read_document(text)
        except ValueError:
            raise _no_document(text, why=why) from None
        for prefix, size in sizes.items():
            if named not in (prefix, Path(prefix.name)):
                continue
            if document < size:
                return prefix, document
            raise _no_document(text, why=f"{prefix} has {count_of(size, 'document')}")
        raise _no_document(text, why=why)

    @property
    def train_iters(self) -> int:
        """The last step of the run, as it is configured now."""
        return self.starts[-1].config.train.train_iters

    def documents(self, step: int) -> Iterator[DocumentUse]:
        """The documents of a step, sample after sample.

        Raises:
            DataError: the step is before the first start in the folder or after the last step of
                the run, or the corpora cannot be read.
        """
        self._require_step(step)
        for start, steps in self.ranges(step):
            if step in steps:
                return start.documents(step)
        first = self.starts[0].step + 1
        raise DataError(
            f"step {step} is not in the run",
            why=f"its first step is {first}",
            fix="name a later step",
        )

    def _require_step(self, step: int) -> None:
        """Check that a step is not after the last one, trained or to come."""
        last = max(self.train_iters, self.starts[-1].step)
        if step > last:
            raise DataError(
                f"step {step:,} is not in the run",
                why=f"its last step is {last:,}",
                fix="name an earlier step, or go on with a larger --train-iters first",
            )

    def samples_of(
        self, corpus: Path, document: int, *, last_step: int
    ) -> Iterator[tuple[int, int]]:
        """Steps up to `last_step`, and samples in them, that hold a token of a document.

        Args:
            corpus: prefix of the corpus.
            document: index in it.
            last_step: the last step to search.
        """
        for start, steps in self.ranges(last_step):
            for corpus_index, part in enumerate(start.corpora):
                if part.corpus.prefix == corpus:
                    yield from start.samples_of(corpus_index, document, steps=steps)

    def tokens_by_corpus(self, last_step: int) -> dict[str, tuple[int, float]]:
        """Tokens read up to a step and their number of epochs, by corpus.

        Raises:
            DataError: the step is after the last one of the run.
        """
        self._require_step(last_step)
        read: dict[str, tuple[int, float]] = {}
        for start, steps in self.ranges(last_step):
            before = start.read_by(start.samples(steps[0]).start)
            after = start.read_by(start.samples(steps[-1]).stop)
            for part, first, last in zip(start.corpora, before, after, strict=True):
                name = str(part.corpus.prefix)
                tokens, epochs = read.get(name, (0, 0.0))
                tokens += part.num_tokens(first, last)
                epochs += (last - first) / part.samples_per_epoch
                read[name] = tokens, epochs
        return read

    def ranges(self, last_step: int) -> Iterator[tuple[OrderStart, range]]:
        """Every start with its steps, up to `last_step`."""
        ends = [*(start.step for start in self.starts[1:]), last_step]
        for start, end in zip(self.starts, ends, strict=True):
            steps = range(start.step + 1, min(end, last_step) + 1)
            if steps:
                yield start, steps


def document_hash(corpus: IndexedTokens, document: int) -> str:
    """The hash of the tokens of a document, 16 hexadecimal digits.

    Equal texts have equal hashes, if the tokenizer is the same.
    """
    start = corpus.document_start(document)
    stop = corpus.document_start(document + 1)
    tokens = corpus.read(start, stop).astype("<i8").tobytes() if stop > start else b""
    return hashlib.blake2b(tokens, digest_size=8).hexdigest()


def _with_prefixes(entries: Sequence[str], moved: Mapping[str, str]) -> list[str]:
    """Entries of a blend with the new prefixes of renamed corpora."""
    renamed = []
    for text in entries:
        words = [text] if text in moved else text.split(" ")
        prefixes = [str(Path(prefix_of(word))) for word in words]
        pairs = zip(words, prefixes, strict=True)
        renamed.append(" ".join(moved.get(prefix, word) for word, prefix in pairs))
    return renamed


def _no_document(text: str, *, why: str) -> DataError:
    what = f"{text} names no document of the run"
    return DataError(what, why=why, fix="write for example web:1200")


def _require_local(data: DataConfig) -> None:
    """Check that a stored data section names nothing that is not on this machine.

    Raises:
        DataError: it does.
    """
    addresses = addresses_of(data)
    if addresses:
        raise DataError(
            f"{redacted(addresses[0])} of {ORDER_NAME} is not opened",
            why="a run folder may be somebody else's, and a request tells them of its reader",
            fix="add --open-addresses if you trust the run",
        )
    if data.fim_data:
        tokenizer_of_stored(data)  # an error for one that would be fetched
