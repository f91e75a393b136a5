"""The section of the datasets: which values its fields refuse, and which are paths."""

import pytest

from nanotrain.config.schema import ENTRIES, config_from_dict
from nanotrain.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value", "requirement"),
    [
        ("seq_length", 0, "must be at least 1"),
        ("fim_rate", 1.5, "must be at least 0 and at most 1"),
        ("num_workers", 257, "must be at least 0 and at most 256"),
        ("packing", "first_fit", "stream, best_fit"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_the_bound(name, value, requirement):
    with pytest.raises(ConfigError, match=requirement):
        config_from_dict({"data": {name: value}})


def test_a_tokenizer_may_be_an_address_and_a_vocabulary_file_may_not():
    assert ENTRIES["tokenizer_model"].takes_address
    assert ENTRIES["vocab_file"].is_path and not ENTRIES["vocab_file"].takes_address
