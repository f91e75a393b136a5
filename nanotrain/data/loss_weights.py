"""`--data-loss-weights`: the weight of every corpus of a blend in the loss, apart from sampling.

A target token of a sample of corpus d counts w_d / q_d times in the loss, where w_d is the weight
of d as a share of the weights of all corpora of the stage, and q_d the share of its samples. The
loss is still divided by the number of target tokens. Where samples of all corpora have equally many
of them, its expectation is the sum over corpora of w_d times their loss, whatever the blend is.
"""

import re
from collections.abc import Sequence
from fractions import Fraction

from nanotrain.errors import ConfigError

_ENTRY = re.compile(r"(?P<name>.+)=(?P<weight>\d{1,12}(\.\d{0,12})?|\.\d{1,12})")


def parse_loss_weights(entries: Sequence[str], names: Sequence[str]) -> tuple[Fraction, ...]:
    """The weights of the corpora of a blend, in their order.

    Args:
        entries: NAME=WEIGHT for every corpus.
        names: names of the corpora; fewer than two if the data is no blend.

    Raises:
        ConfigError: another form, a weight that is not above 0, a corpus without a weight or a
            weight without a corpus, or no blend.

    >>> parse_loss_weights(["web=0.5", "math=2"], ["math", "web"])
    (Fraction(2, 1), Fraction(1, 2))
    """
    if len(names) < 2:
        raise ConfigError(
            f"--data-loss-weights {' '.join(entries)} without a blend",
            why="the only corpus has the whole loss",
            fix="leave it out, or name several corpora with --data-path",
        )
    weights: dict[str, Fraction] = {}
    for entry in entries:
        match = _ENTRY.fullmatch(entry)
        if match is None or not Fraction(match["weight"]) or match["name"] in weights:
            raise ConfigError(
                f"--data-loss-weights {entry} cannot be read",
                why="it takes NAME=WEIGHT once per corpus, with a weight above 0",
                fix="write for example --data-loss-weights web=0.7 code=0.3, "
                "and take a corpus of weight 0 out of the blend",
            )
        weights[match["name"]] = Fraction(match["weight"])
    if weights.keys() != set(names):
        missing = [name for name in names if name not in weights]
        unknown = [name for name in weights if name not in names]
        parts = []
        if missing:
            parts.append(f"{', '.join(missing)} without a weight")
        if unknown:
            parts.append(f"no corpus {', '.join(unknown)}")
        raise ConfigError(
            f"--data-loss-weights names other corpora than the blend: {'; '.join(parts)}",
            why=f"the blend has {', '.join(names)}",
            fix="give each of them one weight",
        )
    return tuple(weights[name] for name in names)
