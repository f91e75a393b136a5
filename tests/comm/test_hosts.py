"""The address of a host, as others reach it."""

import pytest

from nanotrain.comm.hosts import own_address


def test_the_address_of_a_single_machine_is_that_of_the_meeting_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert own_address() == "localhost"
