"""Change the blend of a running job: `nanotrain data mix RUN --weights 0.5 web 0.5 math`.

    RUN/data-mix.request   what is asked for; the job removes it at a logged step
    RUN/data-mix.jsonl     what was done: the step, and all stages of the run, starts in samples

The change is a further stage of the data, so the samples after it follow from their index as all
others do, on any layout, and a resume reads the stages from the file. A request is recorded, then
removed: a kill in between loses nothing, as the record has the number of the request.

    read_request, is_recorded, record_mix, remove_request   the life of a request, in this order
    with_mix, stages_of                                     the samples, and their stages as text
    recorded_stages, with_recorded_mix                      at the next start
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from nanotrain.config.config import DataConfig
from nanotrain.config.data_stages import read_stages
from nanotrain.data.batch import SampleDataset
from nanotrain.data.blend import BlendedDataset, StageBlend
from nanotrain.data.build import addresses_of, corpora_of
from nanotrain.data.data_path import parse_data_path
from nanotrain.data.gpt import GPTDataset
from nanotrain.data.run_tokenizer import first_blend
from nanotrain.errors import ConfigError, DataError
from nanotrain.log import get_logger
from nanotrain.runs.files import disk_errors, open_append, write_all
from nanotrain.runs.request import read_request_file, write_request
from nanotrain.storage.remote import redacted
from nanotrain.untrusted import (
    list_of,
    read_rows,
    text_of,
    whole_number,
)

log = get_logger(__name__)
REQUEST, DONE = "data-mix.request", "data-mix.jsonl"


def require_mixable(
    data: DataConfig, weights: Sequence[str], *, step: int | None, done: int, train_iters: int
) -> None:
    """Check that a job of the run can carry out a request.

    Args:
        data: data section of the newest start of the run.
        weights: weights and corpora, as for `--data-path`.
        step: the first step with them; None: the next one possible.
        done: steps that the run has trained.
        train_iters: steps of the run.

    Raises:
        DataError: the run is finished or has one corpus, or a weight names no corpus of the run.
    """
    first = done + 1 if step is None else step
    if done >= train_iters or first > train_iters:
        raise DataError(
            f"no step of the run can take the weights: step {done:,} of {train_iters:,} is done",
            why="a running job takes the request at a later step",
            fix="go on with a larger --train-iters and these weights as --data-path: a start may "
            "change the blend",
        )
    prefixes = sorted(_training_corpora(data))
    if len(prefixes) == 1:
        raise _one_corpus()
    for entry in parse_data_path(weights):
        if _find_corpus(entry.prefix, dict.fromkeys(prefixes, 0)) is None:
            raise _no_corpus(entry.prefix, prefixes)


def _one_corpus() -> DataError:
    return DataError(
        "the blend cannot be changed",
        why="the run has one corpus",
        fix="start it again with --data-path and the weights of all corpora: a start may change "
        "the blend",
    )


def _no_corpus(prefix: Path, known: Iterable[Path]) -> DataError:
    return DataError(
        f"{prefix} is no corpus of the run",
        why=f"the corpora of the run are {', '.join(map(str, known))}",
        fix="name one of them, or start the run again with --data-path and the weights of all "
        "corpora",
    )


@dataclass(frozen=True)
class MixRequest:
    """A request to change the blend.

    Args:
        weights: weights and corpora, as for `--data-path`.
        step: the first step with them; None: the next one possible.
        number: a random number, by which the record names it; empty for one of an older version.
    """

    weights: tuple[str, ...]
    step: int | None
    number: str


def request_mix(folder: Path, weights: Sequence[str], *, step: int | None) -> None:
    """Ask the job of a run to change its blend at a step; None: at the next one possible.

    Raises:
        ConfigError: weights that cannot be parsed.
    """
    if any(entry.weight is None for entry in parse_data_path(weights)):
        fix = "write for example --weights 0.5 web 0.5 math"
        raise ConfigError(
            f"--weights {' '.join(weights)}", why="every corpus has a weight before it", fix=fix
        )
    write_request(folder / REQUEST, {"weights": list(weights), "step": step})


def read_request(folder: Path) -> MixRequest | None:
    """The request in a run folder, where it stays; None without one.

    Raises:
        DataError: it cannot be read, and was removed.
    """
    return read_request_file(
        folder / REQUEST, _parse_request, error=DataError, command="nanotrain data mix"
    )


def _parse_request(body: Mapping[str, Any]) -> MixRequest:
    """The request in a file; ValueError for a wrong field."""
    weights = [text_of(word, "weights") for word in list_of(body.get("weights"), "weights")]
    step = body.get("step")
    if step is not None:
        step = whole_number(step, "step")
    return MixRequest(tuple(weights), step, text_of(body.get("number", ""), "number"))


def is_recorded(folder: Path, request: MixRequest) -> bool:
    """Whether a request was carried out, before a kill left it in the folder."""
    rows = read_rows(folder / DONE)
    return any(request.number and row.get("request") == request.number for row in rows)


def remove_request(folder: Path, request: MixRequest) -> None:
    """Remove a request, unless another has taken its place meanwhile."""
    if read_request(folder) == request:
        (folder / REQUEST).unlink(missing_ok=True)


def with_mix(dataset: SampleDataset, weights: Sequence[str], *, sample: int) -> BlendedDataset:
    """The training samples with other weights from a sample on, up to the next stage.

    Raises:
        DataError: the run has one corpus, a weight names no corpus of the run, or the weights are
            changing at that sample.
    """
    if not isinstance(dataset, BlendedDataset):
        raise _one_corpus()
    mixed = _mixed_weights(weights, corpora_of(dataset))
    stages = []
    for stage in dataset.stages:
        if stage.start == sample:
            continue
        if stage.end is not None and stage.start < sample < stage.end:
            raise DataError(
                f"the blend cannot be changed at sample {sample}",
                why=f"the weights change until sample {stage.end}",
                fix="name a later --step",
            )
        stages.append(replace(stage, name=stage.name or "start"))
    stages.append(StageBlend(f"mix-{len(stages)}", sample, tuple(mixed), tuple(mixed.values())))
    return dataset.with_stages(sorted(stages, key=lambda stage: stage.start))


def _mixed_weights(weights: Sequence[str], corpora: Sequence[GPTDataset]) -> dict[int, Fraction]:
    """The new weight of every corpus, by its number."""
    numbers = {part.corpus.prefix: index for index, part in enumerate(corpora)}
    mixed: dict[int, Fraction] = {}
    for entry in parse_data_path(weights):
        index = _find_corpus(entry.prefix, numbers)
        if index is None or entry.weight is None:
            raise _no_corpus(entry.prefix, numbers)
        mixed[index] = mixed.get(index, Fraction(0)) + entry.weight
    return mixed


def _find_corpus(name: Path, numbers: Mapping[Path, int]) -> int | None:
    """The number of a corpus by its prefix, or by the last part of it; None for an unknown name."""
    for prefix, number in numbers.items():
        if name in (prefix, Path(prefix.name)):
            return number
    return None


def stages_of(dataset: BlendedDataset) -> list[str]:
    """The stages of training samples as `--data-stages` takes them."""
    prefixes = [part.corpus.prefix for part in corpora_of(dataset)]
    texts = []
    for stage in dataset.stages:
        weights = zip(stage.sources, stage.weights, strict=True)
        blend = " ".join(f"{weight} {prefixes[source]}" for source, weight in weights)
        until = "" if stage.end is None else f"..{stage.end}"
        texts.append(f"{stage.name or 'start'}@{stage.start}{until}samples: {blend}")
    return texts


def record_mix(
    folder: Path, stages: Sequence[str], *, step: int, number: str = "", origin: int = 0
) -> None:
    """Append an applied request to a file that every later start of the run reads.

    Args:
        folder: run folder.
        stages: all stages of the run, as `stages_of` returns them.
        step: first step of the last stage.
        number: number of the request.
        origin: first sample of the data that was mixed. A resume with changed data has another
            origin, and does not read mixes of the data before.

    Raises:
        EnvironmentFault: the disk is full or the folder cannot be written.
    """
    row = {"step": step, "stages": list(stages), "request": number, "origin": origin}
    with open_append(folder / DONE) as file, disk_errors(folder / DONE):
        write_all(file, json.dumps(row).encode() + b"\n")
        os.fsync(file.fileno())


def recorded_stages(folder: Path, *, origin: int = 0) -> list[str]:
    """The stages of the last change in a run folder; empty without one.

    Args:
        folder: run folder.
        origin: first sample of the data; mixes of other data do not count.

    Raises:
        DataError: the last row has none.
    """
    last: Mapping[str, Any] = {"stages": []}
    for row in read_rows(folder / DONE):
        if row.get("origin", 0) == origin:
            last = row
    try:
        return [text_of(word, "stages") for word in list_of(last.get("stages"), "stages")]
    except ValueError as error:
        raise _unusable_request(folder / DONE, str(error)) from None


def with_recorded_mix(
    data: DataConfig, folder: Path, *, saved: Sequence[str] = (), origin: int = 0
) -> DataConfig:
    """The data section with the stages of the last change of a run, if there is one.

    Args:
        data: data section of the command line.
        folder: run folder.
        saved: the stages in the checkpoint that the run starts from, for a folder without a record.
        origin: first sample of the data; mixes of other data do not count.

    Raises:
        DataError: the last row has no stages, or they name an address that the section does not.
    """
    recorded = recorded_stages(folder, origin=origin)
    if not recorded and not saved:
        return data
    mixed = with_stages(data, recorded or saved)
    foreign = set(addresses_of(mixed)) - set(addresses_of(data))
    if foreign and recorded:
        why = f"it names {redacted(min(foreign))}, which the command line does not"
        raise _unusable_request(folder / DONE, why)
    if not recorded and _training_corpora(mixed) != _training_corpora(data):
        log.info(
            "the blend that `nanotrain data mix` gave the run of the checkpoint is left out: "
            "it is one of other corpora"
        )
        return data
    return mixed


def _training_corpora(data: DataConfig) -> set[Path]:
    """The prefixes of the training corpora."""
    blends = [[stage.blend] for stage in read_stages(data.stages)] or [first_blend(data)]
    return {entry.prefix for blend in blends for entry in parse_data_path(blend)}


def _unusable_request(file: Path, why: str) -> DataError:
    return DataError(
        f"{file} cannot be used",
        why=why,
        fix="restore it, or remove it to train on the blend of the command line",
    )


def with_stages(data: DataConfig, stages: Sequence[str]) -> DataConfig:
    """The data section with stages in place of its corpora.

    The corpora are divided by `split` only if they were before.
    """
    has_own_splits = bool(data.train_data_path or data.valid_data_path)
    return replace(
        data,
        stages=list(stages),
        data_path=[],
        train_data_path=[],
        split="1" if has_own_splits else data.split,
    )
