"""From the data section of the configuration to datasets.

    build_data                          the dataset of every split
    addresses_of                        corpora in object storage
    starting_stages                     data stages at their samples in a run
    without_documents, read_document    documents that are left out
    corpora_of, fingerprints            the corpora of a split
    require_same_corpora                a checkpoint counts samples of the same corpora
    source_names                        names of the corpora of a blend

Everything here takes constant time for any size of the corpora and needs no device, so user
mistakes are found before any rank waits for another.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

from nanotrain.config.config import DataConfig
from nanotrain.config.data_stages import read_named, read_stages, stage_bounds
from nanotrain.data.batch import JoinedDatasets, SampleDataset
from nanotrain.data.blend import BlendedDataset, StageBlend
from nanotrain.data.checksums import is_same_corpus
from nanotrain.data.conversations import check_masks
from nanotrain.data.data_path import WeightedPrefix, parse_data_path, split_documents
from nanotrain.data.fim import FillInTheMiddle
from nanotrain.data.gpt import GPTDataset, SyntheticDataset
from nanotrain.data.indexed import IndexedTokens
from nanotrain.data.loss_weights import parse_loss_weights
from nanotrain.data.packing import PackedDataset
from nanotrain.data.remote import ChunkCache
from nanotrain.data.run_tokenizer import first_blend, tokenizer_of, uses_quickstart
from nanotrain.data.same_tokenizer import require_same_tokenizer
from nanotrain.errors import ConfigError, DataError, ErrorCollector
from nanotrain.quantities import count_of
from nanotrain.storage.remote import is_address
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
    # named validation sets, instead of `valid`
    valid_sets: Mapping[str, SampleDataset] = field(default_factory=dict)


def addresses_of(data: DataConfig) -> list[str]:
    """The addresses of corpora in object storage of a data section."""
    lists = (
        data.data_path,
        data.train_data_path,
        data.valid_data_path,
        data.test_data_path,
        data.stages,
    )
    words = " ".join(chain(*lists)).replace("=", " ").split()
    return [word for word in words if is_address(word)]


def named_corpora(data: DataConfig) -> list[WeightedPrefix]:
    """The corpora that the splits of a data section name; empty for random tokens."""
    if data.mock_data or uses_quickstart(data):
        return []
    named = _parse_named(data)
    if named:
        data = replace(data, valid_data_path=[])
    blends = [parse_data_path(_paths(data, name)) for name in SPLITS]
    return [*chain(*blends), *named.values()]


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
        ConfigError: blends that cannot be parsed, with all stages in one error; corpora of
            different tokenizers.
    """
    if data.mock_data:
        train, valid, test = [
            SyntheticDataset(vocab_size, data.seq_length, seed + split) for split in range(3)
        ]
        return DatasetSplits(train, valid, test)
    named = _parse_named(data)
    if named:
        data = replace(data, valid_data_path=[])
        required = set(required) - {"valid"}
    blends = [parse_data_path(_paths(data, name)) for name in SPLITS]
    entries = [*chain(*blends), *named.values()]
    require_same_tokenizer(entry.prefix for entry in entries)
    opener = _CorpusOpener(data, ChunkCache.of(data), vocab_size=vocab_size, seed=seed)
    built = {}
    for name, blend in zip(SPLITS, blends, strict=True):
        built[name] = _build_split(name, blend, opener=opener, is_required=name in required)
    if data.loss_weights:
        built["train"] = _with_loss_weights(built["train"], data)
    check_masks(data, [entry.prefix for entry in blends[0]])
    valid_sets: dict[str, SampleDataset] = {}
    for name, entry in named.items():
        dataset = opener.open_whole(entry.prefix)
        _check_samples("valid", [dataset], proportions=data.split)
        valid_sets[name] = dataset
    return DatasetSplits(**built, valid_sets=valid_sets)


