"""Rules of the run."""

import pytest

from nanotrain.config.rules.run import is_split
from nanotrain.errors import ConfigErrors
from tests.config.asking import config_of, validate


@pytest.mark.parametrize(("text", "valid"), [("1", True), ("8,1,1", True), ("1,0", True), ("0,1", False), ("", False)])
def test_a_split_has_up_to_three_proportions(text, valid):
    assert is_split(text) is valid


@pytest.mark.parametrize("text", ["1,1,1,1", "1,-1", "nan", "inf,1", "a,b"])
def test_other_texts_are_no_split(text):
    assert not is_split(text)


def test_several_broken_rules_are_one_error():
    config = config_of(min_lr=1.0, split="0", load="a", pretrained_checkpoint="b", profile=True, train_iters=2)
    with pytest.raises(ConfigErrors) as caught:
        validate(config)
    assert len(caught.value.errors) == 4
