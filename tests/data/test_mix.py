"""Requests to change a blend, and what is refused."""

import json
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from nanotrain.config.config import DataConfig
from nanotrain.config.data_stages import read_stages, stage_bounds
from nanotrain.data.blend import BlendedDataset, StageBlend
from nanotrain.data.build import build_data
from nanotrain.data.gpt import GPTDataset
from nanotrain.data.indexed import IndexedTokens
from nanotrain.data.mix import (
    REQUEST,
    is_recorded,
    read_request,
    record_mix,
    remove_request,
    request_mix,
    require_mixable,
    stages_of,
    with_mix,
    with_recorded_mix,
)
from nanotrain.errors import ConfigError, DataError
from tests.data.conftest import WriteCorpus


def test_each_reason_is_named(write_corpus: WriteCorpus, tmp_path: Path) -> None:
    corpora = [IndexedTokens(write_corpus([np.arange(99)], name=name)) for name in ("web", "math")]
    web, math = (GPTDataset(c, 0, c.num_tokens, DataConfig(), vocab_size=100) for c in corpora)
    blend = BlendedDataset.by_weight([web, math], [Fraction(1), Fraction(1)])
    changing = with_mix(blend, ["1", "math"], sample=10).starting_at([(0, None), (10, 30)])
    with pytest.raises(
        DataError, match="books is no corpus of the run: the corpora of the run are .*web, .*math"
    ):
        with_mix(blend, ["1", "books"], sample=9)
    with pytest.raises(DataError, match="the run has one corpus"):
        with_mix(web, ["1", "web"], sample=9)
    with pytest.raises(DataError, match="the weights change until sample 30"):
        with_mix(changing, ["1", "web"], sample=20)
    assert [stage.start for stage in with_mix(changing, ["1", "web"], sample=40).stages] == [
        0,
        10,
        40,
    ]
    with pytest.raises(ConfigError, match="every corpus has a weight before it"):
        request_mix(tmp_path, ["web"], step=None)
    assert read_request(tmp_path) is None
    (tmp_path / REQUEST).write_text('{"weights": [1]}')
    with pytest.raises(
        DataError, match="data-mix.request cannot be read: weights is 1, it must be text"
    ):
        read_request(tmp_path)
    assert not (tmp_path / REQUEST).exists()


def test_the_last_change_that_was_recorded_counts(
    write_corpus: WriteCorpus, tmp_path: Path
) -> None:
    corpora = [IndexedTokens(write_corpus([np.arange(99)], name=name)) for name in ("web", "math")]
    parts = [GPTDataset(c, 0, c.num_tokens, DataConfig(), vocab_size=100) for c in corpora]
    mixed = with_mix(
        BlendedDataset.by_weight(parts, [Fraction(1, 3), Fraction(2)]), ["1", "math"], sample=10
    )
    plain = DataConfig(train_data_path=["a", "b"])
    assert with_recorded_mix(plain, tmp_path) is plain
    record_mix(tmp_path, ["a@0samples: 1 x"], step=2)
    record_mix(tmp_path, stages_of(mixed), step=5)
    data = with_recorded_mix(plain, tmp_path)
    prefixes = [corpus.prefix for corpus in corpora]
    expected = [
        f"start@0samples: 1/3 {prefixes[0]} 2 {prefixes[1]}",
        f"mix-1@10samples: 1 {prefixes[1]}",
    ]
    assert data.stages == expected and not data.train_data_path
    assert (
        data.split == "1"
        and with_recorded_mix(DataConfig(data_path=["a"]), tmp_path).split == DataConfig().split
    )


@pytest.mark.parametrize(
    ("stages", "why"),
    [
        (5, "stages is 5, it must be a list"),
        ([5], "stages is 5, it must be text"),
        (["a@0: s3://host/web"], "it names s3://host/web, which the command line does not"),
    ],
)
def test_a_recorded_mix_that_cannot_be_trusted_is_an_error(
    stages: object, why: str, tmp_path: Path
) -> None:
    (tmp_path / "data-mix.jsonl").write_text(json.dumps({"step": 1, "stages": stages}) + "\n")
    with pytest.raises(DataError, match=why):
        with_recorded_mix(DataConfig(data_path=["web"]), tmp_path)


def test_a_recorded_mix_keeps_addresses_of_the_command_line(tmp_path: Path) -> None:
    stages = ["a@0: 1 s3://b/web 2 s3://b/code"]
    record_mix(tmp_path, stages, step=1)
    data = DataConfig(data_path=["0.5 s3://b/web", "0.5", "s3://b/code"])
    assert with_recorded_mix(data, tmp_path).stages == stages


def test_a_request_is_removed_when_it_is_recorded_and_no_other_is(tmp_path: Path) -> None:
    request_mix(tmp_path, ["1", "math"], step=3)
    request = read_request(tmp_path)
    assert request is not None and (request.weights, request.step) == (("1", "math"), 3)
    assert not is_recorded(tmp_path, request) and read_request(tmp_path) == request
    record_mix(tmp_path, ["a@0samples: 1 x"], step=3, number=request.number)
    assert is_recorded(tmp_path, request)
    request_mix(tmp_path, ["1", "math"], step=3)  # the same words, asked for again
    remove_request(tmp_path, request)
    again = read_request(tmp_path)
    assert again is not None and not is_recorded(tmp_path, again)
    remove_request(tmp_path, again)
    assert not (tmp_path / REQUEST).exists()
    (tmp_path / REQUEST).write_text('{"weights": ["1", "math"], "step": null}')  # an older version
    old = read_request(tmp_path)
    assert old is not None and not is_recorded(tmp_path, old)


