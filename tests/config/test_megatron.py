"""The table of Megatron-LM's flags."""

import pytest

from nanotrain.config.arguments import ALIASES, FLAGS, NEGATIONS, SWITCHES
from nanotrain.config.flags import OWN_FLAGS, parse
from nanotrain.config.megatron import MANY, MEGATRON, MEGATRON_DEFAULTS, MEGATRON_REQUIRED, SHAPING
from nanotrain.config.schema import ENTRIES, convert


def test_no_flag_is_both_a_field_and_a_row():
    ours = {*FLAGS, *NEGATIONS, *ALIASES, *OWN_FLAGS, *SWITCHES}
    assert not ours & MEGATRON.keys()


def test_every_row_has_a_sentence_and_an_arity():
    for flag, row in MEGATRON.items():
        assert flag.startswith("--") and row.meaning and row.meaning == row.meaning.strip().rstrip(".")
        assert row.arity in (MANY, 0, 1)
        assert (row.convert is not None) == (row.kind == "rename"), flag
        assert not row.accepts or row.arity == 1, flag


def test_every_default_of_megatron_is_a_value_of_its_field_and_differs_from_ours():
    for name, value in MEGATRON_DEFAULTS.items():
        assert convert(ENTRIES[name], value) != ENTRIES[name].default, name
    assert set(SHAPING) <= set(MEGATRON_DEFAULTS) and all(name in ENTRIES for name in MEGATRON_REQUIRED)


@pytest.mark.parametrize("flag", MEGATRON)
def test_a_row_takes_its_values_and_leaves_the_next_flag(flag):
    arity = MEGATRON[flag].arity
    values = ["1", "2"] if arity == MANY else ["1"] * arity
    line = parse([flag, *values, "--lr", "1e-3"])
    assert not line.errors.errors
    assert [(argument.flag, argument.value) for argument in line.megatron] == [(flag, " ".join(values))]
    assert [setting.key for setting in line.settings] == ["optim.lr"]


def test_a_value_may_follow_an_equals_sign():
    assert parse(["--transformer-impl=local"]).megatron[0].value == "local"
    assert "gives --manual-gc a value" in str(parse(["--manual-gc=1"]).errors.errors[0])
    assert "--train-samples has no value" in str(parse(["--train-samples", "--bf16"]).errors.errors[0])
