"""Numbers of bytes and counts as short texts, and tables of text, the same in every output.

describe_bytes    4,200,000 -> "4.2 MB"
describe_count    1,840,000 -> "1.84 M"
count_of          2, "rank" -> "2 ranks"; also with a verb
step_name         100 -> "step-00000100", the folder of a checkpoint
suffixed_number   "1.5k" -> "1500"
round_up          5, 4 -> 8, the next multiple
ranks_text        [0, 1, 2, 7] -> "0-2, 7"; named_ranks with the noun
table_lines       rows of cells -> lines of aligned columns
"""

import re
from collections.abc import Collection, Sequence
from decimal import Decimal

VERBS = {"is": "are", "has": "have", "was": "were", "does": "do"}  # for one, for several
UNITS = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


def describe_bytes(num_bytes: int) -> str:
    """Bytes in decimal units; GB and TB with two decimals.

    >>> describe_bytes(140_900_000_000), describe_bytes(4_200_000)
    ('140.90 GB', '4.2 MB')
    >>> describe_bytes(5_200), describe_bytes(12)
    ('5.2 kB', '12 bytes')
    >>> describe_bytes(999_999_999), describe_bytes(999)
    ('1.00 GB', '999 bytes')
    """
    for size, prefix in UNITS:
        if num_bytes >= 0.99995 * size:  # one decimal of it would be a thousand of the smaller unit
            return f"{num_bytes / size:.{2 if size >= 10**9 else 1}f} {prefix}B"
    return f"{num_bytes} bytes"


def describe_count(number: float) -> str:
    """A number with three digits and a unit; a billion is B.

    >>> describe_count(950), describe_count(1_840_000), describe_count(999_700_000)
    ('950', '1.84 M', '1 B')
    """
    for size, prefix in UNITS:
        if number >= 0.9995 * size:  # three digits of it would be a thousand of the smaller unit
            return f"{number / size:.3g} {prefix.replace('G', 'B')}"
    return f"{number:g}"


def count_of(number: int, noun: str, *, verb: str = "") -> str:
    """A whole number and a regular noun, and the verb of which it is the subject, given for one.

    >>> count_of(1, "layer"), count_of(1_024, "rank"), count_of(0, "microbatch")
    ('1 layer', '1,024 ranks', '0 microbatches')
    >>> count_of(1, "loss", verb="differs"), count_of(2, "loss", verb="differs")
    ('1 loss differs', '2 losses differ')
    >>> count_of(2, "part", verb="is")
    '2 parts are'
    """
    if number == 1:
        return f"1 {noun} {verb}".rstrip()
    ending = "es" if noun.endswith(("ch", "s")) else "s"
    verb = VERBS.get(verb, verb.removesuffix("s"))
    return f"{number:,} {noun}{ending} {verb}".rstrip()


def step_name(step: int) -> str:
    """The name of the folder of a step's checkpoint.

    >>> step_name(100)
    'step-00000100'
    """
    return f"step-{step:08d}"


def ceil_div(number: int, divisor: int) -> int:
    """The quotient rounded up to an integer.

    >>> ceil_div(7, 2), ceil_div(8, 2)
    (4, 4)
    """
    return -(-number // divisor)


def round_up(number: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `number`.

    >>> round_up(5, 4)
    8
    """
    return -(-number // unit) * unit


def named_ranks(ranks: Sequence[int]) -> str:
    """`ranks_text` after "rank" or "ranks"."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {ranks_text(ranks)}"


def named_files(names: Sequence[str], *, most: int = 4) -> str:
    """The first names of a list, and the number of the rest.

    >>> named_files(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    text = ", ".join(names[:most])
    return f"{text} and {len(names) - most} more" if len(names) > most else text


def ranks_text(ranks: Sequence[int], *, most: int = 64) -> str:
    """Ranks with ranges, shortened to the first of `most` ranges and the last.

    >>> ranks_text([0, 1, 2, 3, 7]), ranks_text(range(0, 16384, 8), most=4)
    ('0-3, 7', '0, 8, 16, ..., 16376 (2,048 ranks)')
    """
    ranges: list[list[int]] = []  # first and last rank
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    if len(texts) <= most:
        return ", ".join(texts)
    return f"{', '.join(texts[: most - 1])}, ..., {texts[-1]} ({count_of(len(ranks), 'rank')})"


def table_lines(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Rows as lines of aligned columns; columns in `right` are right-aligned.

    >>> table_lines([("step", "loss"), ("10", "1")], right=[1])
    ['step  loss', '10       1']
    """
    columns = []
    for index, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        if index in right:
            columns.append([cell.rjust(width) for cell in column])
        else:
            columns.append([cell.ljust(width) for cell in column])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def suffixed_number(text: str) -> str | None:
    """A number that ends in k, M, B, G or T, without the letter; None for another text.

    >>> suffixed_number("1.5k"), suffixed_number("2B"), suffixed_number("3x")
    ('1500', '2000000000', None)
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([kmbgt])", text.lower())
    if match is None:
        return None
    power = {"k": 3, "m": 6, "b": 9, "g": 9, "t": 12}[match[2]]
    return f"{Decimal(match[1]).scaleb(power).normalize():f}"
