"""Open the datasets of a run, from the sample on at which its data begins.

    open_datasets   datasets of a data section, with the recorded blend and the origin of its data
    saved_start     what the checkpoint that a run goes on from says of its data

Data that changed since the checkpoint goes on per corpus where it stopped (`data/changed_data.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from nanotrain.checkpoint.store import saved_config, saved_objects, saved_stages
from nanotrain.config.config import Config, DataConfig
from nanotrain.config.schema import config_from_dict, to_dict, unnest
from nanotrain.data.build import DatasetSplits, build_data, corpora_of, require_same_corpora
from nanotrain.data.changed_data import changed_order, go_on
from nanotrain.data.mix import with_recorded_mix
from nanotrain.data.order import OrderStart
from nanotrain.data.origin import DataOrigin
from nanotrain.data.recorded_data import (
    DataRecord,
    order_settings,
    read_record,
    record_of,
)
from nanotrain.data.run_tokenizer import uses_quickstart
from nanotrain.errors import DataError, NanotrainError
from nanotrain.log import get_logger
from nanotrain.runs.folder import RunFolder
from nanotrain.untrusted import object_of, whole_number

log = get_logger(__name__)

# settings that group the same samples otherwise
BATCH_SETTINGS = (
    "global_batch_size",
    "rampup_batch_size",
    "step_batch_size_schedule",
    "step_seq_length_schedule",
)


@dataclass(frozen=True)
class SavedStart:
    """The data of a run as recorded in the checkpoint that the run resumes from."""

    name: str
    step: int
    record: DataRecord | None  # None in checkpoints of older versions
    config: Mapping[str, Any]  # configuration of the run that wrote it
    counters: Mapping[str, Any]  # `objects.train`
    stages: Sequence[str]  # after `nanotrain data mix`; empty without


def saved_start(step: Path) -> SavedStart | None:
    """Read the data record of a step folder; None if damaged, which is an error at the load.

    Every rank reads the first lines of the manifest alone.
    """
    objects = saved_objects(step)
    settings = saved_config(step)
    if settings is None:
        return None
    try:
        counters = object_of(objects.get("train", {}), "train")
        number = whole_number(counters.get("step", 0), "step")
        record = read_record(objects)
        return SavedStart(step.name, number, record, settings, counters, saved_stages(step))
    except ValueError:
        return None


@dataclass(frozen=True)
class OpenedData:
    """The datasets of a run, and where its training samples begin."""

    splits: DatasetSplits
    settings: Mapping[str, Any]  # `order_settings` of the command line
    origin: DataOrigin | None = None


def open_datasets(
    config: Config, data: DataConfig, *, folder: RunFolder, start: SavedStart | None
) -> tuple[Config, OpenedData]:
    """Open the datasets of a data section; returns the configuration with the recorded blend.

    Args:
        config: configuration of the run.
        data: its data section, with the quick-start corpus if that is used.
        folder: run folder, where `nanotrain data mix` records a changed blend.
        start: checkpoint that the run starts from.
    """
    assert config.model.vocab_size, "set by _with_vocabulary"
    build = partial(build_data, vocab_size=config.model.vocab_size, seed=config.train.seed)
    required = {"train", "valid"} if config.validates else {"train"}
    datasets = build(data, required=required)
    settings = order_settings(config)
    origin = _origin(config, datasets, settings=settings, start=start)
    first = 0 if origin is None else origin.sample
    stages = _saved_stages(config.data, start, origin=origin)
    mixed = with_recorded_mix(config.data, folder.path, saved=stages, origin=first)
    if mixed is not config.data:  # validation keeps the corpora of the command line
        config = replace(config, data=mixed)
        datasets = replace(datasets, train=build(mixed, required={"train"}).train)
    return config, OpenedData(datasets, settings, origin)


def _saved_stages(
    data: DataConfig, start: SavedStart | None, *, origin: DataOrigin | None
) -> Sequence[str]:
    """The stages of `nanotrain data mix` in the checkpoint, if its data goes on unchanged."""
    if start is None or uses_quickstart(data):
        return []
    before = None if start.record is None else start.record.origin
    return start.stages if origin == before else []


def _origin(
    config: Config,
    datasets: DatasetSplits,
    *,
    settings: Mapping[str, Any],
    start: SavedStart | None,
) -> DataOrigin | None:
    """Where the training samples begin: changed data goes on where the checkpoint stopped.

    Raises:
        DataError: samples would be read again or left out, and that is not allowed.
    """
    if start is None or not corpora_of(datasets.train):
        return None
    record = start.record
    before = config_from_dict(start.config)
    if record is None and _is_imported(before.data):
        log.info("the samples are those of this run's corpora, in nanotrain's order")
        return None
    if record is None and settings != order_settings(before):
        record = _rebuilt_record(start, is_required=not config.checkpoint.allow_data_changes)
    if record is None:
        return None
    if start.step >= config.train.train_iters:
        return record.origin
    if settings == record.settings:
        _log_changed_batches(config, start, sample=record.sample)
        return record.origin
    fingerprints = {old.prefix: old.fingerprint for old in record.corpora}
    require_same_corpora(datasets.train, fingerprints)
    changed = go_on(
        record,
        datasets,
        settings=settings,
        validates=config.validates,
        is_allowed=config.checkpoint.allow_data_changes,
    )
    settings_text = "; ".join(changed_order(record.settings, settings))
    log.info("the data changed since %s (%s):", start.name, settings_text)
    for line in changed.lines:
        log.info("  %s", line)
    return changed.origin


def _is_imported(data: DataConfig) -> bool:
    """Whether the data section of a checkpoint is of another program: it names no samples.

    A run of ours has a corpus, random tokens, or the quick-start corpus.
    """
    return uses_quickstart(data) and not data.quickstart


def _rebuilt_record(start: SavedStart, *, is_required: bool) -> DataRecord | None:
    """The record of a checkpoint of an older version, from its configuration and its corpora.

    None for random tokens, and where the corpora cannot be opened and that is allowed.

    Raises:
        DataError: the corpora cannot be opened.
    """
    config = config_from_dict(start.config)
    number = partial(_counter, start.counters)
    order = OrderStart(
        step=start.step,
        consumed_samples=number("consumed_samples"),
        skipped_samples=number("skipped_samples"),
        curve_batch_size=number("curve_batch_size"),
        vocab_size=config.model.vocab_size or 1,
        config=config,
        opens_addresses=False,
    )
    try:
        samples = order.dataset
    except NanotrainError as error:
        if is_required:
            raise DataError(
                f"the data changed, and that of {start.name} cannot be opened",
                why=f"{error.what}: {error.why}; what was read of each corpus is unknown",
                fix="put it back, or go on with --allow-data-changes",
            ) from None
        log.info("%s: what was read of each corpus is unknown (%s)", start.name, error.what)
        return None
    if not corpora_of(samples):
        return None
    settings = order_settings(config)
    sample = order.consumed_samples + order.skipped_samples
    return record_of(samples, sample=sample, settings=settings, valid=(), origin=None)


def _counter(counters: Mapping[str, Any], name: str) -> int:
    """A counter of a checkpoint; 0 where it is not recorded."""
    return whole_number(counters.get(name, 0), name)


def _log_changed_batches(config: Config, start: SavedStart, *, sample: int) -> None:
    """Log that the same samples come in other batches or lengths."""
    before = unnest(start.config.get("train"))
    now = unnest(to_dict(config.train))
    changed = []
    for name in BATCH_SETTINGS:
        if name in before and now.get(name) is not None and now[name] != before[name]:
            changed.append(f"{name} {before[name]} -> {now[name]}")
    if changed:
        log.info(
            "the data goes on at sample %s, where %s stopped (%s): nothing is read again or left "
            "out",
            f"{sample:,}",
            start.name,
            "; ".join(changed),
        )
