"""What was probably meant by a name that does not exist: by meaning, then by spelling.

by_meaning      a name of another framework (`tables/other_frameworks.yaml`)
by_spelling     the nearest known spelling, with the same numbers in it
by_words        the only known name that has all its words
nearest_choice  the nearest of the few values of a setting, which the message lists as well
"""

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from functools import cache

from nanotrain.config.tables import read_table

LISTED_BY = "nanotrain train --help=all"  # the command that lists every option
# shares of equal characters, as difflib counts them
MIN_SIMILARITY = 0.85
MIN_SIMILARITY_OF_A_SHORT_NAME = 2 / 3  # one slip is a larger share of it
MIN_SIMILARITY_OF_A_CHOICE = 0.7
# characters of a single word that stands for a longer name, or for a misspelled one elsewhere
MIN_LENGTH_OF_A_WORD = 5
MIN_LENGTH_OF_A_SHARED_WORD = 4
COMMON_WORDS = {"path", "file", "size", "name", "type", "model", "data", "train", "with"}
MAX_SHARING = 12  # names with a word that says what they are about


@cache
def cures() -> dict[str, str]:
    """Cures by names of other frameworks, in lower case with underscores and without dashes."""
    table = read_table("other_frameworks")["cures"]
    return {name: cure for cure, names in table.items() for name in names.split()}


def other_value(field: str, value: str) -> str | None:
    """The value of a field that another framework writes otherwise: adamw is adam.

    Args:
        field: unique name of the field.
        value: the other framework's value.
    """
    values: dict[str, str] = read_table("other_frameworks")["values"].get(field, {})
    return values.get(value)


def why_absent(field: str, value: str) -> str | None:
    """The cure for a value that has no counterpart here.

    >>> why_absent("device", "mps")
    'GPUs of Apple (mps) are not supported; write --device cpu'
    """
    reasons: dict[str, str] = read_table("other_frameworks")["absent"].get(field, {})
    kind = value.lower().partition(":")[0]
    return next((why for why, values in reasons.items() if kind in values.split()), None)


def advise_value(field: str, value: str, *, flag: str, names: Collection[str]) -> str:
    """The cure for a value that a field does not take.

    Args:
        field: unique name of the field.
        value: the value.
        flag: flag of the field.
        names: values that it takes.
    """
    absent = why_absent(field, value)
    if absent:
        return absent
    meant = other_value(field, value)
    if meant in names:
        return f"write {flag} {meant}"
    near = nearest_choice(value, names)
    return f"did you mean {flag} {near}?" if near else f"write {flag} NAME with one of these names"


def did_you_mean(
    name: str, known: Iterable[str], *, prefix: str = "", listed_by: str = LISTED_BY
) -> str:
    """The known name that was probably meant as advice, or the command that lists the names.

    >>> did_you_mean("optim.lrr", ["optim.lr", "train.seed"])
    'did you mean optim.lr?'
    """
    close = nearest(name, known)
    return f"did you mean {prefix}{close}?" if close else f"{listed_by} lists them"


def advise(cure: str) -> str:
    """A cure as a sentence; one flag or key becomes a question, as the guess may be wrong.

    >>> advise("--lr"), advise("--device cuda"), advise("leave it out")
    ('did you mean --lr?', 'write --device cuda', 'leave it out')
    """
    if cure.startswith("leave it out"):
        return cure
    return f"write {cure}" if " " in cure else f"did you mean {cure}?"


def by_meaning(name: str) -> str | None:
    """The cure for a name of another framework.

    A dotted name, as torchtitan's `--checkpoint.interval`, is looked up with its section and
    without.

    >>> by_meaning("--model.n_layers"), by_meaning("checkpoint.interval")
    ('--num-layers', '--save-interval')
    """
    path = name.strip("-").replace("-", "_").lower().split(".")
    with_section = "_".join(path[-2:])
    return cures().get(with_section) or cures().get(path[-1])


