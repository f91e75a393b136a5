"""Go on with changed data: what each corpus goes on with, reads again, or leaves out.

    go_on             the origin of the changed data, with a line per corpus; or one error
    changed_order     the changed settings
    continue_corpus   the sample at which a corpus goes on, what is read again and what is left out

A corpus whose samples have the same order as before goes on where it stopped, whatever its weight
and its place in the blend are. Another order (`--seed`, `--split`, `--seq-length`, `--packing`,
shuffled) cannot be exact within an epoch: some samples are read again and others are left out. That
needs `--allow-data-changes`, as does training data that becomes validation data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanotrain.data.build import DatasetSplits, corpora_of
from nanotrain.data.gpt import GPTDataset, permuted
from nanotrain.data.origin import DataOrigin
from nanotrain.data.recorded_data import (
    CorpusOrder,
    CorpusRecord,
    DataRecord,
    TokenRange,
    valid_ranges,
)
from nanotrain.errors import DataError
from nanotrain.quantities import count_of

MAX_COUNTED = 200_000  # samples of two epochs that are counted one by one


@dataclass(frozen=True)
class Overlap:
    """Tokens of an epoch that another order reads twice or never."""

    repeated: int  # tokens that were read in this epoch and will be read in it again
    left_out: int  # tokens that this epoch does not read
    is_exact: bool  # False: expected values of two random orders


NO_OVERLAP = Overlap(0, 0, is_exact=True)


@dataclass(frozen=True)
class Continuation:
    """The position from which a changed corpus is read on, and the samples read twice or never."""

    prefix: str
    read: int  # samples of the new order that count as read
    text: str  # for a person
    overlap: Overlap = NO_OVERLAP
    moved_from: str | None = None  # prefix in the checkpoint

    @property
    def is_exact(self) -> bool:
        """Whether no sample is read twice or left out."""
        return self.overlap.repeated == 0 and self.overlap.left_out == 0


@dataclass(frozen=True)
class ChangedData:
    """The data that a run goes on with."""

    origin: DataOrigin
    lines: Sequence[str]  # one per corpus, and what changes between training and validation


def go_on(
    record: DataRecord,
    splits: DatasetSplits,
    *,
    settings: Mapping[str, Any],
    validates: bool,
    is_allowed: bool,
) -> ChangedData:
    """The changed data of a run, from the sample of its checkpoint on.

    Args:
        record: data at the checkpoint.
        splits: data that training goes on with.
        settings: `order_settings` of the start.
        validates: whether the run validates.
        is_allowed: whether samples may be read again or left out (`--allow-data-changes`).

    Raises:
        DataError: samples would be read again or left out, or training data becomes validation
            data, and it is not allowed.
    """
    parts = corpora_of(splits.train)
    recorded = [_record_of_corpus(record.corpora, part) for part in parts]
    continuations = [continue_corpus(old, part) for old, part in zip(recorded, parts, strict=True)]
    trained = _trained_and_validated(record, valid_ranges(splits)) if validates else []
    faults = [item.text for item in continuations if not item.is_exact] + trained
    if faults and not is_allowed:
        raise DataError(
            f"the data changed ({'; '.join(changed_order(record.settings, settings))}) and cannot "
            f"go on exactly after {count_of(record.sample, 'sample')}",
            why="; ".join(faults),
            fix="leave these settings as they were, or accept it with --allow-data-changes",
        )
    lines = [item.text for item in continuations]
    lines += [_removed_lines(old) for old in record.corpora if old not in recorded]
    lines += trained + _validated_and_trained(record, parts)
    return ChangedData(_origin_of(record.sample, continuations), lines)


def _origin_of(sample: int, continuations: Sequence[Continuation]) -> DataOrigin:
    """The origin from which the corpora go on at a sample of the run."""
    read = {}
    moved = {}
    for item in continuations:
        read[item.prefix] = item.read
        if item.moved_from is not None:
            moved[item.moved_from] = item.prefix
    return DataOrigin(sample, read, moved)


def changed_order(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The settings of the order that changed, as text.

    >>> changed_order({"split": "1", "seed": 1}, {"split": "1", "seed": 2})
    ['seed 1 -> 2']
    """
    changed = []
    for name, value in now.items():
        old = before.get(name)
        if old != value:
            changed.append(f"{name} {_as_text(old)} -> {_as_text(value)}")
    return changed


