"""Numbers as texts, and their next multiples."""

from hypothesis import given
from hypothesis import strategies as st

from nanotrain.quantities import round_up


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_the_next_multiple_is_at_least_the_number_and_less_than_a_unit_above(
    number: int, unit: int
) -> None:
    multiple = round_up(number, unit)
    assert multiple % unit == 0 and number <= multiple < number + unit
