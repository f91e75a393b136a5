"""Fill-in-the-middle (`--fim-data`): learn to write what is missing between two parts of a text.

    part of a document      p p p p m m m s s s s s E        E end-of-document
    PSM                     P p p p p S s s M m m m E        P, S, M sentinels before prefix,
    SPM (`--fim-spm-rate`)  P S s s M p p p p m m m E        suffix and middle

A part of a document in a sample keeps its position, length and end: the sentinels replace the
last tokens of the suffix. So positions, segments and the documents of a sample are those of plain
samples. Where a part goes on in the next sample, the label after the gap is no target. Corpora with
a loss mask, such as conversations, stay as they are.

With `--fim-split-sample` a part that has the token is divided at it, such as a repository into its
files. If the part is chosen, each fragment is rewritten or not by `--fim-fragment-rate`, in its
place; the tokens between fragments stay. What begins with `--fim-no-prefix` is never rewritten.

Source: Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle",
sections 3 and 4.
"""

import hashlib
import struct
from dataclasses import dataclass, replace
from functools import cache
from typing import Self

import numpy as np

from nanotrain.config.config import DataConfig
from nanotrain.data.batch import Sample
from nanotrain.data.gpt import GPTDataset
from nanotrain.data.tokenizer import FastTokenizer, SlowTokenizer, load_with_files
from nanotrain.errors import ConfigError

_ONE = 1 << 64