def _as_text(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return str(value)


def _record_of_corpus(corpora: Sequence[CorpusRecord], part: GPTDataset) -> CorpusRecord | None:
    """The record of an open corpus, by the same prefix, else by the same content."""
    prefix = str(part.corpus.prefix)
    same = [old for old in corpora if old.fingerprint == part.corpus.fingerprint]
    for old in same:
        if old.prefix == prefix:
            return old
    return same[0] if same else None


def continue_corpus(old: CorpusRecord | None, part: GPTDataset) -> Continuation:
    """The continuation of one corpus.

    Args:
        old: record of the corpus; None for a new one.
        part: corpus that training goes on with.
    """
    prefix = str(part.corpus.prefix)
    if old is None:
        size = count_of(part.samples_per_epoch, "sample")
        return Continuation(prefix, 0, f"{prefix} is new and starts at its beginning, of {size}")
    name = prefix
    moved_from = None
    if old.prefix != prefix:
        name = f"{prefix} (before {old.prefix})"
        moved_from = old.prefix
    order = CorpusOrder.of(part)
    read = _position(old, order)
    epoch, done = divmod(read, order.samples)
    overlap = _overlap(old, part)
    size = count_of(order.samples, "sample")
    position = f"sample {done:,} of {size} of its epoch {epoch + 1}"
    text = f"{name} goes on at {position}, where it stopped: nothing is read again or left out"
    if overlap.repeated or overlap.left_out:
        about = "" if overlap.is_exact else "about "
        text = (
            f"{name} goes on at {position} in another order: {about}"
            f"{count_of(overlap.repeated, 'token')} of this epoch are read again and {about}"
            f"{overlap.left_out:,} are left out"
        )
    return Continuation(prefix, read, text, overlap, moved_from)


def _position(old: CorpusRecord, order: CorpusOrder) -> int:
    """The samples of an order that count as read: as many epochs, and as much of the last one."""
    if old.order == order:
        return old.read
    epochs, done = divmod(old.read, old.order.samples)
    if _is_in_file_order(old.order, order):
        first = done * old.order.seq_length // order.seq_length
    else:
        first = round(done * order.samples / old.order.samples)
    return epochs * order.samples + min(first, order.samples)


def _is_in_file_order(old: CorpusOrder, new: CorpusOrder) -> bool:
    """Whether two corpora read consecutive windows from the same token on."""
    is_plain = old.seed is None and new.seed is None and old.packing == new.packing == "stream"
    return is_plain and old.start == new.start


def _overlap(old: CorpusRecord, part: GPTDataset) -> Overlap:
    """The tokens of this epoch that are read twice or never."""
    order = CorpusOrder.of(part)
    done = old.read % old.order.samples
    if old.order == order or done == 0:
        return NO_OVERLAP
    is_stream = old.order.packing == order.packing == "stream"
    if is_stream and old.order.samples + order.samples <= MAX_COUNTED:
        return _count_overlap(old, part)
    unread = 1 - done / old.order.samples
    expected = round((1 - unread) * unread * (order.stop - order.start))
    return Overlap(expected, expected, is_exact=False)


def _count_overlap(old: CorpusRecord, part: GPTDataset) -> Overlap:
    """The overlap, counted token by token over masks [size] of the tokens of the corpus.

    `read` and `unread` are the tokens read before and still to be read in this epoch, `known` and
    `whole` all tokens of an epoch of the old and of the new order.
    """
    new = CorpusOrder.of(part)
    epoch, done = divmod(old.read, old.order.samples)
    new_epoch, first = divmod(_position(old, new), new.samples)
    if new_epoch > epoch:  # the new epoch is smaller, and done
        first = new.samples
    size = max(old.order.stop, new.stop)
    read = _tokens(old.order, range(done), epoch=epoch, size=size)
    unread = _tokens(new, range(first, new.samples), epoch=epoch, size=size)
    known = _tokens(old.order, range(old.order.samples), epoch=epoch, size=size)
    whole = _tokens(new, range(new.samples), epoch=epoch, size=size)
    left_out = known & whole & ~read & ~unread
    return Overlap(int((read & unread).sum()), int(left_out.sum()), is_exact=True)


def _tokens(order: CorpusOrder, samples: range, *, epoch: int, size: int) -> np.ndarray:
    """Whether each token of a corpus is in samples of an epoch. [size] bool."""
    tokens = np.zeros(size, dtype=bool)
    for sample in samples:
        window = sample
        if order.seed is not None and len(samples) < order.samples:
            window = permuted(sample, order.samples, seed=order.seed, epoch=epoch)
        first = order.start + window * order.seq_length
        tokens[first : first + order.seq_length] = True
    return tokens


def _removed_lines(old: CorpusRecord) -> str:
    """A line on a corpus that is not read any more."""
    done = old.read % old.order.samples
    unread = old.order.samples - done
    tokens = count_of(unread * old.order.seq_length, "token")
    return (
        f"{old.prefix} is not read any more: {count_of(old.read, 'sample', verb='was')} read, "
        f"the other {unread:,} of this epoch ({tokens}) are left out"
    )


def _trained_and_validated(record: DataRecord, valid: Sequence[TokenRange]) -> list[str]:
    """Lines on training data that becomes validation data."""
    lines = []
    for old in record.corpora:
        tokens = 0
        for part in valid:
            if part.fingerprint == old.fingerprint and part not in record.valid:
                tokens += part.overlap(old.order.start, old.order.stop)
        if tokens and old.read:
            text = count_of(tokens, "token")
            lines.append(f"{text} of {old.prefix} were training data and become validation data")
    return lines


def _validated_and_trained(record: DataRecord, parts: Sequence[GPTDataset]) -> list[str]:
    """Lines on validation data that becomes training data."""
    trained = {old.fingerprint: old.order for old in record.corpora}
    lines = []
    for part in parts:
        tokens = 0
        before = trained.get(part.corpus.fingerprint)
        for old in record.valid:
            if old.fingerprint != part.corpus.fingerprint:
                continue
            tokens += old.overlap(part.start, part.stop)
            if before is not None:
                tokens -= old.overlap(max(part.start, before.start), min(part.stop, before.stop))
        if tokens > 0:
            text = count_of(tokens, "token")
            lines.append(
                f"{text} of {part.corpus.prefix} were validation data and become training data"
            )
    return lines
