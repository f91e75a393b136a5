"""A rule is data: its fields exist, its predicate reads values by name, its texts are filled in."""

import pytest

from nanotrain.config.config import Config
from nanotrain.config.rules.layout import LAYOUT_RULES
from nanotrain.config.rules.model import HEAD_RULES, MLA_RULES, MOE_RULES, POSITION_RULES
from nanotrain.config.rules.rule import Rule, Values, check_rules
from nanotrain.config.rules.run import RUN_RULES
from nanotrain.config.schema import ENTRIES
from nanotrain.errors import ConfigErrors, ErrorCollector
from tests.config.asking import config_of

TABLES = (POSITION_RULES, HEAD_RULES, MLA_RULES, MOE_RULES, LAYOUT_RULES, RUN_RULES)


def test_every_rule_names_fields_that_exist():
    for rule in (rule for table in TABLES for rule in table):
        assert rule.fields and not set(rule.fields.split()) - ENTRIES.keys(), rule


def test_values_have_fields_by_name_and_derived_sizes():
    values = Values(config_of(num_experts=8, moe_router_num_groups=4, tensor_model_parallel_size=2))
    assert (values.num_experts, values.experts_per_group, values.tp, values.etp) == (8, 2, 2, 2)
    with pytest.raises(AttributeError):
        _ = values.no_such_field


def test_all_broken_rules_are_collected_with_their_numbers():
    small = Rule("lr", lambda v: v.lr < 1, "lr is {lr:g}", "it is small", lambda v: f"set --lr {v.lr * 10:g}")
    short = Rule("train_iters", lambda v: True, "{train_iters} steps", "too few", "train longer")
    fine = Rule("seed", lambda v: False, "never", "never", "never")
    errors = ErrorCollector()
    check_rules(Config(), (small, short, fine), errors=errors)
    assert [str(error) for error in errors.errors] == [
        "lr is 0.0003: it is small; set --lr 0.003",
        "100 steps: too few; train longer",
    ]
    with pytest.raises(ConfigErrors):
        errors.raise_errors()
