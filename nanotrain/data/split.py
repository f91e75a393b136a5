"""Split the documents of a corpus into training, validation and test (`--split 969,30,1`)."""

from itertools import accumulate

from nanotrain.errors import ConfigError


def parse_split(split: str) -> tuple[float, float, float]:
    """Parse up to three numbers ("969,30,1", "99,1") into three proportions that sum to 1; missing ones are 0.

    Raises:
        ConfigError: no numbers, more than three, a negative one, or all zero.

    >>> parse_split("3,1")
    (0.75, 0.25, 0.0)
    """
    try:
        parts = [float(part) for part in split.replace("/", ",").split(",")]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or any(not part >= 0 for part in parts) or not 0 < sum(parts) < float("inf"):
        raise ConfigError(
            f"--split {split} cannot be parsed",
            why="it takes up to three proportions of at least 0, not all 0",
            fix="write for example --split 969,30,1, or 1,0,0 to train on everything",
        )
    train, valid, test = (parts + [0.0, 0.0])[:3]
    total = train + valid + test
    return train / total, valid / total, test / total


def split_documents(num_documents: int, split: str) -> tuple[range, range, range]:
    """Document ranges of training, validation and test: consecutive, with Megatron-LM's rounding.

    >>> split_documents(1000, "969,30,1")[1]
    range(969, 999)
    """
    ends = [round(share * num_documents) for share in accumulate(parse_split(split))]
    train, valid, test = (range(start, stop) for start, stop in zip([0, *ends], ends, strict=False))
    return train, valid, test