@dataclass(frozen=True)
class FillInTheMiddle:
    """Rewrite parts of documents, as a pure function of seed, epoch and position in the corpus."""

    sentinels: tuple[int, int, int]  # ids before prefix, suffix and middle
    rate: float  # fraction of the parts that are rewritten
    spm_rate: float  # fraction of the rewritten parts that begin with the suffix
    seed: int
    split_token: int | None = None  # id between the fragments of a part; None: parts have none
    fragment_rate: float = 1.0  # fraction of the fragments that are rewritten, of chosen parts
    no_prefix: str = ""  # a text that begins with it is not rewritten; empty: all may be
    tokenizer: str = ""  # name of the tokenizer that decodes it

    @classmethod
    def of(cls, data: DataConfig, *, tokenizer: str | None, vocab_size: int, seed: int) -> Self:
        """Build the options from the data section.

        Args:
            data: data section.
            tokenizer: the tokenizer of the run, as `load_tokenizer` takes it; None if unknown.
            vocab_size: ids must be in [0, vocab_size).
            seed: key of all choices.

        Raises:
            ConfigError: a sentinel is no token, or the text of tokens is needed and unknown.
        """
        names = {
            "prefix-token": data.fim_prefix_token,
            "suffix-token": data.fim_suffix_token,
            "middle-token": data.fim_middle_token,
        }
        if data.fim_split_sample is not None:
            names["split-sample"] = data.fim_split_sample
        if data.fim_no_prefix and tokenizer is None:
            raise ConfigError(
                f"--fim-no-prefix {data.fim_no_prefix!r} without a tokenizer",
                why="it compares the text of tokens",
                fix="set --tokenizer-model",
            )
        vocabulary: dict[str, int] = {}
        if tokenizer is not None and not all(name.isdigit() for name in names.values()):
            vocabulary = _read_vocabulary(tokenizer)
        ids = []
        wrong = []
        for kind, name in names.items():
            token = int(name) if name.isdigit() else vocabulary.get(name, vocab_size)
            ids.append(token)
            if token >= vocab_size:
                wrong.append(f"--fim-{kind} {name}")
        if wrong:
            raise ConfigError(
                f"{', '.join(wrong)}: no token",
                why=(
                    f"the tokenizer is {tokenizer or 'unknown'}, "
                    f"and the model has the ids 0 to {vocab_size - 1}"
                ),
                fix="name special tokens of the tokenizer, or give unused ids",
            )
        prefix, suffix, middle, *splits = ids
        return cls(
            (prefix, suffix, middle),
            data.fim_rate,
            data.fim_spm_rate,
            seed,
            split_token=splits[0] if splits else None,
            fragment_rate=1.0 if data.fim_fragment_rate is None else data.fim_fragment_rate,
            no_prefix=data.fim_no_prefix or "",
            tokenizer=tokenizer or "",
        )

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
            tokens[inside] = self.rewritten_part(original, key=f"{epoch} {part.start}")
            last = slice(inside.start + self.last_fragment(original), inside.stop)
            if stop > length and not np.array_equal(tokens[last], sample.tokens[last]):
                loss_mask[-1] = 0.0
        labels[:-1] = tokens[1:]
        return replace(sample, tokens=tokens, labels=labels, loss_mask=loss_mask)

    def rewritten_part(self, ids: np.ndarray, *, key: str) -> np.ndarray:
        """[n] tokens of a part -> [n] tokens, perhaps with a gap in each of its fragments.

        >>> fim = FillInTheMiddle((97, 98, 99), 1.0, 0.0, seed=1, split_token=7)
        >>> fim.rewritten_part(np.array([0, 1, 2, 3, 7, 7, 4, 5, 6]), key="0").tolist()
        [97, 98, 99, 0, 7, 7, 4, 5, 6]
        """
        if self.split_token is None:
            return self.rewritten(ids, key=key)
        breaks = np.flatnonzero(ids == self.split_token)
        if len(breaks) == 0:
            return self.rewritten(ids, key=key)
        if self._draw_numbers(key)[0] >= self.rate * _ONE:
            return ids
        in_fragments = replace(self, rate=self.fragment_rate)
        tokens = ids.copy()
        starts = [0, *(breaks + 1)]
        stops = [*breaks, len(ids)]
        for number, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            fragment = ids[start:stop]
            tokens[start:stop] = in_fragments.rewritten(fragment, key=f"{key} {number}")
        return tokens

    def last_fragment(self, ids: np.ndarray) -> int:
        """Where the last fragment of a part begins; 0 for a part without fragments.

        >>> fim = FillInTheMiddle((97, 98, 99), 1.0, 0.0, seed=1, split_token=7)
        >>> fim.last_fragment(np.array([7, 0, 7, 1])), fim.last_fragment(np.array([0, 1]))
        (3, 0)
        """
        breaks = np.flatnonzero(ids == self.split_token)
        return int(breaks[-1]) + 1 if len(breaks) else 0

    def _draw_numbers(self, key: str) -> tuple[int, int, int, int]:
        """Four random numbers below 2^64: choice, order and ends of the gap."""
        digest = hashlib.blake2b(f"fim {self.seed} {key}".encode(), digest_size=32).digest()
        first, second, third, fourth = struct.unpack("<4Q", digest)
        return first, second, third, fourth

    def _is_excluded(self, ids: np.ndarray) -> bool:
        """Whether a text begins with `no_prefix`."""
        if not self.no_prefix:
            return False
        # a token has at least one byte, unless it is special, which decodes to nothing
        start = ids[: 2 * len(self.no_prefix.encode()) + 8]
        text = load_once(self.tokenizer).decode(start.tolist())
        return text.startswith(self.no_prefix)

    def rewritten(self, ids: np.ndarray, *, key: str) -> np.ndarray:
        """[n] tokens -> [n] tokens, perhaps with a gap; the last three are then left out.

        >>> fim = FillInTheMiddle((97, 98, 99), 1.0, 0.0, seed=1)
        >>> fim.rewritten(np.arange(9), key="0 0").tolist()
        [97, 0, 1, 98, 5, 99, 2, 3, 4]
        """
        chance, order, *ends = self._draw_numbers(key)
        kept = len(ids) - len(self.sentinels)
        if kept < 1 or chance >= self.rate * _ONE or self._is_excluded(ids):
            return ids
        first, last = sorted(end * (kept + 1) // _ONE for end in ends)
        before, after, middle = ([token] for token in self.sentinels)
        prefix = ids[:first]
        gap = ids[first:last]
        suffix = ids[last:kept]
        if order < self.spm_rate * _ONE:
            return np.concatenate([before, after, suffix, middle, prefix, gap])
        return np.concatenate([before, prefix, after, suffix, middle, gap])


@cache
def load_once(tokenizer: str) -> FastTokenizer | SlowTokenizer:
    """A tokenizer, loaded once per process."""
    return load_with_files(tokenizer)


def _read_vocabulary(tokenizer: str) -> dict[str, int]:
    """The ids of a tokenizer's tokens."""
    loaded = load_with_files(tokenizer)
    if isinstance(loaded, FastTokenizer):
        vocabulary: dict[str, int] = loaded.backend.get_vocab()
    else:
        vocabulary = loaded.wrapped.get_vocab()
    return vocabulary