def test_a_folder_without_a_record_has_the_stages_of_its_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = DataConfig(data_path=["1", "a", "1", "b"])
    saved = ["start@0samples: 1 a 1 b", "mix-1@8samples: 1 b"]
    assert with_recorded_mix(data, tmp_path, saved=saved).stages == saved
    with caplog.at_level("INFO", "nanotrain"):
        other = DataConfig(data_path=["1", "a", "1", "c"])
        assert with_recorded_mix(other, tmp_path, saved=saved) is other
    assert "is left out: it is one of other corpora" in caplog.text
    record_mix(tmp_path, ["start@0samples: 1 a 1 b", "mix-1@4samples: 1 a"], step=3)
    assert with_recorded_mix(data, tmp_path, saved=saved).stages[1] == "mix-1@4samples: 1 a"


ASKED = ["1", "web", "1", "math"]


@pytest.fixture
def staged(write_corpus: WriteCorpus) -> BlendedDataset:
    """Four stages, of which the third changes linearly."""
    corpora = [
        IndexedTokens(write_corpus([np.arange(2000) % 100], name=name)) for name in ("web", "math")
    ]
    web, math = (GPTDataset(c, 0, c.num_tokens, DataConfig(), vocab_size=100) for c in corpora)
    stages = [
        StageBlend("first", 0, (0, 1), (Fraction(1), Fraction(3))),
        StageBlend("second", 20, (1,), (Fraction(2),)),
        StageBlend("third", 40, (0, 1), (Fraction(3), Fraction(1)), end=60),
        StageBlend("fourth", 80, (0,), (Fraction(1),)),
    ]
    return BlendedDataset([web, math], stages)


def share_of_web(blend: BlendedDataset, sample: int) -> Fraction:
    return blend.stage_at(sample).share_of(0)


@pytest.mark.parametrize("sample", [1, 20, 30, 40, 60, 70, 80, 90])
def test_a_change_lasts_until_the_next_stage_and_keeps_every_other(
    staged: BlendedDataset, sample: int
) -> None:
    mixed = with_mix(staged, ASKED, sample=sample)
    starts = [stage.start for stage in staged.stages]
    until = next((start for start in starts if start > sample), 100)
    # a linear change begins at the weights before it, which may be those that were asked for
    changing = range(40, 60) if until == 40 else range(0)
    for index in range(100):
        share = share_of_web(mixed, index)
        if sample <= index < until:
            assert share == Fraction(1, 2), index
        elif index in changing:
            assert Fraction(1, 2) <= share <= Fraction(3, 4), index
        else:
            assert share == share_of_web(staged, index), index
    names = [stage.name for stage in mixed.stages if not stage.name.startswith("mix")]
    assert names == [stage.name for stage in staged.stages if stage.start != sample]
    # no sample of a corpus is read twice or left out at the borders
    read: list[list[int]] = [[], []]
    for index in range(100):
        source, own = mixed.locate(index)
        read[source].append(own)
    assert all(own == list(range(len(own))) for own in read)
    assert [len(own) for own in read] == mixed.read_by(100)


def test_a_corpus_that_is_named_twice_has_the_sum_of_its_weights(staged: BlendedDataset) -> None:
    prefix = str(staged.datasets[0].corpus.prefix)
    mixed = with_mix(staged, ["1", "web", "1", "math", "2", prefix], sample=30)
    assert share_of_web(mixed, 30) == Fraction(3, 4)


def test_changes_in_any_order_are_the_same_blend(staged: BlendedDataset) -> None:
    later_first = with_mix(with_mix(staged, ["1", "math"], sample=70), ASKED, sample=30)
    earlier_first = with_mix(with_mix(staged, ASKED, sample=30), ["1", "math"], sample=70)
    both = [
        [(stage.start, stage.end, stage.sources, stage.weights) for stage in blend.stages]
        for blend in (later_first, earlier_first)
    ]
    assert both[0] == both[1]
    assert all(before.start < after.start for before, after in pairwise(later_first.stages))
    again = with_mix(later_first, ["1", "web"], sample=30)
    assert share_of_web(again, 30) == 1 and share_of_web(again, 70) == 0


@pytest.mark.parametrize("sample", [30, 70, 90])
def test_a_recorded_change_is_read_as_it_was_made(
    staged: BlendedDataset, tmp_path: Path, sample: int
) -> None:
    mixed = with_mix(staged, ASKED, sample=sample)
    record_mix(tmp_path, stages_of(mixed), step=3)
    prefixes = [str(part.corpus.prefix) for part in mixed.datasets]
    data = with_recorded_mix(DataConfig(data_path=prefixes, split="1", seq_length=16), tmp_path)
    splits = build_data(data, required={"train"}, vocab_size=100, seed=0)
    assert isinstance(splits.train, BlendedDataset)
    bounds = stage_bounds(read_stages(data.stages), lambda step: step)
    again = splits.train.starting_at(bounds)
    assert [again.locate(index) for index in range(120)] == [
        mixed.locate(index) for index in range(120)
    ]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"done": 9}, "no step of the run can take the weights: step 9 of 9 is done"),
        ({"step": 10}, "no step of the run can take the weights"),
        ({"weights": ["1", "books"]}, "books is no corpus of the run: .* are code, web"),
        ({"data": DataConfig(data_path=["web"])}, "the run has one corpus"),
    ],
)
def test_a_request_that_no_job_can_take_is_refused(changes: dict, fault: str) -> None:
    sound = {
        "data": DataConfig(data_path=["1", "web", "2", "code"]),
        "weights": ["0.5", "web", "0.5", "code"],
        "step": None,
        "done": 8,
        "train_iters": 9,
    }
    require_mixable(**sound)
    with pytest.raises(DataError, match=fault):
        require_mixable(**sound | changes)
