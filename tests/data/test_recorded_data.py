"""The record of a run's data in a checkpoint."""

import json

import pytest

from nanotrain.data.origin import DataOrigin
from nanotrain.data.recorded_data import (
    CorpusOrder,
    CorpusRecord,
    DataRecord,
    TokenRange,
    read_record,
)

ORDER = CorpusOrder(start=0, stop=100, samples=6, seq_length=16, packing="stream", seed=7)
RECORD = DataRecord(
    24,
    {"data_path": ["a"], "seed": 7},
    (CorpusRecord("a", "f1", 12, ORDER),),
    (TokenRange("f1", 100, 120),),
    DataOrigin(8, {"a": 4}, {"old": "a"}),
)


def test_a_record_survives_json():
    assert read_record(json.loads(json.dumps({"data": RECORD.to_json()}))) == RECORD
    assert read_record({}) is None


@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        ("sample", -1, "sample"),
        ("corpora", 5, "corpora"),
        ("corpora", [{"prefix": 5}], "prefix"),
        ("valid", [{"fingerprint": "f", "start": None}], "start"),
        ("origin", {"sample": 1, "read": 5}, "origin.read"),
        ("settings", [], "settings"),
    ],
)
def test_a_damaged_record_is_named(field, value, fault):
    row = RECORD.to_json() | {"valid": [], "corpora": [], field: value}
    with pytest.raises(ValueError, match=fault):
        read_record({"data": row})


@pytest.mark.parametrize(("start", "stop", "tokens"), [(0, 50, 0), (90, 110, 10), (100, 120, 20)])
def test_the_overlap_is_counted_in_tokens(start, stop, tokens):
    assert TokenRange("f", 100, 120).overlap(start, stop) == tokens
