"""What was probably meant by a name that does not exist: by meaning, then by spelling; nothing where no name is near.

by_meaning      a name of another framework (synonyms.py)
by_spelling     one or two slips of the keys, with the same numbers in it
nearest_choice  the nearest of the few values of a setting, which the message lists as well
by_words        the only known name that has all its words, where some were left out
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches

from nanotrain.config.synonyms import CURES

LISTED_BY = "nanotrain train --help=all"  # the command that lists every option
MIN_LENGTH_OF_TWO_SLIPS = 8  # characters; of a shorter name two slips leave too little
MIN_SIMILARITY = 0.7  # share of equal characters, as difflib counts them
MIN_LENGTH_OF_A_WORD = 5  # of a single word that stands for a longer name


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "", listed_by: str = LISTED_BY) -> str:
    """The known name that was probably meant as advice, or the command that lists the names.

    >>> did_you_mean("optim.lrr", ["optim.lr", "train.seed"])
    'did you mean optim.lr?'
    """
    close = nearest(name, known)
    return f"did you mean {prefix}{close}?" if close else f"{listed_by} lists them"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name by spelling, else by words."""
    known = list(known)
    return by_spelling(name, known) or by_words(name, known)


def advise(cure: str) -> str:
    """A cure as advice: a question where it is one flag or key, else what to write or to leave out.

    >>> advise("--lr"), advise("--device cuda"), advise("leave it out")
    ('did you mean --lr?', 'write --device cuda', 'leave it out')
    """
    if cure.startswith("leave it out"):
        return cure
    return f"write {cure}" if " " in cure else f"did you mean {cure}?"


def by_meaning(name: str) -> str | None:
    """What to write for a name of another framework.

    A dotted name, as torchtitan's `--checkpoint.interval`, is looked up with its section and without.

    >>> by_meaning("--learning-rate"), by_meaning("--model.n_layers"), by_meaning("checkpoint.interval")
    ('--lr', '--num-layers', '--save-interval')
    """
    path = name.strip("-").replace("-", "_").lower().split(".")
    return CURES.get("_".join(path[-2:])) or CURES.get(path[-1])


def by_misspelled_meaning(name: str) -> str | None:
    """What to write for a misspelled name of another framework.

    >>> by_misspelled_meaning("--learning-rat"), by_misspelled_meaning("--zzz")
    ('--lr', None)
    """
    return CURES.get(by_spelling(name.rpartition(".")[2], CURES) or "")


def by_spelling(name: str, known: Iterable[str]) -> str | None:
    """The nearest known name within one slip, or two in a long name; its numbers must be the same.

    >>> by_spelling("--hiden-size", ["--hidden-size", "--lr"]), by_spelling("--fp8", ["--fp16"])
    ('--hidden-size', None)
    >>> by_spelling("--LR", ["--hidden-size", "--lr"])
    '--lr'
    """
    plain = normalized(name)
    limit = 2 if len(plain) >= MIN_LENGTH_OF_TWO_SLIPS else 1
    if len(plain) < 3:
        return next((other for other in known if normalized(other) == plain), None)
    slips = [
        (distance(plain, normalized(other)), other)
        for other in known
        if digits(other) == digits(name) and abs(len(normalized(other)) - len(plain)) <= limit
    ]
    best = min(slips, default=(limit + 1, ""))
    return best[1] if best[0] <= limit else None


def nearest_choice(value: str, choices: Iterable[str]) -> str | None:
    """The nearest of a few listed values: a slip, the same letters in another order, or mostly the same text.

    >>> nearest_choice("tyni", ["tiny", "tiny_moe"]), nearest_choice("1f2b", ["gpipe", "1f1b"])
    ('tiny', '1f1b')
    >>> nearest_choice("fp8", ["fp16", "zb-h1"])
    """
    choices = list(choices)
    same_letters = (choice for choice in choices if sorted(choice) == sorted(value))
    similar = get_close_matches(value, choices, n=1, cutoff=MIN_SIMILARITY)
    return by_spelling(value, choices) or next(same_letters, None) or next(iter(similar), None)


def by_words(name: str, known: Iterable[str]) -> str | None:
    """The only known name that has all words of this one, in order, and more.

    >>> by_words("--warmup-iters", ["--lr-warmup-iters", "--lr"]), by_words("--mtp-num-layers", ["--num-layers"])
    ('--lr-warmup-iters', None)
    """
    words = parts(name)
    if len(words) == 1 and len(words[0]) < MIN_LENGTH_OF_A_WORD:
        return None
    longer = [other for other in known if not is_negated(other) and is_within(words, parts(other))]
    return longer[0] if len(longer) == 1 else None


def is_negated(name: str) -> bool:
    """Whether a flag switches something off."""
    return name.startswith(("--no-", "--disable-"))


def is_within(words: list[str], others: list[str]) -> bool:
    """Whether all words occur among others, in order."""
    rest = iter(others)
    return all(word in rest for word in words)


def parts(name: str) -> list[str]:
    """The words of a name."""
    return [word for word in re.split(r"[-_.]", name.lower()) if word]


def normalized(name: str) -> str:
    """A name without leading dashes, in one case and with one separator."""
    return name.strip("-").replace("_", "-").lower()


def digits(name: str) -> list[str]:
    """The digits of a name, sorted: fp8 and fp16 are no misspellings of each other, bf61 and bf16 are."""
    return sorted(filter(str.isdigit, name))


def distance(first: str, second: str) -> int:
    """Slips between two texts: letters more, less, changed, or two neighbours swapped.

    >>> distance("trian", "train"), distance("tinny", "tiny")
    (1, 1)
    """
    rows: list[list[int]] = [list(range(len(second) + 1))]
    for i, letter in enumerate(first, start=1):
        row = [i]
        for j, other in enumerate(second, start=1):
            cost = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == second[j - 2] and first[i - 2] == other:
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]
