"""Rules of the run, of fp8 and of data parallelism: every contradiction is one error that names the
cure.
"""

import pytest

from nanotrain.config.rules.run import is_split
from nanotrain.errors import ConfigError, ConfigErrors
from tests.config.asking import config_of, validate


@pytest.mark.parametrize(
    ("text", "valid"), [("1", True), ("8,1,1", True), ("1,0", True), ("0,1", False), (",", False)]
)
def test_a_split_has_up_to_three_proportions(text, valid):
    assert is_split(text) is valid


@pytest.mark.parametrize("text", ["1,1,1,1", "1,-1", "nan", "inf,1", "a,b"])
def test_other_texts_are_no_split(text):
    assert not is_split(text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"decoupled_lr": 1e-4, "decoupled_min_lr": 1e-3},
            "decoupled_min_lr 0.001 is above decoupled_lr 0.0001",
        ),
        (
            {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.5},
            "optimizer_offload_fraction 1.5 is above 1",
        ),
        ({"optimizer_cpu_offload": True, "device": "cpu"}, "optimizer_cpu_offload has no effect"),
        ({"decoupled_lr": 1e-5, "min_lr": 1e-4}, "min_lr 0.0001 is above decoupled_lr 1e-05"),
        (
            {"decoupled_lr": 1e-5, "lr_warmup_iters": 2, "lr_warmup_init": 1e-4},
            "is above decoupled_lr 1e-05",
        ),
    ],
)
def test_bounds_of_learning_rates_and_offload(fields, message):
    validate(
        config_of(decoupled_lr=1e-4, decoupled_min_lr=1e-5, lr_warmup_iters=2, lr_warmup_init=1e-5)
    )
    with pytest.raises(ConfigError, match=message):
        validate(config_of(**fields))


def test_several_broken_rules_are_one_error():
    config = config_of(
        min_lr=1.0, split="0", load="a", pretrained_checkpoint="b", profile=True, train_iters=2
    )
    with pytest.raises(ConfigErrors) as caught:
        validate(config)
    assert len(caught.value.errors) == 4
