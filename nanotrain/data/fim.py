"""Fill-in-the-middle (`--fim-data`): learn to write what is missing between two parts of a text.

    part of a document      p p p p m m m s s s s s E        E end-of-document
    PSM                     P p p p p S s s M m m m E        P, S, M sentinels before prefix,
    SPM (`--fim-spm-rate`)  P S s s M p p p p m m m E        suffix and middle

A part of a document in a sample keeps its position, length and end: the sentinels replace the
last tokens of the suffix. So positions, segments and the documents of a sample are those of plain
samples. Where a part goes on in the next sample, the label after the gap is no target. Corpora with
a loss mask, such as conversations, stay as they are.

Source: Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle",
sections 3 and 4.
"""

import hashlib
import struct
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from nanotrain.config.config import DataConfig
from nanotrain.data.batch import Sample
from nanotrain.data.gpt import GPTDataset
from nanotrain.data.tokenizer import FastTokenizer, load_with_files
from nanotrain.errors import ConfigError

_ONE = 1 << 64


@dataclass(frozen=True)
class FillInTheMiddle:
    """Rewrite parts of documents, as a pure function of seed, epoch and position in the corpus."""

    sentinels: tuple[int, int, int]  # ids before prefix, suffix and middle
    rate: float  # fraction of the parts that are rewritten
    spm_rate: float  # fraction of the rewritten parts that begin with the suffix
    seed: int

    @classmethod
    def of(cls, data: DataConfig, *, tokenizer: str | None, vocab_size: int, seed: int) -> Self:
        """Build the options from the data section.

        Args:
            data: data section.
            tokenizer: the tokenizer of the run, as `load_tokenizer` takes it; None if unknown.
            vocab_size: ids must be in [0, vocab_size).
            seed: key of all choices.

        Raises:
            ConfigError: a sentinel is no token.
        """
        names = {
            "prefix": data.fim_prefix_token,
            "suffix": data.fim_suffix_token,
            "middle": data.fim_middle_token,
        }
        vocabulary: dict[str, int] = {}
        if tokenizer is not None and not all(name.isdigit() for name in names.values()):
            vocabulary = _read_vocabulary(tokenizer)
        sentinels = []
        wrong = []
        for kind, name in names.items():
            token = int(name) if name.isdigit() else vocabulary.get(name, vocab_size)
            sentinels.append(token)
            if token >= vocab_size:
                wrong.append(f"--fim-{kind}-token {name}")
        if wrong:
            raise ConfigError(
                f"{', '.join(wrong)}: no token",
                why=(
                    f"the tokenizer is {tokenizer or 'unknown'}, "
                    f"and the model has the ids 0 to {vocab_size - 1}"
                ),
                fix="name special tokens of the tokenizer, or give unused ids",
            )
        prefix, suffix, middle = sentinels
        return cls((prefix, suffix, middle), data.fim_rate, data.fim_spm_rate, seed)

    def __call__(self, dataset: GPTDataset, index: int, sample: Sample) -> Sample:
        """Sample `index` of a dataset with its parts rewritten."""
        if dataset.corpus.mask_file is not None:
            return sample
        tokens = sample.tokens.copy()
        labels = sample.labels.copy()
        loss_mask = sample.loss_mask.copy()
        length = len(tokens)
        epoch = index // dataset.samples_per_epoch
        for part in dataset.parts(index):
            stop = part.offset + part.stop - part.start
            if part.stop == dataset.corpus.document_start(part.document + 1):
                stop -= 1  # the end-of-document token stays
            inside = slice(part.offset, min(stop, length))
            original = sample.tokens[inside]
            tokens[inside] = self.rewritten(original, key=f"{epoch} {part.start}")
            if stop > length and not np.array_equal(tokens[inside], original):
                loss_mask[-1] = 0.0
        labels[:-1] = tokens[1:]
        return replace(sample, tokens=tokens, labels=labels, loss_mask=loss_mask)

    def rewritten(self, ids: np.ndarray, *, key: str) -> np.ndarray:
        """[n] tokens -> [n] tokens, perhaps with a gap; the last three are then left out.

        >>> fim = FillInTheMiddle((97, 98, 99), 1.0, 0.0, seed=1)
        >>> fim.rewritten(np.arange(9), key="0 0").tolist()
        [97, 0, 1, 98, 5, 99, 2, 3, 4]
        """
        digest = hashlib.blake2b(f"fim {self.seed} {key}".encode(), digest_size=32).digest()
        chance, order, *ends = struct.unpack("<4Q", digest)
        kept = len(ids) - len(self.sentinels)
        if kept < 1 or chance >= self.rate * _ONE:
            return ids
        first, last = sorted(end * (kept + 1) // _ONE for end in ends)
        before, after, middle = ([token] for token in self.sentinels)
        prefix = ids[:first]
        gap = ids[first:last]
        suffix = ids[last:kept]
        if order < self.spm_rate * _ONE:
            return np.concatenate([before, after, suffix, middle, prefix, gap])
        return np.concatenate([before, prefix, after, suffix, middle, gap])


def _read_vocabulary(tokenizer: str) -> dict[str, int]:
    """The ids of a tokenizer's tokens."""
    loaded = load_with_files(tokenizer)
    if isinstance(loaded, FastTokenizer):
        vocabulary: dict[str, int] = loaded.backend.get_vocab()
    else:
        vocabulary = loaded.wrapped.get_vocab()
    return vocabulary