def _build_split(
    name: str, blend: Sequence[WeightedPrefix], *, opener: "_CorpusOpener", is_required: bool
) -> SampleDataset | None:
    """The blend of the corpora of a split."""
    data = opener.data
    datasets = [opener.open_split(entry.prefix, SPLITS.index(name)) for entry in blend]
    if name == "train":
        datasets = opener.change_training(datasets)
    if is_required:
        _check_samples(name, datasets, proportions=data.split)
    if name == "train" and data.stages:
        return _blend_stages(datasets, data)
    return _blend(datasets, blend)


def _with_loss_weights(samples: SampleDataset | None, data: DataConfig) -> SampleDataset:
    """The training samples with the weights of their corpora in the loss."""
    names = source_names(samples) if samples is not None else ()
    weights = parse_loss_weights(data.loss_weights, names)
    assert isinstance(samples, BlendedDataset), "several names are those of a blend"
    return samples.with_loss_weights(weights)


def _parse_named(data: DataConfig) -> dict[str, WeightedPrefix]:
    """The corpus of every named validation set."""
    named = {}
    for name, path in read_named(data.valid_data_path).items():
        named[name] = parse_data_path([path])[0]
    return named


@dataclass(frozen=True)
class _CorpusOpener:
    """Opens corpora as datasets of one run."""

    data: DataConfig
    cache: ChunkCache | None
    vocab_size: int
    seed: int

    def open_split(self, prefix: Path, split: int) -> GPTDataset:
        """The documents of a corpus in a split; all if the split has its own corpora."""
        corpus = IndexedTokens(prefix, self.cache)
        documents = split_documents(corpus.num_documents, self.data.split)[split]
        if _has_own_splits(self.data):
            documents = range(corpus.num_documents)
        start = corpus.document_start(documents.start)
        return self._dataset(corpus, start, stop=corpus.document_start(documents.stop))

    def open_whole(self, prefix: Path) -> GPTDataset:
        """All tokens of a corpus."""
        corpus = IndexedTokens(prefix, self.cache)
        return self._dataset(corpus, 0, stop=corpus.num_tokens)

    def _dataset(self, corpus: IndexedTokens, start: int, *, stop: int) -> GPTDataset:
        packing = PACKINGS[self.data.packing]
        return packing(corpus, start, stop, self.data, vocab_size=self.vocab_size, seed=self.seed)

    def change_training(self, datasets: list[GPTDataset]) -> list[GPTDataset]:
        """The training datasets with gaps to fill, and without excluded documents."""
        data = self.data
        if data.fim_data:
            fim = FillInTheMiddle.of(
                data,
                tokenizer=tokenizer_of(data),
                vocab_size=self.vocab_size,
                seed=self.seed,
            )
            datasets = [replace(dataset, changes=(fim,)) for dataset in datasets]
        if data.exclude_documents:
            datasets = without_documents(datasets, Path(data.exclude_documents))
        return datasets


def without_documents(datasets: Sequence[GPTDataset], file: Path) -> list[GPTDataset]:
    """The datasets without the documents of a file.

    Args:
        datasets: datasets of the training split.
        file: one document per line, PREFIX:INDEX or JSON with corpus and document.

    Raises:
        DataError: a line of another form, or of a document that no corpus of the run has.
    """
    try:
        excluded = _read_excluded(file, [dataset.corpus for dataset in datasets])
    except (OSError, ValueError) as error:
        raise DataError(
            f"--exclude-documents {file} cannot be used",
            why=unreadable(error),
            fix="write one PREFIX:INDEX per line; `nanotrain data find --json` prints such lines",
        ) from None
    changed = []
    for dataset in datasets:
        documents = frozenset(excluded[dataset.corpus.prefix])
        changed.append(replace(dataset, excluded=documents))
    return changed


