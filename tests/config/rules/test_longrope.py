"""Rules of LongRoPE: just allowed, and just refused."""

from typing import Any

import pytest

from nanotrain.config.load import load
from nanotrain.errors import ConfigError
from tests.config.rules.test_boundaries import messages_of

LONGROPE: dict[str, Any] = {
    "position_embedding_type": "longrope",
    "longrope_short_factor": [1.0] * 32,
    "longrope_long_factor": [2.0] * 32,
    "longrope_original_max_positions": 128,
}
WINDOWS: dict[str, Any] = {"window_size": 8, "window_attn_skip_freq": "2"}
# settings, and a part of the message; "" where they are allowed
CASES: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"longrope_short_factor": [1.0] * 31}, "longrope_short_factor has 31 numbers"),
    ({"longrope_long_factor": []}, "longrope_long_factor has 0 numbers"),
    ({"reset_position_ids": True}, "longrope with reset_position_ids and seq_length 256"),
    ({"reset_position_ids": True, "seq_length": 128}, ""),
    ({"rotary_percent": 0.5}, "longrope_short_factor has 32 numbers"),
    ({**WINDOWS, "window_rotary_percent": 0.5}, "longrope with 16 pairs of rotated channels"),
    ({**WINDOWS, "window_rotary_percent": 0.5, "rotary_base_local": 100.0}, ""),
]


@pytest.mark.parametrize("settings, part", CASES)
def test_settings_are_allowed_or_refused(settings: dict[str, Any], part: str) -> None:
    found = messages_of("model", LONGROPE | settings)
    assert any(part in text for text in found) if part else found == []


def test_a_share_of_the_pairs_is_refused() -> None:
    factors = " ".join(["1"] * 8)
    words = (
        "--mock-data --vocab-size 64 --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
        f"--position-embedding-type longrope --longrope-short-factor {factors} "
        f"--longrope-long-factor {factors}"
    )
    load(words.split())
    with pytest.raises(ConfigError, match="rotary_proportional = true has no effect: longrope"):
        load(f"{words} --rotary-proportional --rotary-percent 0.5".split())
