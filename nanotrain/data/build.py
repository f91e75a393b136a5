"""From the data section of the configuration to datasets.

Everything here takes constant time for any size of the corpora and needs no device, so user
mistakes are found before any rank waits for another.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from nanotrain.config.config import DataConfig
from nanotrain.config.notation import read_named, read_stages, stage_bounds
from nanotrain.data.batch import SampleDataset
from nanotrain.data.blend import BlendedDataset, StageBlend
from nanotrain.data.corpus_info import recorded_tokenizer, require_same_tokenizer
from nanotrain.data.data_path import WeightedPrefix, parse_data_path, split_documents
from nanotrain.data.fim import FillInTheMiddle
from nanotrain.data.gpt import GPTDataset, SyntheticDataset
from nanotrain.data.indexed import IndexedTokens
from nanotrain.data.packing import PackedDataset
from nanotrain.data.remote import ChunkCache
from nanotrain.errors import ConfigError, DataError, ErrorCollector
from nanotrain.quantities import count_of
from nanotrain.untrusted import (
    object_of,
    parse_json,
    read_file,
    shown,
    text_of,
    unreadable,
    whole_number,
)

SPLITS = ("train", "valid", "test")
PACKINGS: dict[str, type[GPTDataset]] = {"stream": GPTDataset, "best_fit": PackedDataset}


@dataclass(frozen=True)
class DatasetSplits:
    """The datasets for training, validation and test; None for an empty split."""

    train: SampleDataset | None
    valid: SampleDataset | None
    test: SampleDataset | None
    # named ones, instead of `valid`
    valid_sets: Mapping[str, SampleDataset] = field(default_factory=dict)


def uses_quickstart(data: DataConfig) -> bool:
    """Whether a run reads the quick-start corpus, which has to be prepared first."""
    return not first_blend(data) and not data.mock_data


def first_blend(data: DataConfig) -> list[str]:
    """The blend that training begins with, as `parse_data_path` takes it; empty where no corpus is
    set.
    """
    stages = read_stages(data.stages)
    return [stages[0].blend] if stages else data.data_path or data.train_data_path


def tokenizer_of(data: DataConfig) -> str | None:
    """The tokenizer of a run, as `load_tokenizer` takes it: from the data section, else from the
    first corpus.
    """
    if data.vocab_file and data.merge_file:
        return f"{data.vocab_file},{data.merge_file}"
    paths = first_blend(data)
    if data.tokenizer_model or data.mock_data or not paths:
        return data.tokenizer_model
    return recorded_tokenizer(parse_data_path(paths)[0].prefix)


def build_data(
    data: DataConfig, *, vocab_size: int, seed: int, required: Collection[str] = ("train", "valid")
) -> DatasetSplits:
    """Open the corpora and build the dataset of every split.

    Args:
        data: the data section; the quick-start corpus is prepared already. With `data_stages` the
            starts in the training split are as configured, in steps or samples; see
            `starting_stages`.
        vocab_size: token ids must be in [0, vocab_size).
        seed: key of the shuffle.
        required: splits that must have samples; the others may be None.

    Raises:
        DataError: a corpus that cannot be read, has ids outside the vocabulary (first sample), or
            too few tokens.
        ConfigError: blends that cannot be parsed, those of all stages in one error; corpora of
            different tokenizers.
    """
    if data.mock_data:
        train, valid, test = (
            SyntheticDataset(vocab_size, data.seq_length, seed + split) for split in range(3)
        )
        return DatasetSplits(train, valid, test)
    named = {
        name: parse_data_path([path]) for name, path in read_named(data.valid_data_path).items()
    }
    if named:
        data, required = replace(data, valid_data_path=[]), {*required} - {"valid"}
    parsed = [parse_data_path(_paths(data, name)) for name in SPLITS]
    require_same_tokenizer(
        entry.prefix for prefixes in (*parsed, *named.values()) for entry in prefixes
    )
    cache, built = ChunkCache.of(data), dict[str, SampleDataset | None]()
    for split, name in enumerate(SPLITS):
        prefixes = parsed[split]
        datasets = [
            _dataset(
                IndexedTokens(entry.prefix, cache),
                data,
                split=split,
                vocab_size=vocab_size,
                seed=seed,
            )
            for entry in prefixes
        ]
        if name == "train" and data.fim_data:
            fim = FillInTheMiddle.of(
                data, tokenizer=tokenizer_of(data), vocab_size=vocab_size, seed=seed
            )
            datasets = [replace(dataset, changes=(fim,)) for dataset in datasets]
        if name == "train" and data.exclude_documents:
            datasets = without_documents(datasets, Path(data.exclude_documents))
        if name in required:
            _check_samples(name, datasets, proportions=data.split)
        is_staged = data.stages and name == "train"
        built[name] = _stage(datasets, data) if is_staged else _blend(datasets, prefixes)
    valid_sets: dict[str, SampleDataset] = {}
    for name, (entry, *_) in named.items():
        corpus = IndexedTokens(entry.prefix, cache)
        dataset = PACKINGS[data.packing](
            corpus, 0, corpus.num_tokens, data, vocab_size=vocab_size, seed=seed
        )
        _check_samples("valid", [dataset], proportions=data.split)
        valid_sets[name] = dataset
    return DatasetSplits(**built, valid_sets=valid_sets)


def without_documents(datasets: Sequence[GPTDataset], file: Path) -> list[GPTDataset]:
    """The datasets without the documents of a file: a line is PREFIX:INDEX, or JSON with corpus and
    document.

    Raises:
        DataError: a line of another form, or of a document that no corpus of the run has.
    """
    excluded: dict[Path, set[int]] = {dataset.corpus.prefix: set() for dataset in datasets}
    sizes = {dataset.corpus.prefix: dataset.corpus.num_documents for dataset in datasets}
    try:
        for line in read_file(file).decode().splitlines():
            if line.strip():
                prefix, document = read_document(line)
                if document >= sizes.get(prefix, 0):
                    raise ValueError(f"{line} is no document of {', '.join(map(str, sizes))}")
                excluded[prefix].add(document)
    except (OSError, ValueError) as error:
        fix = "write one PREFIX:INDEX per line; `nanotrain data find --json` prints such lines"
        raise DataError(
            f"--exclude-documents {file} cannot be used", why=unreadable(error), fix=fix
        ) from None
    return [
        replace(dataset, excluded=frozenset(excluded[dataset.corpus.prefix]))
        for dataset in datasets
    ]


def read_document(text: str) -> tuple[Path, int]:
    """The prefix of a corpus and the index of a document in it, from PREFIX:INDEX or JSON.

    Raises:
        ValueError: text of another form.

    >>> read_document("web:12"), read_document('{"corpus": "web", "document": 12}')[1]
    ((PosixPath('web'), 12), 12)
    """
    if text.startswith("{"):
        row = object_of(parse_json(text), "it")
        return Path(text_of(row.get("corpus"), "corpus")), whole_number(
            row.get("document"), "document"
        )
    prefix, _, number = text.strip().rpartition(":")
    if not prefix or not number.isdigit():
        raise ValueError(f"{shown(text)} is not PREFIX:INDEX")
    return Path(prefix), int(number)


def _paths(data: DataConfig, name: str) -> list[str]:
    """The blend of a split: its own, or the one that all splits share; with stages, every corpus
    blended by size.
    """
    own = {"valid": data.valid_data_path, "test": data.test_data_path}
    if name != "train" and _has_own_splits(data):
        return own[name]
    if data.stages:
        return list(
            dict.fromkeys(str(entry.prefix) for blend in _stage_blends(data) for entry in blend)
        )
    assert first_blend(data), "the quick-start corpus is prepared before build_data"
    return first_blend(data)


def _has_own_splits(data: DataConfig) -> bool:
    """Whether every split has corpora of its own, which are not divided."""
    return bool(data.train_data_path or data.valid_data_path)


def _stage_blends(data: DataConfig) -> list[tuple[WeightedPrefix, ...]]:
    """The blend of every stage; mistakes in any of them are raised as one error."""
    blends, errors = [], ErrorCollector()
    for stage in read_stages(data.stages):
        with errors:
            try:
                blends.append(parse_data_path([stage.blend]))
            except ConfigError as error:
                raise ConfigError(
                    f"stage {stage.name}: {error.what}", why=error.why, fix=error.fix
                ) from None
    errors.raise_errors()
    return blends


def _stage(datasets: Sequence[GPTDataset], data: DataConfig) -> BlendedDataset:
    """The blends of all stages over the corpora of `_paths`, each corpus once."""
    indices = {dataset.corpus.prefix: index for index, dataset in enumerate(datasets)}
    stages = []
    for stage, blend in zip(read_stages(data.stages), _stage_blends(data), strict=True):
        weights: dict[int, Fraction] = {}
        for entry in blend:
            index = indices[entry.prefix]
            weight = (
                Fraction(datasets[index].samples_per_epoch)
                if entry.weight is None
                else entry.weight
            )
            weights[index] = weights.get(index, Fraction(0)) + weight
        stages.append(
            StageBlend(stage.name, stage.start, tuple(weights), tuple(weights.values()), stage.end)
        )
    return BlendedDataset(datasets, stages)


def starting_stages(
    samples: SampleDataset, data: DataConfig, *, samples_of: Callable[[int], int]
) -> SampleDataset:
    """The training samples with the stages of `data_stages` at the samples where they start in a
    run.

    Args:
        samples: training split of `build_data`.
        data: data section.
        samples_of: number of samples in the first steps of the run.
    """
    stages = read_stages(data.stages)
    if not (stages and isinstance(samples, BlendedDataset)):
        return samples
    return samples.starting_at(stage_bounds(stages, samples_of))


def _dataset(
    corpus: IndexedTokens, data: DataConfig, *, split: int, vocab_size: int, seed: int
) -> GPTDataset:
    """The part of a corpus that belongs to a split; all of it if the split has its own corpora."""
    documents = split_documents(corpus.num_documents, data.split)[split]
    if _has_own_splits(data):
        documents = range(corpus.num_documents)
    start, stop = corpus.document_start(documents.start), corpus.document_start(documents.stop)
    return PACKINGS[data.packing](corpus, start, stop, data, vocab_size=vocab_size, seed=seed)


def _check_samples(name: str, datasets: Sequence[GPTDataset], *, proportions: str) -> None:
    if not datasets:
        fix = f"set --{name}-data-path" + (
            ", or turn validation off with --eval-interval 0" if name == "valid" else ""
        )
        raise DataError(
            f"the {name} split has no corpus",
            why="with --train-data-path each split has its own",
            fix=fix,
        )
    for dataset in datasets:
        if dataset.samples_per_epoch == 0:
            raise _too_few_tokens(name, dataset, proportions=proportions)
        dataset[0]  # reads one window: most vocabulary mistakes show in it


def _too_few_tokens(name: str, dataset: GPTDataset, *, proportions: str) -> DataError:
    corpus, tokens = dataset.corpus, dataset.stop - dataset.start
    why = f"a sample needs seq_length + 1 = {dataset.config.seq_length + 1}"
    cures = ["give a longer corpus"]
    if tokens < corpus.num_tokens:
        documents = count_of(corpus.num_documents, "document")
        why = f"{why}; --split {proportions} divides the corpus's {documents} ({count_of(corpus.num_tokens, 'token')})"
        several = "prepare the text as several documents"  # one is not divided
        cures = [several if corpus.num_documents == 1 else f"give {name} a larger share of --split"]
    cures += ["turn validation off with --eval-interval 0"] if name == "valid" else []
    cures += ["lower --seq-length"] if tokens > 1 else []
    return DataError(
        f"the {name} split of {corpus.prefix} has {count_of(tokens, 'token')}, too few for one sample",
        why=why,
        fix=", or ".join(cures),
    )


def _blend(
    datasets: Sequence[GPTDataset], prefixes: Sequence[WeightedPrefix]
) -> SampleDataset | None:
    """Blend the datasets that have samples, by weight or by size."""
    filled = [
        (dataset, entry)
        for dataset, entry in zip(datasets, prefixes, strict=True)
        if dataset.samples_per_epoch
    ]
    if len(filled) <= 1:
        return filled[0][0] if filled else None
    weights = [
        entry.weight if entry.weight is not None else Fraction(dataset.samples_per_epoch)
        for dataset, entry in filled
    ]
    return BlendedDataset.by_weight([dataset for dataset, _ in filled], weights)


def corpora_of(samples: SampleDataset | None) -> tuple[GPTDataset, ...]:
    """The corpora of a split; empty for random tokens."""
    parts = samples.datasets if isinstance(samples, BlendedDataset) else (samples,)
    return tuple(part for part in parts if isinstance(part, GPTDataset))


def fingerprints(samples: SampleDataset | None) -> dict[str, str]:
    """By prefix, the fingerprint of every corpus of a split."""
    return {str(part.corpus.prefix): part.corpus.fingerprint for part in corpora_of(samples)}


def require_same_corpora(samples: SampleDataset | None, saved: Mapping[str, Any]) -> None:
    """Check that no corpus was replaced by another of the same name since a checkpoint was written.

    Args:
        samples: training split of the run.
        saved: `fingerprints` in the checkpoint.

    Raises:
        DataError: one was: its samples would be others than those that the checkpoint counts.
    """
    for prefix, now in fingerprints(samples).items():
        if saved.get(prefix, now) != now:
            raise DataError(
                f"{prefix} is not the corpus that the run has read",
                why=f"its fingerprint is {now}, in the checkpoint it is {saved[prefix]}",
                fix="restore it, give the new corpus another name, or start at its beginning with --finetune",
            )


def source_names(dataset: SampleDataset) -> tuple[str, ...]:
    """One name per corpus, in the order of `source_of`: the shortest path endings that differ; ()
    if not a blend.
    """
    if not isinstance(dataset, BlendedDataset):
        return ()
    paths = [
        part.corpus.prefix if isinstance(part, GPTDataset) else None for part in dataset.datasets
    ]
    parts = [
        ("source", str(index)) if path is None else path.parts for index, path in enumerate(paths)
    ]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return tuple(names)
    return tuple(f"{name} ({index})" for index, name in enumerate(names))  # one corpus twice