def _read_excluded(file: Path, corpora: Sequence[IndexedTokens]) -> dict[Path, set[int]]:
    """Documents to leave out, by the prefix of their corpus; ValueError for an unknown one."""
    sizes = {corpus.prefix: corpus.num_documents for corpus in corpora}
    excluded: dict[Path, set[int]] = {prefix: set() for prefix in sizes}
    for content in read_file(file).splitlines():  # of bytes: U+2028 may be part of a name
        line = content.decode()
        if not line.strip():
            continue
        prefix, document = read_document(line)
        if document >= sizes.get(prefix, 0):
            raise ValueError(f"{line} is no document of {', '.join(map(str, sizes))}")
        excluded[prefix].add(document)
    return excluded


def read_document(text: str) -> tuple[Path, int]:
    """The prefix of a corpus and the index of a document, from PREFIX:INDEX or JSON.

    Raises:
        ValueError: text of another form.

    >>> read_document("web:12"), read_document('{"corpus": "web", "document": 12}')[1]
    ((PosixPath('web'), 12), 12)
    """
    if text.startswith("{"):
        row = object_of(parse_json(text), "it")
        corpus = text_of(row.get("corpus"), "corpus")
        return Path(corpus), whole_number(row.get("document"), "document")
    prefix, _, number = text.strip().rpartition(":")
    if not prefix or not number.isdigit():
        raise ValueError(f"{shown(text)} is not PREFIX:INDEX")
    return Path(prefix), int(number)


def _paths(data: DataConfig, name: str) -> list[str]:
    """The blend of a split: its own, or the shared one; with stages, every corpus by size."""
    paths_by_split = {"valid": data.valid_data_path, "test": data.test_data_path}
    if name != "train" and _has_own_splits(data):
        return paths_by_split[name]
    if data.stages:
        entries = chain(*_stage_blends(data))
        return list(dict.fromkeys(str(entry.prefix) for entry in entries))
    assert first_blend(data), "the quick-start corpus is prepared before build_data"
    return first_blend(data)


def _has_own_splits(data: DataConfig) -> bool:
    """Whether every split has separate corpora, which are not divided."""
    return bool(data.train_data_path or data.valid_data_path)


def _stage_blends(data: DataConfig) -> list[tuple[WeightedPrefix, ...]]:
    """The blend of every stage; mistakes in any of them are raised as one error."""
    blends = []
    errors = ErrorCollector()
    for stage in read_stages(data.stages):
        with errors:
            try:
                blends.append(parse_data_path([stage.blend]))
            except ConfigError as error:
                what = f"stage {stage.name}: {error.what}"
                raise ConfigError(what, why=error.why, fix=error.fix) from None
    errors.raise_errors()
    return blends


def _blend_stages(datasets: Sequence[GPTDataset], data: DataConfig) -> BlendedDataset:
    """The blends of all stages over the corpora of `_paths`, without repetition."""
    indices = {dataset.corpus.prefix: index for index, dataset in enumerate(datasets)}
    stages = []
    for stage, blend in zip(read_stages(data.stages), _stage_blends(data), strict=True):
        weights: dict[int, Fraction] = {}
        for entry in blend:
            index = indices[entry.prefix]
            weight = _weight_of(entry, datasets[index])
            weights[index] = weights.get(index, Fraction(0)) + weight
        stages.append(
            StageBlend(stage.name, stage.start, tuple(weights), tuple(weights.values()), stage.end)
        )
    return BlendedDataset(datasets, stages)


def _weight_of(entry: WeightedPrefix, dataset: GPTDataset) -> Fraction:
    """The weight of a corpus in a blend; its size where none is given."""
    if entry.weight is None:
        return Fraction(dataset.samples_per_epoch)
    return entry.weight


def starting_stages(
    samples: SampleDataset, data: DataConfig, *, samples_of: Callable[[int], int]
) -> SampleDataset:
    """The training samples, with the stages of `data_stages` at their starts in a run.

    Args:
        samples: training split of `build_data`.
        data: data section.
        samples_of: number of samples in the first steps of the run.
    """
    stages = read_stages(data.stages)
    if not stages or not isinstance(samples, BlendedDataset):
        return samples
    return samples.starting_at(stage_bounds(stages, samples_of))


