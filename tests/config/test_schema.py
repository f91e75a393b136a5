"""Plain values go into the sections and come out of them unchanged."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.config.config import Config
from nanotrain.config.option import Entry
from nanotrain.config.references import as_written
from nanotrain.config.schema import (
    ENTRIES,
    KEYS,
    SECTIONS,
    check_choice,
    config_from_dict,
    flatten,
    nest,
    to_dict,
    value_of,
    with_current_keys,
    with_values,
)
from nanotrain.errors import ConfigError, ConfigErrors, ErrorCollector
from tests.config.asking import config_of

WORDS, PATHS = (
    st.text("abc019. ,='/${}", max_size=8),
    st.text("abc019. ,='/", max_size=8),
)  # $ names a variable in a path
KINDS = {
    bool: st.booleans(),
    int: st.integers(min_value=0, max_value=10**15),
    float: st.floats(min_value=0, allow_nan=False, allow_infinity=False),
    str: WORDS,
}


def test_a_field_name_is_unique_over_all_sections():
    names = [entry.name for entry in KEYS.values()]
    assert len(names) == len(set(names)) == len(ENTRIES)


def test_every_field_has_a_meaning_and_a_default_that_it_takes_itself():
    for entry in ENTRIES.values():
        assert entry.help, entry.key
        assert config_of(**{entry.name: entry.default}) == Config(), entry.key


@st.composite
def plain_values(draw: st.DrawFn) -> dict[str, Any]:
    """Values for some fields, each of the field's type and within its bounds."""
    values: dict[str, Any] = {}
    for key in draw(st.lists(st.sampled_from(sorted(KEYS)), unique=True, max_size=12)):
        entry = KEYS[key]
        one = (
            st.sampled_from(entry.choices)
            if entry.choices
            else PATHS
            if entry.is_path
            else KINDS[entry.item]
        )
        value = draw(st.lists(one, max_size=4) if entry.kind is list else one)
        check, items = entry.field.metadata["check"], value if entry.kind is list else [value]
        if "" in items and entry.default != "":  # an error
            continue
        if (check is None or all(map(check, items))) and str(value).lower() not in ("null", "none"):
            values[key] = value
    return nest(values)


@given(plain_values())
def test_a_configuration_and_its_plain_values_are_one_and_the_same(values):
    # given a configuration from arbitrary plain values
    config = config_from_dict(values)
    # then its plain values hold them, and give the same configuration
    for key, value in flatten(values, errors=ErrorCollector()):
        assert as_written(value_of(config, key)) == value
    assert config_from_dict(to_dict(config)) == config


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("train_iters", "1e4", 10_000),
        ("train_iters", "1_000", 1000),
        ("seed", str(2**60 + 1), 2**60 + 1),
        ("lr", "2e-4", 2e-4),
        ("lr_decay_iters", "null", None),
        ("shuffle", "no", False),
        ("lr_wsd_decay_style", "minus_sqrt", "minus_sqrt"),
        ("data_path", [0.7, "a"], ["0.7", "a"]),
        ("data_path", "0.7 a 0.3 b", ["0.7", "a", "0.3", "b"]),
    ],
)
def test_text_means_what_the_type_of_its_field_says(name, text, value):
    assert value_of(config_of(**{name: text}), ENTRIES[name].key) == value


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "train.train_iters",
            "ten",
            "train.train_iters is 'ten': it takes a whole number; --train-iters is optimizer",
        ),
        ("train.train_iters", 1.5, "train.train_iters is 1.5: it takes a whole number"),
        ("train.train_iters", True, "train.train_iters is True: it takes a whole number"),
        ("train.train_iters", None, "train.train_iters is 'null': it takes a whole number"),
        ("optim.lr", math.nan, "optim.lr is nan: it takes a number"),
        ("optim.lr", 0, "optim.lr is 0.0: it must be above 0"),
        ("optim.adam_beta1", 1, "optim.adam_beta1 is 1.0: it must be at least 0 and below 1"),
        ("train.micro_batch_size", -1, "train.micro_batch_size is -1: it must be at least 1"),
        ("data.shuffle", "maybe", "data.shuffle is 'maybe': it takes true or false"),
        ("data.split", [1], "data.split is [1]: it takes text"),
        ("precision.params_dtype", "bf61", "did you mean --params-dtype bf16?"),
        (
            "optim.lr_wsd_decay_style",
            "minus-sqrt",
            "one of linear, cosine, exponential, minus_sqrt",
        ),
        ("optim.learning_rate", 1, "unknown key optim.learning_rate; did you mean"),
        ("optm.lr", 1, "unknown section optm; did you mean optim?"),
    ],
)
def test_a_bad_value_is_named_with_its_rule_and_its_cure(key, value, message):
    section, name = key.split(".")
    with pytest.raises(ConfigError) as caught:
        config_from_dict({section: {name: value}})
    assert message in str(caught.value)


def test_a_section_holds_fields():
    with pytest.raises(ConfigError, match="section optim is 3"):
        config_from_dict({"optim": 3})
    assert config_from_dict(dict.fromkeys(SECTIONS)) == Config()


def test_fields_of_nested_sections_have_a_key_and_a_flag():
    config = config_from_dict(
        {"model": {"moe": {"router_topk": 4, "num_experts": 8}, "mla": {"v_head_dim": 16}}}
    )
    assert (config.model.moe.router_topk, config.model.mla.v_head_dim) == (4, 16)
    flags = {
        key: KEYS[key].flag
        for key in ("model.moe.router_topk", "model.moe.num_experts", "model.mla.v_head_dim")
    }
    assert list(flags.values()) == ["--moe-router-topk", "--num-experts", "--v-head-dim"]
    changed = with_values(config, {"model.moe.router_topk": 2})
    assert changed.model.moe.router_topk == 2 and changed.model.moe.num_experts == 8


def test_keys_of_files_written_before_a_nested_section_existed_are_read():
    before = {
        "model": {"moe_router_topk": 4, "num_experts": 8},
        "precision": {"fp8_format": "e4m3"},
    }
    now = {
        "model": {"moe": {"router_topk": 4, "num_experts": 8}},
        "precision": {"fp8": {"format": "e4m3"}},
    }
    assert config_from_dict(before) == config_from_dict(now) and with_current_keys(before) == now


def test_all_bad_values_are_in_one_error():
    with pytest.raises(ConfigErrors) as caught:
        config_from_dict({"optim": {"lr": "fast", "lrr": 1}, "model": {"moe": {"router_topk": 0}}})
    assert str(caught.value).startswith("3 mistakes")
    for what in ("optim.lr is 'fast'", "unknown key optim.lrr", "model.moe.router_topk is 0"):
        assert what in str(caught.value)


def test_a_name_that_no_table_holds_is_refused_with_the_nearest():
    check_choice("pipeline_schedule", "1f1b", known=["1f1b", "gpipe"])
    with pytest.raises(ConfigError, match="did you mean --pipeline-schedule gpipe?"):
        check_choice("pipeline_schedule", "gpip", known=["1f1b", "gpipe"])


def test_an_entry_has_the_kind_of_its_field():
    kinds = {
        name: ENTRIES[name].kind
        for name in ("exit_interval", "data_path", "shuffle", "run_dir", "lr")
    }
    assert kinds == {
        "exit_interval": int,
        "data_path": list,
        "shuffle": bool,
        "run_dir": str,
        "lr": float,
    }
    assert (
        isinstance(ENTRIES["lr"], Entry)
        and ENTRIES["run_dir"].is_optional
        and not ENTRIES["lr"].is_optional
    )
