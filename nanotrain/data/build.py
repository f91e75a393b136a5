"""From the data section to samples: the one place that knows which dataset is made for which setting.

Everything here is O(1) in the size of the corpora and needs no device, so that mistakes show before any rank waits.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction

from nanotrain.config.config import DataConfig
from nanotrain.data.batch import SampleDataset
from nanotrain.data.blend import BlendedDataset
from nanotrain.data.gpt import GPTDataset, WindowOptions
from nanotrain.data.indexed import IndexedTokens
from nanotrain.data.sources import Source, parse_data_path, tokenizer_beside
from nanotrain.data.split import DocumentRange, split_documents
from nanotrain.data.synthetic import SyntheticDataset
from nanotrain.errors import DataError
from nanotrain.log import get_logger

log = get_logger(__name__)
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class DatasetSplits:
    """Samples for training, validation and test; None where the split has none."""

    train: SampleDataset | None
    valid: SampleDataset | None
    test: SampleDataset | None


def uses_quickstart(data: DataConfig) -> bool:
    """Whether a run reads the quick-start corpus, which has to be prepared first."""
    return not data.data_path and not data.mock_data


def tokenizer_of(data: DataConfig) -> str | None:
    """The tokenizer of a run, in a form `load_tokenizer` takes: the one asked for, or that of the first corpus."""
    if data.tokenizer_model or data.mock_data or not data.data_path:
        return data.tokenizer_model
    return tokenizer_beside(parse_data_path(data.data_path)[0].prefix)


def build_data(
    data: DataConfig, *, vocab_size: int, seed: int, required: Collection[str] = ("train", "valid")
) -> DatasetSplits:
    """Open the corpora and cut them into samples.

    Args:
        data: the data section; where it uses the quick-start corpus, `data_path` already names it.
        vocab_size: token ids must lie in [0, vocab_size).
        seed: key of the order of samples.
        required: splits that must have samples; the others may be None.

    Raises:
        DataError: a corpus that cannot be read, has ids outside the vocabulary (first sample), or too few tokens.
    """
    if data.mock_data:
        return DatasetSplits(*(SyntheticDataset(vocab_size, data.seq_length, seed + place) for place in range(3)))
    options = WindowOptions(
        seq_length=data.seq_length,
        vocab_size=vocab_size,
        seed=seed,
        shuffle=data.shuffle,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
    )
    sources = parse_data_path(data.data_path)
    assert sources, "build_data was called before the quick-start corpus had a path"
    corpora = [IndexedTokens(source.prefix) for source in sources]
    ranges = [split_documents(corpus.num_documents, data.split) for corpus in corpora]
    built: dict[str, SampleDataset | None] = {}
    for place, name in enumerate(SPLITS):
        parts = [
            _windows(corpus, documents[place], options=options)
            for corpus, documents in zip(corpora, ranges, strict=True)
        ]
        if name in required:
            _check_samples(name, parts, split=data.split)
            for part in parts:
                part[0]  # reads one window: most vocabulary mistakes show in it
        built[name] = _blend(parts, sources)
    return DatasetSplits(**built)


def _windows(corpus: IndexedTokens, documents: DocumentRange, *, options: WindowOptions) -> GPTDataset:
    start, stop = corpus.document_start(documents.start), corpus.document_start(documents.stop)
    return GPTDataset(corpus, start, stop, options)


def _check_samples(name: str, parts: Sequence[GPTDataset], *, split: str) -> None:
    for part in parts:
        tokens, seq_length = part.stop - part.start, part.options.seq_length
        if part.samples_per_epoch == 0:
            raise DataError(
                f"the {name} split of {part.corpus.prefix} has {tokens} tokens, too few for one sample",
                why=f"a sample needs seq_length + 1 = {seq_length + 1}; --split {split} divides the corpus's "
                f"{part.corpus.num_documents} documents ({part.corpus.num_tokens} tokens)",
                fix=f"give {name} a larger share of --split, "
                + ("turn validation off with --eval-interval 0, " if name == "valid" else "")
                + "or lower --seq-length",
            )


def _blend(parts: Sequence[GPTDataset], sources: Sequence[Source]) -> SampleDataset | None:
    kept = [(part, source) for part, source in zip(parts, sources, strict=True) if part.samples_per_epoch]
    if not kept:
        return None
    if len(kept) == 1:
        return kept[0][0]
    weights = [
        source.weight if source.weight is not None else Fraction(part.samples_per_epoch) for part, source in kept
    ]
    return BlendedDataset([part for part, _ in kept], weights)