def cure_of(name: str, known: Collection[str]) -> str | None:
    """The cure for a name of another framework, spelled right or wrong.

    >>> cure_of("--learning-rat", ["--seed"]), cure_of("--zzz", ["--seed"])
    ('--lr', None)
    """
    meaning = by_meaning(name)
    if meaning is not None:
        return meaning
    last = name.rpartition(".")[2]
    if nearest(name, known) or len(plain(last)) < MIN_LENGTH_OF_A_WORD:
        return None
    return cures().get(by_spelling(last, cures()) or "")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name by spelling, else by words."""
    known = list(known)
    return by_spelling(name, known) or by_words(name, known)


def by_spelling(name: str, known: Iterable[str]) -> str | None:
    """The nearest known spelling; its numbers must be the same: fp8 is no slip of fp16.

    >>> by_spelling("--hiden-size", ["--hidden-size", "--lr"]), by_spelling("--fp8", ["--fp16"])
    ('--hidden-size', None)
    """
    spellings: dict[str, str] = {}
    for other in known:
        if digits(other) == digits(name):
            spellings.setdefault(plain(other), other)
    length = len(plain(name)) or 1
    with_one_slip = (length - 1) / length
    cutoff = min(MIN_SIMILARITY, max(MIN_SIMILARITY_OF_A_SHORT_NAME, with_one_slip))
    return spellings.get(similar(plain(name), list(spellings), cutoff=cutoff) or "")


def by_words(name: str, known: Iterable[str]) -> str | None:
    """The only known name that has all words of this one and more, and is no opposite.

    >>> by_words("--warmup-iters", ["--lr-warmup-iters", "--lr"])
    '--lr-warmup-iters'
    >>> by_words("--mtp-num-layers", ["--num-layers"])
    """
    words = {*plain(name).split("-")}
    if len(words) == 1 and len(plain(name)) < MIN_LENGTH_OF_A_WORD:
        return None
    longer = []
    for other in known:
        is_opposite = other.startswith(("--no-", "--disable-"))
        if not is_opposite and words <= {*plain(other).split("-")}:
            longer.append(other)
    return longer[0] if len(longer) == 1 else None


def with_shared_words(name: str, known: Iterable[str]) -> list[str]:
    """Up to three known names that share the most of the words that few names have.

    >>> with_shared_words("--use-router-bias-decay", ["--lr", "--router-bias-rate", "--router"])
    ['--router-bias-rate', '--router']
    """
    words = {word for word in plain(name).split("-") if len(word) >= MIN_LENGTH_OF_A_SHARED_WORD}
    words -= COMMON_WORDS
    shared: dict[str, int] = {}
    for other in known:
        number = len(words & set(plain(other).split("-")))
        if number and not other.startswith(("--no-", "--disable-")):
            shared[other] = number
    if len(shared) > MAX_SHARING:
        shared = {other: number for other, number in shared.items() if number > 1}
    return sorted(shared, key=lambda other: (-shared[other], len(other)))[:3]


def nearest_choice(value: str, choices: Iterable[str]) -> str | None:
    """The nearest of a few listed values.

    >>> nearest_choice("tyni", ["tiny", "tiny_moe"]), nearest_choice("1f2b", ["gpipe", "1f1b"])
    ('tiny', '1f1b')
    >>> nearest_choice("fp8", ["fp16", "zb-h1"])
    """
    return similar(value, list(choices), cutoff=MIN_SIMILARITY_OF_A_CHOICE)


def similar(text: str, others: list[str], *, cutoff: float) -> str | None:
    """The most similar text, or one of the same characters in another order."""
    close = get_close_matches(text, others, n=1, cutoff=cutoff)
    if close and close[0]:
        return close[0]
    characters = sorted(text)
    return next((other for other in others if sorted(other) == characters), None)


def plain(name: str) -> str:
    """A name without leading dashes, in one case and with one separator."""
    return name.strip("-").replace("_", "-").replace(".", "-").lower()


def digits(name: str) -> list[str]:
    """The digits of a name, sorted."""
    return sorted(filter(str.isdigit, name))
