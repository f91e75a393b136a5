"""A byte-level BPE tokenizer trained on local text, as GPT-2's: any bytes can be encoded, nothing is unknown.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.2; the splitting pattern is
theirs.
"""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from nanotrain.data.tokenizer import FastTokenizer
from nanotrain.errors import DataError

END = "<|endoftext|>"
LEAST_VOCAB = 257


def train_bpe(texts: Iterable[str], vocab_size: int) -> FastTokenizer:
    """Train a tokenizer.

    Args:
        texts: documents.
        vocab_size: tokens to learn at most: 256 bytes, `<|endoftext|>` and merges; little text gives fewer.

    Raises:
        DataError: the vocabulary would not hold the bytes.
    """
    if vocab_size < LEAST_VOCAB:
        raise DataError(
            f"a BPE vocabulary of {vocab_size} is too small",
            why=f"256 bytes and {END} are {LEAST_VOCAB} tokens",
            fix="ask for more, for example bpe:8192",
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return FastTokenizer(backend, end=END)