def _check_samples(name: str, datasets: Sequence[GPTDataset], *, proportions: str) -> None:
    """Check that a split has samples, and token ids in the vocabulary."""
    if not datasets:
        fix = f"set --{name}-data-path"
        if name == "valid":
            fix += ", or turn validation off with --eval-interval 0"
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
    """The error for a split whose tokens do not fill one sample."""
    corpus = dataset.corpus
    num_tokens = dataset.stop - dataset.start
    why = f"a sample needs seq_length + 1 = {dataset.config.seq_length + 1}"
    cures = ["give a longer corpus"]
    if num_tokens < corpus.num_tokens:
        documents = count_of(corpus.num_documents, "document")
        all_tokens = count_of(corpus.num_tokens, "token")
        why += f"; --split {proportions} divides the corpus's {documents} ({all_tokens})"
        cures = [f"give {name} a larger share of --split"]
        if corpus.num_documents == 1:  # one document is not divided
            cures = ["prepare the text as several documents"]
    if name == "valid":
        cures.append("turn validation off with --eval-interval 0")
    if num_tokens > 1:
        cures.append("lower --seq-length")
    tokens = count_of(num_tokens, "token")
    return DataError(
        f"the {name} split of {corpus.prefix} has {tokens}, too few for one sample",
        why=why,
        fix=", or ".join(cures),
    )


def _blend(
    datasets: Sequence[GPTDataset], entries: Sequence[WeightedPrefix]
) -> SampleDataset | None:
    """Blend the datasets that have samples, by weight or by size."""
    filled = []
    weights = []
    for dataset, entry in zip(datasets, entries, strict=True):
        if dataset.samples_per_epoch:
            filled.append(dataset)
            weights.append(_weight_of(entry, dataset))
    if not filled:
        return None
    if len(filled) == 1:
        return filled[0]
    return BlendedDataset.by_weight(filled, weights)


def corpora_of(samples: SampleDataset | None) -> tuple[GPTDataset, ...]:
    """The corpora of a split; empty for random tokens."""
    parts = samples.datasets if isinstance(samples, JoinedDatasets) else (samples,)
    return tuple(part for part in parts if isinstance(part, GPTDataset))


def fingerprints(samples: SampleDataset | None) -> dict[str, str]:
    """The fingerprint of every corpus of a split, by prefix."""
    return {str(part.corpus.prefix): part.corpus.fingerprint for part in corpora_of(samples)}


def unchecked_files(samples: SampleDataset | None) -> list[str]:
    """The files of the corpora of a split that have no checksums."""
    names = []
    for part in corpora_of(samples):
        folder = part.corpus.prefix.parent
        names += [str(folder / name) for name in part.corpus.unchecked]
    return names


def require_same_corpora(samples: SampleDataset | None, saved: Mapping[str, Any]) -> None:
    """Check that every corpus is still the one that a checkpoint was written with.

    Args:
        samples: training split of the run.
        saved: `fingerprints` in the checkpoint.

    Raises:
        DataError: another corpus has the name of one that the checkpoint counts samples of.
    """
    for prefix, now in fingerprints(samples).items():
        if not is_same_corpus(str(saved.get(prefix, now)), now):
            raise DataError(
                f"{prefix} is not the corpus that the run has read",
                why=f"its fingerprint is {now}, in the checkpoint it is {saved[prefix]}",
                fix=(
                    "restore it, give the new corpus another name, "
                    "or start at its beginning with --finetune"
                ),
            )


def source_names(dataset: SampleDataset) -> tuple[str, ...]:
    """One name per corpus, in the order of `source_of`; () if not a blend.

    The names are the shortest endings of the paths that differ.
    """
    if not isinstance(dataset, BlendedDataset):
        return ()
    paths: list[tuple[str, ...]] = []
    for index, part in enumerate(dataset.datasets):
        if isinstance(part, GPTDataset):
            paths.append(part.corpus.prefix.parts)
        else:
            paths.append(("source", str(index)))
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(path[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return tuple(names)
    return tuple(f"{name} ({index})" for index, name in enumerate(names))  # one corpus twice
