"""What is counted in the documents of a corpus, because their tokens do not say it.

    special      documents with the text of a special token, which stays text or becomes the token
    unknown      tokens that stand for characters that the vocabulary lacks
    lost         characters that no token stands for; blanks are left to the tokenizer
    empty        documents without text, which are left out
    surrogates   documents with lone surrogates, which become question marks
    uneven       documents whose tokens have other bytes than their text
    targets      tokens of conversations that the assistant writes

Workers count the documents of their parts; `prepare` prints the sums.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from nanotrain.data.tokenizer import ByteTokenizer, Tokenizer
from nanotrain.quantities import count_of
from nanotrain.untrusted import object_of, parse_json, whole_number

_NUM_SHOWN = 3  # special tokens that are named


@dataclass(frozen=True)
class TextCounts:
    """Counts over documents; the docstring of this module lists the fields."""

    special: int = 0
    unknown: int = 0
    lost: int = 0
    empty: int = 0
    surrogates: int = 0
    uneven: int = 0
    targets: int = 0

    @classmethod
    def total(cls, parts: Iterable["TextCounts"]) -> "TextCounts":
        """The counts of all parts together."""
        totals = asdict(cls())
        for part in parts:
            for name, value in asdict(part).items():
                totals[name] += value
        return cls(**totals)

    @classmethod
    def parse(cls, text: str) -> "TextCounts":
        """Parse the values of `to_json`.

        Raises:
            ValueError: it is something else.
        """
        values = object_of(parse_json(text), "it")
        return cls(**{name: whole_number(values.get(name, 0), name) for name in asdict(cls())})

    def to_json(self) -> str:
        """The counts as JSON."""
        return json.dumps(asdict(self))


def special_texts(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The texts of a tokenizer's special tokens; bytes have none."""
    return () if isinstance(tokenizer, ByteTokenizer) else tokenizer.special_texts


def lines_of(
    counts: TextCounts, *, tokenizer: Tokenizer, num_tokens: int, parse_special: bool
) -> list[str]:
    """The lines with the counts of a corpus of `num_tokens` tokens."""
    texts = special_texts(tokenizer)
    names = ", ".join(texts[:_NUM_SHOWN]) + (", ..." if len(texts) > _NUM_SHOWN else "")
    became = "stays text; --parse-special makes it the token, as AutoTokenizer does"
    if parse_special:
        became = "became the token (--parse-special)"
    share = counts.unknown / max(1, num_tokens)
    target_share = counts.targets / max(1, num_tokens)
    counted = [
        (
            counts.targets,
            f"{counts.targets:,} of its tokens ({target_share:.0%}) are targets: what the "
            "assistant writes",
        ),
        (counts.empty, f"left out: {count_of(counts.empty, 'empty document')}"),
        (
            counts.surrogates,
            f"{count_of(counts.surrogates, 'document')} with lone surrogates, which no UTF-8 has: "
            "they became question marks",
        ),
        (
            counts.special,
            f"{count_of(counts.special, 'document')} with the text of a special token ({names}), "
            f"which {became}",
        ),
        (
            counts.unknown,
            f"{count_of(counts.unknown, 'token')} ({share:.2%}) unknown: the vocabulary lacks "
            "their characters",
        ),
        (
            counts.lost,
            f"{count_of(counts.lost, 'character')} lost: the tokenizer removes them or has no "
            "token for them",
        ),
        (
            counts.uneven,
            f"{count_of(counts.uneven, 'document')} whose tokens have other bytes than the text "
            "(changed or unknown characters): validation on them has no bits per byte",
        ),
    ]
    return [line for number, line in counted if number]
