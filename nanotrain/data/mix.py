"""Change the blend of a running job: `nanotrain data mix RUN --weights 0.5 web 0.5 math`.

    RUN/data-mix.request   what is asked for; the job removes it at a logged step
    RUN/data-mix.jsonl     what was done: the step, and all stages of the run, starts in samples

The change is a further stage of the data, so the samples after it follow from their index as all
others do, on any layout, and a resume reads the stages from the file.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from nanotrain.config.config import DataConfig
from nanotrain.data.batch import SampleDataset
from nanotrain.data.blend import BlendedDataset, StageBlend
from nanotrain.data.build import addresses_of, corpora_of
from nanotrain.data.data_path import parse_data_path
from nanotrain.data.gpt import GPTDataset
from nanotrain.errors import ConfigError, DataError
from nanotrain.runs.files import disk_errors, open_append, write_all, write_text
from nanotrain.storage.remote import redacted
from nanotrain.untrusted import (
    list_of,
    object_of,
    parse_json,
    read_file,
    read_rows,
    text_of,
    whole_number,
)

REQUEST, DONE = "data-mix.request", "data-mix.jsonl"


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
    request = {"weights": list(weights), "step": step}
    write_text(folder / REQUEST, json.dumps(request) + "\n")


def take_request(folder: Path) -> dict[str, Any] | None:
    """The request in a run folder, which is removed; None without one.

    Raises:
        DataError: it cannot be read.
    """
    file = folder / REQUEST
    if not file.is_file():
        return None
    try:
        request = object_of(parse_json(read_file(file, follows_links=False)), "it")
        weights = [text_of(word, "weights") for word in list_of(request.get("weights"), "weights")]
        step = request.get("step")
        if step is not None:
            step = whole_number(step, "step")
        return {"weights": weights, "step": step}
    except (OSError, ValueError) as error:
        what = f"{file} cannot be read"
        raise DataError(what, why=str(error), fix="use `nanotrain data mix`") from None
    finally:
        file.unlink(missing_ok=True)


def with_mix(dataset: SampleDataset, weights: Sequence[str], *, sample: int) -> BlendedDataset:
    """The training samples with other weights from a sample on, up to the next stage.

    Raises:
        DataError: the run has one corpus, a weight names no corpus of the run, or the weights are
            changing at that sample.
    """
    if not isinstance(dataset, BlendedDataset):
        raise DataError(
            "the blend cannot be changed",
            why="the run has one corpus",
            fix="start it with all of them",
        )
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
    return BlendedDataset(dataset.datasets, sorted(stages, key=lambda stage: stage.start))


def _mixed_weights(weights: Sequence[str], corpora: Sequence[GPTDataset]) -> dict[int, Fraction]:
    """The new weight of every corpus, by its number."""
    numbers = {part.corpus.prefix: index for index, part in enumerate(corpora)}
    mixed: dict[int, Fraction] = {}
    for entry in parse_data_path(weights):
        index = _find_corpus(entry.prefix, numbers)
        if index is None or entry.weight is None:
            why = f"the corpora of the run are {', '.join(map(str, numbers))}"
            what = f"{entry.prefix} is no corpus of the run"
            raise DataError(what, why=why, fix="start a run with it")
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
        texts.append(f"{stage.name}@{stage.start}{until}samples: {blend}")
    return texts


def record_mix(folder: Path, stages: Sequence[str], *, step: int) -> None:
    """Append what was done, for every later start of the run.

    Raises:
        EnvironmentFault: the disk is full or the folder cannot be written.
    """
    row = json.dumps({"step": step, "stages": list(stages)})
    with open_append(folder / DONE) as file, disk_errors(folder / DONE):
        write_all(file, row.encode() + b"\n")


def with_recorded_mix(data: DataConfig, folder: Path) -> DataConfig:
    """The data section with the stages of the last change in a run folder, if there is one.

    Raises:
        DataError: the last row has no stages, or they name an address that the section does not.
    """
    last: Mapping[str, Any] = {"stages": []}
    for row in read_rows(folder / DONE):
        last = row
    try:
        words = list_of(last.get("stages"), "stages")
        mixed = with_stages(data, [text_of(word, "stages") for word in words])
        foreign = set(addresses_of(mixed)) - set(addresses_of(data))
        if foreign:
            raise ValueError(f"it names {redacted(min(foreign))}, which the command line does not")
    except ValueError as error:
        raise DataError(
            f"{folder / DONE} cannot be used",
            why=str(error),
            fix="restore it, or remove it to train on the blend of the command line",
        ) from None
    return mixed if mixed.stages else data


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
