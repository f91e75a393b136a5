"""A blend keeps its proportions over every prefix and reads each dataset in order, without gaps."""

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanotrain.config.config import DataConfig
from nanotrain.data.batch import Sample
from nanotrain.data.blend import BlendedDataset, StageBlend, locate, plan_blend
from nanotrain.data.build import build_data
from nanotrain.data.run_tokenizer import first_blend
from nanotrain.errors import ConfigError
from tests.data.conftest import WriteCorpus

WEIGHTS = st.lists(
    st.fractions(min_value=Fraction(1, 1000), max_value=1000, max_denominator=1000),
    min_size=1,
    max_size=9,
)


@settings(deadline=None, max_examples=50)
@given(weights=WEIGHTS)
def test_any_prefix_has_its_share_within_two_samples(weights: list[Fraction]) -> None:
    tree, total = plan_blend(weights), sum(weights)
    counts = [0] * len(weights)
    for number in range(300):
        dataset, sample = locate(tree, number)
        assert sample == counts[dataset], "a dataset is read in order, without gaps or repeats"
        counts[dataset] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - (number + 1) * weight / total) <= 2


@settings(deadline=None)
@given(weights=WEIGHTS, number=st.integers(10**18, 10**19))
def test_nothing_drifts_after_a_quintillion_samples(weights: list[Fraction], number: int) -> None:
    dataset, sample = locate(plan_blend(weights), number)
    assert abs(sample - number * weights[dataset] / sum(weights)) <= 2


def test_a_blend_of_one_is_that_corpus() -> None:
    assert locate(plan_blend([Fraction(3)]), 17) == (0, 17)


@dataclass(frozen=True)
class _Numbers:
    corpus: int
    samples_per_epoch: int

    def __getitem__(self, sample_number: int) -> Sample:
        ids = np.array([self.corpus, sample_number])
        return Sample(ids, ids, loss_mask=np.ones(2, dtype=np.float32))


@pytest.mark.parametrize("number", [0, 1, 99, 12345])
def test_blended_samples_come_from_the_drawn_corpus(number: int) -> None:
    weights = [Fraction(7, 10), Fraction(3, 10)]
    blend = BlendedDataset.by_weight([_Numbers(0, 10), _Numbers(1, 20)], weights)
    assert blend.samples_per_epoch == 30
    assert blend[number].tokens.tolist() == list(locate(plan_blend(weights), number))


class Numbered:
    """A source whose samples are their indices."""

    samples_per_epoch = 1000

    def __getitem__(self, index: int) -> int:
        return index


def staged(*starts: int) -> BlendedDataset:
    weights = ((3, 1), (1, 1), (2,), (1, 2))
    sources = ((0, 1), (1, 2), (0,), (2, 0))
    stages = [
        StageBlend(f"stage {k}", start, sources[k], tuple(map(Fraction, weights[k])))
        for k, start in enumerate(starts)
    ]
    return BlendedDataset([Numbered(), Numbered(), Numbered()], stages)


def test_each_source_goes_on_where_it_stopped_and_each_stage_has_its_proportions() -> None:
    dataset = staged(0, 41, 100, 131)
    read = [dataset.locate(index) for index in range(300)]
    for source in range(3):
        samples = [sample for place, sample in read if place == source]
        assert samples == list(range(len(samples))), "every sample once, in order"
    for first, last, shares in (
        (0, 41, {0: 0.75, 1: 0.25}),
        (41, 100, {1: 0.5, 2: 0.5}),
        (131, 300, {2: 1 / 3}),
    ):
        counts = Counter(place for place, _ in read[first:last])
        for source, share in shares.items():
            assert abs(counts[source] - share * (last - first)) <= 1
    assert {dataset.stage_at(index).name for index in range(100, 131)} == {"stage 2"}
    assert dataset[131] == read[131][1]


def test_weights_change_linearly_from_one_stage_to_the_next() -> None:
    # given a source that gives way to two others between samples 1,000 and 5,000
    first = StageBlend("first", 0, (0,), (Fraction(1),))
    second = StageBlend("second", 1000, (1, 2), (Fraction(3), Fraction(1)), end=5000)
    dataset = BlendedDataset([Numbered(), Numbered(), Numbered()], [first, second])
    read = [dataset.locate(index) for index in range(8000)]
    for source in range(3):
        samples = [sample for place, sample in read if place == source]
        assert samples == list(range(len(samples))), "every sample once, in order"
    # then their shares follow the line
    for start in range(0, 8000, 400):
        done = min(max((start + 200 - 1000) / 4000, 0.0), 1.0) if not 600 <= start < 1000 else 0.0
        counts = Counter(place for place, _ in read[start : start + 400])
        for source, share in enumerate((1 - done, 0.75 * done, 0.25 * done)):
            assert abs(counts[source] - 400 * share) <= 22, (start, source)
    assert {place for place, _ in read[:1000]} == {0} and 0 not in {
        place for place, _ in read[5000:]
    }
    assert dataset.stage_at(999).name == "first" and dataset.stage_at(1000).name == "second"
    short = dataset.starting_at([(0, None), (3, 8)])  # fewer samples than parts of the change
    assert [short.locate(index)[0] for index in range(3)] == [0, 0, 0] and short.locate(8)[0] != 0


