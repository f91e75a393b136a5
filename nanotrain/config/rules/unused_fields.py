"""What a rule of fields without effect says of them."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Unused:
    """Fields that have no effect."""

    fields: tuple[str, ...]  # their unique names
    causes: tuple[str, ...]  # unique names of the fields that decide
    why: str  # the reason
    fix: str = ""  # how the fields get an effect; empty: change the causes
    # published scripts of Megatron-LM set the fields all the same: reset, not refused
    is_harmless: bool = False


UnusedFields = Iterator[Unused]  # what a function of rules returns


def unused(
    *fields: str, by: str | tuple[str, ...], why: str, fix: str = "", is_harmless: bool = False
) -> Unused:
    """Fields without effect, switched off `by` another field, or by several together."""
    causes = (by,) if isinstance(by, str) else by
    return Unused(fields, causes, why, fix=fix, is_harmless=is_harmless)
