"""The section of the run: which values its fields refuse, and which one is a secret."""

import pytest

from nanotrain.config.load import load
from nanotrain.config.schema import ENTRIES, config_from_dict
from nanotrain.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value", "requirement"),
    [
        ("train_iters", 10**12 + 1, "must be at least 0 and at most 1000000000000"),
        ("rollback_on_spike", 1.0, "must be above 1"),
        ("replay_interval", -1, "must be at least 0"),
        ("prometheus_port", 65536, "must be at least 1 and at most 65535"),
        ("notify", "ftp://host", "must begin with http"),
        ("device", "mps", "auto, cpu, cuda"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_the_bound(name, value, requirement):
    with pytest.raises(ConfigError, match=requirement):
        config_from_dict({"train": {name: value}})


def test_replays_are_off_unless_an_interval_is_set():
    line = "--mock-data --vocab-size 300"
    assert load(line.split()).config.train.replay_interval == 0
    assert load(f"{line} --replay-interval 100".split()).config.train.replay_interval == 100
    for value in ("-1", "often", "1.5"):
        with pytest.raises(ConfigError, match="replay_interval"):
            load(f"{line} --replay-interval {value}".split())


def test_only_the_address_of_messages_is_a_secret():
    assert [entry.name for entry in ENTRIES.values() if entry.secret] == ["notify"]
