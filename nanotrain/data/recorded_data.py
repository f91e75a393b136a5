"""How far a run had read its data at a checkpoint: `objects.data` of the manifest.

DataRecord      settings of the order, sample, corpora, validation, origin
CorpusRecord    the order of a corpus, and the samples that were read of it
record_of       the record of a run now
read_record     the record in a checkpoint; older versions have none
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nanotrain.config.config import Config
from nanotrain.config.schema import to_dict
from nanotrain.data.batch import SampleDataset
from nanotrain.data.blend import BlendedDataset
from nanotrain.data.build import DatasetSplits, corpora_of
from nanotrain.data.gpt import GPTDataset
from nanotrain.data.origin import DataOrigin
from nanotrain.untrusted import list_of, object_of, text_of, whole_number

# settings of the data section that change which tokens sample n is
ORDER_SETTINGS = (
    "data_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "stages",
    "split",
    "seq_length",
    "shuffle",
    "packing",
)


@dataclass(frozen=True)
class CorpusOrder:
    """The settings that determine the samples of a corpus and their order."""

    start: int  # stream offset of the first token of the split
    stop: int  # stream offset after its last token
    samples: int  # samples per epoch
    seq_length: int
    packing: str
    seed: int | None  # key of the shuffle; None: samples are in file order

    @classmethod
    def of(cls, part: GPTDataset) -> "CorpusOrder":
        """The order of an open corpus."""
        return cls(
            start=part.start,
            stop=part.stop,
            samples=part.samples_per_epoch,
            seq_length=part.config.seq_length,
            packing=part.config.packing,
            seed=part.seed if part.config.shuffle else None,
        )

    @classmethod
    def from_json(cls, value: object) -> "CorpusOrder":
        """The order in a record.

        Raises:
            ValueError: a field is missing or has an invalid value.
        """
        row = object_of(value, "order")
        counts = {}
        for name in ("start", "stop", "samples", "seq_length"):
            counts[name] = whole_number(row.get(name), name)
        seed = row.get("seed")
        if seed is not None:
            seed = whole_number(seed, "seed")
        return cls(**counts, packing=text_of(row.get("packing"), "packing"), seed=seed)


@dataclass(frozen=True)
class CorpusRecord:
    """A corpus at a checkpoint."""

    prefix: str
    fingerprint: str
    read: int  # samples that were read of it, over all epochs
    order: CorpusOrder


@dataclass(frozen=True)
class TokenRange:
    """Tokens [start, stop) of a corpus."""

    fingerprint: str
    start: int
    stop: int

    @classmethod
    def of(cls, part: GPTDataset) -> "TokenRange":
        """The tokens of an open corpus in its split."""
        return cls(part.corpus.fingerprint, part.start, part.stop)

    def overlap(self, start: int, stop: int) -> int:
        """The number of tokens that are also in [start, stop) of the same corpus."""
        return max(0, min(self.stop, stop) - max(self.start, start))


@dataclass(frozen=True)
class DataRecord:
    """The data of a run at a checkpoint."""

    sample: int  # the next sample
    settings: Mapping[str, Any]  # ORDER_SETTINGS of the command line, and seed
    corpora: tuple[CorpusRecord, ...]
    valid: tuple[TokenRange, ...]  # validation data
    origin: DataOrigin | None = None

    @classmethod
    def from_json(cls, value: object) -> "DataRecord":
        """The record in a checkpoint.

        Raises:
            ValueError: a field is missing or has an invalid value.
        """
        row = object_of(value, "objects.data")
        corpora = []
        for item in list_of(row.get("corpora"), "corpora"):
            corpus = object_of(item, "corpora")
            corpora.append(
                CorpusRecord(
                    text_of(corpus.get("prefix"), "prefix"),
                    text_of(corpus.get("fingerprint"), "fingerprint"),
                    whole_number(corpus.get("read"), "read"),
                    CorpusOrder.from_json(corpus.get("order")),
                )
            )
        valid = []
        for item in list_of(row.get("valid"), "valid"):
            part = object_of(item, "valid")
            fingerprint = text_of(part.get("fingerprint"), "fingerprint")
            start = whole_number(part.get("start"), "start")
            valid.append(TokenRange(fingerprint, start, whole_number(part.get("stop"), "stop")))
        origin = row.get("origin")
        return cls(
            whole_number(row.get("sample"), "sample"),
            object_of(row.get("settings"), "settings"),
            tuple(corpora),
            tuple(valid),
            None if origin is None else DataOrigin.from_json(origin),
        )

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def order_settings(config: Config) -> dict[str, Any]:
    """The settings that determine the samples and their order."""
    data = to_dict(config.data)
    settings = {name: data.get(name) for name in ORDER_SETTINGS}
    settings["seed"] = config.train.seed
    return settings


def record_of(
    samples: SampleDataset,
    *,
    sample: int,
    settings: Mapping[str, Any],
    valid: Iterable[TokenRange],
    origin: DataOrigin | None,
) -> DataRecord:
    """The record of a run.

    Args:
        samples: training samples, from the origin on.
        sample: the next sample.
        settings: `order_settings` of the command line.
        valid: validation data.
        origin: origin of the training samples.
    """
    corpora = []
    for part, read in zip(corpora_of(samples), read_by(samples, sample), strict=True):
        record = CorpusRecord(
            str(part.corpus.prefix), part.corpus.fingerprint, read, CorpusOrder.of(part)
        )
        corpora.append(record)
    return DataRecord(sample, settings, tuple(corpora), tuple(valid), origin)


def read_by(samples: SampleDataset, sample: int) -> list[int]:
    """The number of samples before `sample`, per corpus."""
    if isinstance(samples, BlendedDataset):
        return samples.read_by(sample)
    return [sample]


def valid_ranges(splits: DatasetSplits) -> tuple[TokenRange, ...]:
    """The tokens that a run validates on."""
    ranges = []
    for samples in (splits.valid, *splits.valid_sets.values()):
        ranges += [TokenRange.of(part) for part in corpora_of(samples)]
    return tuple(ranges)


def read_record(objects: Mapping[str, Any]) -> DataRecord | None:
    """The record in the objects of a manifest; None in older versions and for random tokens.

    Raises:
        ValueError: it is damaged.
    """
    value = objects.get("data")
    return None if value is None else DataRecord.from_json(value)
