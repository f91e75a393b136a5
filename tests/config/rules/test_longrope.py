"""Rules of LongRoPE: just allowed, and just refused."""

from typing import Any

import pytest

from tests.config.rules.test_boundaries import messages_of

LONGROPE: dict[str, Any] = {
    "position_embedding_type": "longrope",
    "longrope_short_factor": [1.0] * 32,
    "longrope_long_factor": [2.0] * 32,
    "longrope_original_max_positions": 128,
}
# settings, and a part of the message; "" where they are allowed
CASES: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"longrope_short_factor": [1.0] * 31}, "longrope_short_factor has 31 numbers"),
    ({"longrope_long_factor": []}, "longrope_long_factor has 0 numbers"),
    ({"reset_position_ids": True}, "longrope with reset_position_ids and seq_length 256"),
    ({"reset_position_ids": True, "seq_length": 128}, ""),
    ({"rotary_percent": 0.5}, "longrope_short_factor has 32 numbers"),
]


@pytest.mark.parametrize("settings, part", CASES)
def test_settings_are_allowed_or_refused(settings: dict[str, Any], part: str) -> None:
    found = messages_of("model", LONGROPE | settings)
    assert any(part in text for text in found) if part else found == []
