"""A rule is data: its predicate reads values by name, its texts are filled in."""

import re

import pytest

from nanotrain.config.config import Config
from nanotrain.config.rules.rule import Rule, check_rules
from nanotrain.config.rules.sizes import Values
from nanotrain.config.schema import ENTRIES
from nanotrain.config.tables import read_table
from nanotrain.errors import ConfigErrors, ErrorCollector
from tests.config.asking import config_of


def test_values_have_fields_by_name_and_derived_sizes():
    values = Values(config_of(num_experts=8, moe_router_num_groups=4, tensor_model_parallel_size=2))
    assert (values.num_experts, values.experts_per_group, values.tp, values.etp) == (8, 2, 2, 2)
    with pytest.raises(AttributeError):
        _ = values.no_such_field


def test_all_broken_rules_are_collected_with_their_numbers():
    small = Rule(
        "lr is below 1",
        "lr is {lr:g}",
        "it is small",
        "set --num-layers {num_layers:multiple of 3}",
    )
    short = Rule(
        "train_iters is 100", "{train_iters:# step|is} few", "one epoch has more", "train longer"
    )
    fine = Rule("lr is above 1", "never", "never", "never")
    errors = ErrorCollector()
    check_rules(Config(), (small, short, fine), errors=errors)
    assert [str(error) for error in errors.errors] == [
        "lr is 0.0003: it is small; set --num-layers 6",
        "100 steps are few: one epoch has more; train longer",
    ]
    with pytest.raises(ConfigErrors):
        errors.raise_errors()


def test_a_rule_on_a_field_that_could_not_be_read_is_left_out():
    rules = [
        Rule("head_dim is above 0", "head", "", ""),
        Rule("lr is above 0", "{hidden_size}", "", ""),
    ]
    for unreadable, count in (
        (frozenset(), 2),
        (frozenset({"hidden_size"}), 0),
        (frozenset({"lr"}), 1),
    ):
        errors = ErrorCollector()
        check_rules(Config(), rules, errors=errors, unreadable=unreadable)
        assert len(errors.errors) == count, unreadable


@pytest.mark.parametrize("group", ["model", "run", "layout"])
def test_contradictions_name_values_that_exist(group):
    values = Values(Config())
    for row in read_table("contradictions")[group]:
        for term in re.split(" and | or ", row["where"]):
            pattern = r"(\w+) (?:is (?:not )?)?(?:(above|below|a multiple of|includes) )?(.+)"
            name, word, bound = re.fullmatch(pattern, term).groups()
            choices = ENTRIES[name].choices if name in ENTRIES and not word else ()
            assert hasattr(values, name) and (
                not choices or set(bound.split(", ")) <= {*choices, "unset"}
            ), term
            assert word in (None, "includes") or hasattr(values, bound) or float(bound) >= 0, term
        named = re.findall(r"{([a-z_]\w*)", row["what"] + row["why"] + row["fix"])
        assert all(hasattr(values, name) for name in named), row
