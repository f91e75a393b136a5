"""Patterns and layouts of compressed attention; messages.json has the other errors."""

import pytest

from nanotrain.config.load import load
from nanotrain.errors import ConfigError

WORDS = (
    "--mock-data --vocab-size 64 --num-layers 4 --hidden-size 64 --num-attention-heads 4 "
    "--num-query-groups 1 --sparse-attention-type compressed --window-size 7 "
    "--compressed-output-groups 2 --compressed-heavy-ratio 16 --dsa-indexer-head-dim 16"
)


def problems(words: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(f"{WORDS} {words}".split())
    return str(error.value)


def test_a_pattern_has_known_letters_and_whole_groups_of_layers() -> None:
    assert load(WORDS.split()).config.model.mixers == ("hca", "hca", "hca", "csa")
    repeated = load(f"{WORDS} --compressed-layer-pattern WC".split()).config.model
    assert repeated.mixers == ("sliding", "csa", "sliding", "csa")
    for pattern in ("WCH", "WCXH"):
        assert f"compressed_layer_pattern is '{pattern}'" in problems(
            f"--compressed-layer-pattern {pattern}"
        )


def test_a_chunk_over_cp_has_the_tokens_of_a_window() -> None:
    words = "--context-parallel-size 2 --cp-comm-type allgather --seq-length"
    message = problems(f"{words} 56")
    assert "attention with compressed keys sees 15 tokens before its own" in message
    load(f"{WORDS} {words} 64".split())
    assert "cp_comm_type p2p" in problems("--context-parallel-size 2 --seq-length 64")