def test_other_starts_are_other_stages_with_the_same_law() -> None:
    moved, same = (
        staged(0, 5, 6, 7).starting_at([(start, None) for start in (0, 41, 100, 131)]),
        staged(0, 41, 100, 131),
    )
    assert [moved.locate(index) for index in range(200)] == [
        same.locate(index) for index in range(200)
    ]


def test_the_data_section_builds_stages_over_corpora_that_are_open_once(
    write_corpus: WriteCorpus,
) -> None:
    web, math = (
        write_corpus([np.arange(start, start + 20) for _ in range(30)], name=name)
        for name, start in names()
    )
    data = DataConfig(
        stages=[f"a@0: {web}", f"b@12samples: 1 {web} 1 {math}", f"c@30samples: {math}"],
        split="8,2,0",
        seq_length=8,
    )
    assert first_blend(data) == [str(web)]
    built = build_data(data, vocab_size=100, seed=1)
    train = built.train
    assert isinstance(train, BlendedDataset) and len(train.datasets) == 2
    kinds = ["web" if train[index].tokens.max() < 40 else "math" for index in range(60)]
    assert (
        kinds[:12] == ["web"] * 12
        and kinds[30:] == ["math"] * 30
        and Counter(kinds[12:30])["web"] == 9
    )
    assert train.samples_per_epoch == 2 * (24 * 20 - 1) // 8 - 1
    assert built.valid.samples_per_epoch == 28, (
        "validation reads the corpora of all stages, by size"
    )
    splits = build_data(
        DataConfig(stages=[f"a@0: {web}"], valid_data_path=[str(math)], seq_length=8),
        vocab_size=100,
        seed=1,
    )
    assert (
        splits.train.samples_per_epoch == (30 * 20 - 1) // 8 and splits.valid[0].tokens.min() >= 50
    )


def test_mistakes_in_the_blends_of_several_stages_are_one_error(write_corpus: WriteCorpus) -> None:
    web = write_corpus([np.arange(200)], name="web")
    data = DataConfig(stages=[f"a@0: 0.5 {web} code", f"b@9: 0 {web}"], seq_length=8)
    with pytest.raises(ConfigError) as caught:
        build_data(data, vocab_size=300, seed=1, required=["train"])
    assert "stage a: " in str(caught.value) and "stage b: " in str(caught.value)


def names() -> tuple[tuple[str, int], ...]:
    return (("web", 0), ("math", 50))


STAGES = st.lists(
    st.tuples(
        st.integers(1, 40),  # samples after the start of the stage before
        st.dictionaries(st.integers(0, 2), st.integers(1, 5), min_size=1),
        st.none() | st.floats(0.1, 1.0),  # part of its samples in which the weights change
    ),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=60)
@given(drawn=STAGES, first=st.integers(0, 60))
def test_what_was_read_by_a_sample_is_what_the_samples_before_it_read(
    drawn: list[tuple[int, dict[int, int], float | None]], first: int
) -> None:
    stages, start = [], 0
    for number, (length, weights, change) in enumerate(drawn):
        end = None if change is None or number == 0 else start + max(1, int(change * length))
        sources = tuple(sorted(weights))
        shares = tuple(Fraction(weights[source]) for source in sources)
        stages.append(StageBlend(str(number), start, sources, shares, end))
        start += length
    read = [5, 0, 2] if first else []
    blend = BlendedDataset([None] * 3, stages, first=first, read=read)  # type: ignore[list-item]
    counts = read or [0, 0, 0]
    for index in range(first, start + 30):
        assert blend.read_by(index) == counts
        source, sample = blend.locate(index)
        now = max(number for number, stage in enumerate(stages) if stage.start <= index)
        before = stages[now - 1].sources if stages[now].end is not None else ()
        assert source in {*stages[now].sources, *before}
        assert blend.stage_at(index).name == str(now)
        assert sample == counts[source]
        counts = [count + (number == source) for number, count in enumerate(counts)]
