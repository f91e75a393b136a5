"""Weights of corpora in the loss: how entries are read, and the factor of every sample."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from nanotrain.config.config import DataConfig
from nanotrain.data.batch import Sample, collate
from nanotrain.data.blend import BlendedDataset, StageBlend
from nanotrain.data.build import build_data
from nanotrain.data.loss_weights import parse_loss_weights
from nanotrain.errors import ConfigError
from tests.laws.worlds import UnevenDataset

NAMES = ("web", "code", "math")


def test_weights_are_in_the_order_of_the_corpora() -> None:
    entries = ["math=2", "web=.5", "code=0.25"]
    assert parse_loss_weights(entries, NAMES) == (Fraction(1, 2), Fraction(1, 4), Fraction(2))


@pytest.mark.parametrize(
    ("entries", "names", "what"),
    [
        (["web=1"], ("web",), "without a blend"),
        (["web=1", "code=0", "math=1"], NAMES, "code=0 cannot be read"),
        (["web=1", "code=-1", "math=1"], NAMES, "code=-1 cannot be read"),
        (["web", "code=1", "math=1"], NAMES, "web cannot be read"),
        (["web=1", "web=2", "code=1", "math=1"], NAMES, "web=2 cannot be read"),
        (["web=1", "code=1"], NAMES, "math without a weight"),
        (["web=1", "code=1", "math=1", "books=1"], NAMES, "no corpus books"),
    ],
)
def test_other_entries_are_one_message(entries, names, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        parse_loss_weights(entries, names)


def blend_of_two_stages() -> BlendedDataset:
    """Half and half, then three quarters of the first of two others."""
    datasets = [UnevenDataset(samples_per_epoch=100, seq_length=8) for _ in NAMES]
    stages = [
        StageBlend("a", 0, (0, 1), (Fraction(1), Fraction(1))),
        StageBlend("b", 40, (1, 2), (Fraction(3), Fraction(1))),
    ]
    weights = parse_loss_weights(["web=1", "code=3", "math=2"], NAMES)
    return BlendedDataset(datasets, stages, loss_weights=weights)


def test_a_sample_counts_as_its_weight_over_its_share_in_its_stage() -> None:
    blend = blend_of_two_stages()
    factors = {
        (0, 0): 1 / 4 / 0.5,
        (1, 0): 3 / 4 / 0.5,
        (1, 40): 3 / 5 / 0.75,
        (2, 40): 2 / 5 / 0.25,
    }
    for (source, index), factor in factors.items():
        assert blend.loss_factor(source, index) == pytest.approx(factor)
    for index in range(80):
        source, sample = blend.locate(index)
        factor = factors[source, 40 * (index // 40)]
        expected = blend.datasets[source][sample].loss_mask * np.float32(factor)
        assert np.array_equal(blend[index].loss_mask, expected)
        assert blend[index].loss_mask.dtype == np.float32


def test_the_mean_factor_of_a_stage_is_one() -> None:
    blend = blend_of_two_stages()
    for start in (0, 40):
        factors = [
            blend.loss_factor(blend.locate(index)[0], index) for index in range(start, start + 40)
        ]
        assert np.mean(factors) == pytest.approx(1.0)


def test_other_stages_keep_the_weights() -> None:
    blend = blend_of_two_stages()
    for other in (
        blend.with_stages(blend.stages),
        blend.starting_at([(0, None), (20, None)]),
        blend.continued(10, [5, 5, 0]),
    ):
        assert other.loss_weights == blend.loss_weights
    assert blend.with_stages(blend.stages).with_loss_weights(()).loss_weights == ()


def test_target_tokens_are_counted_not_weighted() -> None:
    mask = np.array([0.0, 0.5, 2.5, 0.0], dtype=np.float32)
    tokens = np.zeros(4, dtype=np.int64)
    batch = collate([Sample(tokens, tokens, mask)])
    assert float(batch.num_target_tokens) == 2.0
    (shifted,) = batch.with_mtp(1).mtp
    assert float(shifted.num_target_tokens) == 2.0
    assert shifted.loss_mask.tolist() == [[0.5, 2.5, 0.0, 0.0]]


def test_the_training_split_alone_has_weights(write_corpus, tmp_path: Path) -> None:
    for name in ("web", "code"):
        write_corpus([list(range(200)), list(range(90))], name=name)
    prefixes = [str(tmp_path / name) for name in ("web", "code")]
    data = DataConfig(
        data_path=["0.5", prefixes[0], "0.5", prefixes[1]],
        loss_weights=["web=3", "code=1"],
        seq_length=16,
        split="1,1,0",
    )
    splits = build_data(data, vocab_size=300, seed=0)
    train = splits.train
    valid = splits.valid
    assert isinstance(train, BlendedDataset) and isinstance(valid, BlendedDataset)
    assert {float(train[index].loss_mask.max()) for index in range(6)} == {1.5, 0.5}
    assert not valid.loss_weights
