"""From the data section of the configuration to datasets.

Everything here is O(1) in the size of the corpora and needs no device, so user mistakes are found before any rank
waits for another.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction

from nanotrain.config.config import DataConfig
from nanotrain.data.batch import SampleDataset
from nanotrain.data.blend import BlendedDataset
from nanotrain.data.corpus_info import recorded_tokenizer
from nanotrain.data.data_path import WeightedPrefix, parse_data_path
from nanotrain.data.gpt import GPTDataset, GPTDatasetConfig
from nanotrain.data.indexed import IndexedTokens
from nanotrain.data.split import split_documents
from nanotrain.data.synthetic import SyntheticDataset
from nanotrain.errors import DataError

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class DatasetSplits:
    """The datasets for training, validation and test; None for an empty split."""

    train: SampleDataset | None
    valid: SampleDataset | None
    test: SampleDataset | None


def uses_quickstart(data: DataConfig) -> bool:
    """Whether a run reads the quick-start corpus, which has to be prepared first."""
    return not data.data_path and not data.train_data_path and not data.mock_data


def tokenizer_of(data: DataConfig) -> str | None:
    """The tokenizer of a run, as `load_tokenizer` takes it: of the data section, or that of the first corpus."""
    if data.vocab_file and data.merge_file:
        return f"{data.vocab_file},{data.merge_file}"
    paths = data.data_path or data.train_data_path
    if data.tokenizer_model or data.mock_data or not paths:
        return data.tokenizer_model
    return recorded_tokenizer(parse_data_path(paths)[0].prefix)


def build_data(
    data: DataConfig, *, vocab_size: int, seed: int, required: Collection[str] = ("train", "valid")
) -> DatasetSplits:
    """Open the corpora and build the dataset of every split.

    Args:
        data: the data section; `data_path` or `train_data_path` is set, also for the quick-start corpus.
        vocab_size: token ids must be in [0, vocab_size).
        seed: key of the shuffle.
        required: splits that must have samples; the others may be None.

    Raises:
        DataError: a corpus that cannot be read, has ids outside the vocabulary (first sample), or too few tokens.
    """
    if data.mock_data:
        return DatasetSplits(*(SyntheticDataset(vocab_size, data.seq_length, seed + split) for split in range(3)))
    config = GPTDatasetConfig(
        seq_length=data.seq_length,
        vocab_size=vocab_size,
        seed=seed,
        shuffle=data.shuffle,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
    )
    built: dict[str, SampleDataset | None] = {}
    for split, name in enumerate(SPLITS):
        prefixes = _prefixes(data, name)
        datasets = [_dataset(IndexedTokens(entry.prefix), data, split=split, config=config) for entry in prefixes]
        if name in required:
            _check_samples(name, datasets, proportions=data.split)
            for dataset in datasets:
                dataset[0]  # reads one window: most vocabulary mistakes show in it
        built[name] = _blend(datasets, prefixes)
    return DatasetSplits(**built)


def _prefixes(data: DataConfig, name: str) -> tuple[WeightedPrefix, ...]:
    """The corpora of a split: its own, or those that all splits share."""
    own = {"train": data.train_data_path, "valid": data.valid_data_path, "test": data.test_data_path}
    prefixes = parse_data_path(own[name] if data.train_data_path else data.data_path)
    assert prefixes or data.train_data_path, "the quick-start corpus is prepared before build_data"
    return prefixes


def _dataset(corpus: IndexedTokens, data: DataConfig, *, split: int, config: GPTDatasetConfig) -> GPTDataset:
    """The part of a corpus that belongs to a split: all of it where the split has its own corpora."""
    documents = split_documents(corpus.num_documents, data.split)[split]
    if data.train_data_path:
        documents = range(corpus.num_documents)
    start, stop = corpus.document_start(documents.start), corpus.document_start(documents.stop)
    return GPTDataset(corpus, start, stop, config)


def _check_samples(name: str, datasets: Sequence[GPTDataset], *, proportions: str) -> None:
    if not datasets:
        fix = f"set --{name}-data-path" + (", or turn validation off with --eval-interval 0" if name == "valid" else "")
        raise DataError(f"the {name} split has no corpus", why="with --train-data-path each split has its own", fix=fix)
    for dataset in datasets:
        tokens, seq_length = dataset.stop - dataset.start, dataset.config.seq_length
        if dataset.samples_per_epoch == 0:
            raise DataError(
                f"the {name} split of {dataset.corpus.prefix} has {tokens} tokens, too few for one sample",
                why=f"a sample needs seq_length + 1 = {seq_length + 1}; --split {proportions} divides the corpus's "
                f"{dataset.corpus.num_documents} documents ({dataset.corpus.num_tokens} tokens)",
                fix=f"give {name} a larger share of --split, "
                + ("turn validation off with --eval-interval 0, " if name == "valid" else "")
                + "or lower --seq-length",
            )


def _blend(datasets: Sequence[GPTDataset], prefixes: Sequence[WeightedPrefix]) -> SampleDataset | None:
    """Blend the datasets that have samples, by weight or by size."""
    filled = [(dataset, entry) for dataset, entry in zip(datasets, prefixes, strict=True) if dataset.samples_per_epoch]
    if len(filled) <= 1:
        return filled[0][0] if filled else None
    weights = [
        entry.weight if entry.weight is not None else Fraction(dataset.samples_per_epoch) for dataset, entry in filled
    ]
    return BlendedDataset([dataset for dataset, _ in filled], weights)
