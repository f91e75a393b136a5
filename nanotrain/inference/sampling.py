"""How the next token is chosen: the options, checked wherever they are made.

    logits -> repetition_penalty -> temperature -> top_k -> top_p -> one token

The command line, the lm-eval adapter and Python make the same `Sampling`, so a value out of its
limits is the same error in each.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real

from nanotrain.errors import ConfigError


@dataclass(frozen=True)
class Limit:
    """The values that an option may have."""

    what: str  # the option in errors
    low: float
    high: float

    @property
    def is_whole(self) -> bool:
        """Whether only whole numbers are allowed."""
        return isinstance(self.low, int)

    def holds(self, value: object) -> bool:
        """Whether a value is a number within the limits; True and False are none."""
        kind = Integral if self.is_whole else Real
        if isinstance(value, bool) or not isinstance(value, kind):
            return False
        return self.low <= float(value) <= self.high


# by the fields of `Sampling`
LIMITS = {
    "temperature": Limit("number of at least 0", 0.0, 1e308),
    "top_k": Limit("whole number of at least 1", 1, 999_999_999_999),
    "top_p": Limit("probability: it is above 0 and at most 1", 1e-307, 1.0),
    "repetition_penalty": Limit("number above 0", 1e-307, 1e308),
    "seed": Limit("whole number of at least 0 and below 10^18", 0, 999_999_999_999_999_999),
}
TOKEN = Limit("token id", 0, 1 << 62)
OPTIONAL = {"top_k", "top_p", "repetition_penalty"}  # None switches them off


@dataclass(frozen=True)
class Sampling:
    """Options of sampling.

    Raises:
        ConfigError: a value out of its limits.
    """

    temperature: float = 1.0  # divides the logits; 0 is greedy
    top_k: int | None = None  # sample among the k most likely tokens; None for all
    # nucleus sampling (Holtzman et al. 2020): among the fewest most likely tokens whose
    # probabilities sum to this; None for all
    top_p: float | None = None
    # seed of the random generator of the first prompt; each further prompt has the next one
    seed: int = 0
    # tokens that end the text (the one that ends it is included); None for none
    stop: int | tuple[int, ...] | None = None
    # divides the positive logits of tokens that the text has, and multiplies the negative ones
    # (Keskar et al. 2019, CTRL); None for 1
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        """Check each option against its limits."""
        for name, limit in LIMITS.items():
            value = getattr(self, name)
            if value is None and name in OPTIONAL:
                continue
            if not limit.holds(value):
                raise ConfigError(
                    f"{name} {value!r} is no {limit.what}",
                    fix=f"give another {name}" + (", or None" if name in OPTIONAL else ""),
                )
        for token in self.ends:
            if not TOKEN.holds(token):
                raise ConfigError(
                    f"stop {token!r} is no {TOKEN.what}", fix="give whole numbers of at least 0"
                )

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        if self.stop is None:
            return ()
        return tuple(self.stop) if isinstance(self.stop, Iterable) else (self.stop,)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken; a smaller temperature is 0 in fp32."""
        return self.temperature < 1e-30
