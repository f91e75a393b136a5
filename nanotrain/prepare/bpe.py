"""Train a byte-level BPE tokenizer, as GPT-2's: it encodes any bytes and has no unknown token.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.2; with its
splitting pattern.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import chain

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from nanotrain.data.tokenizer import FastTokenizer
from nanotrain.errors import DataError
from nanotrain.log import progress

EOD_TEXT = "<|endoftext|>"
# the library allocates 70 bytes per token at once, and ends the process if it cannot
MIN_VOCAB, MAX_VOCAB = 257, 1 << 22
LONG_RUN = re.compile(r"(\S{1000}|\s{1000})")


def train_bpe(
    texts: Iterable[str], vocab_size: int, *, special: Sequence[str] = ()
) -> FastTokenizer:
    """Train a tokenizer on documents without lone surrogates.

    The vocabulary is 256 bytes, `<|endoftext|>`, further special tokens and merges, at most
    `vocab_size`; little text gives fewer merges.

    Raises:
        DataError: the vocabulary is too small for the bytes, or too large for memory.
    """
    special_texts = list(dict.fromkeys([EOD_TEXT, *special]))
    least = MIN_VOCAB - 1 + len(special_texts)
    if not least <= vocab_size <= MAX_VOCAB:
        size = "small" if vocab_size < least else "large"
        raise DataError(
            f"a BPE vocabulary of {vocab_size:,} is too {size}",
            why=(
                f"256 bytes and {', '.join(special_texts)} are {least} tokens, "
                f"and at most {MAX_VOCAB:,} are trained"
            ),
            fix="write for example bpe:32768",
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_texts,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with progress("BPE training"):
        backend.train_from_iterator(chain.from_iterable(map(split_runs, texts)), trainer)
    return FastTokenizer(backend, eod_text=EOD_TEXT)


def split_runs(text: str) -> list[str]:
    """Split a text so that no run of blanks, or of other characters, is longer than 1000.

    The trainer makes one word of such a run, and its time grows with the square of the length of a
    word.

    >>> [len(part) for part in split_runs("a b" + "c" * 2500)]
    [2, 1000, 1000, 501]
    """
    return [part for part in LONG_RUN.split(text) if part]
