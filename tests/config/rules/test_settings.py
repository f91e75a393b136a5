"""Sizes that follow from fields, and fields that could not be read."""

import pytest

from nanotrain.config.config import Config
from nanotrain.config.rules.check import check_rules
from nanotrain.config.rules.settings import Settings, Unreadable
from nanotrain.errors import ErrorCollector
from tests.config.asking import config_of


def test_absent_sections_have_their_defaults_and_axes_short_names() -> None:
    settings = Settings(config_of(tensor_model_parallel_size=2))
    assert (settings.tp, settings.etp, settings.moe.router_topk) == (2, 2, 2)
    assert not settings.has_experts and not settings.has_fp8


@pytest.mark.parametrize(
    ("unreadable", "is_checked"),
    [(set(), True), ({"hidden_size"}, False), ({"moe_router_topk"}, False), ({"lr"}, True)],
)
def test_sizes_that_follow_from_a_field_that_could_not_be_read_are_unreadable(
    unreadable: set[str], is_checked: bool
) -> None:
    settings = Settings(Config(), frozenset(unreadable))
    assert settings.model.num_layers == 4
    if is_checked:
        assert settings.model.head_dim == 64
    else:
        with pytest.raises(Unreadable):
            _ = settings.model.head_dim


def test_a_rule_on_a_field_that_could_not_be_read_is_left_out() -> None:
    config = config_of(min_lr=1.0, seq_length=2048)
    for unreadable, expected in (
        (set(), ["min_lr 1 is above lr 0.0003: lr is the peak; set --min-lr or --lr"]),
        ({"lr"}, []),
    ):
        errors = ErrorCollector()
        check_rules(config, "run", errors=errors, unreadable=frozenset(unreadable))
        assert [str(error) for error in errors.errors] == expected
