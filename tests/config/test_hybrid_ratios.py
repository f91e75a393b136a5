"""Shares of the layers of a hybrid model become the pattern that Megatron-LM makes of them."""

import pytest

from nanotrain.config.hybrid_ratios import pattern_of_shares
from nanotrain.config.load import load
from nanotrain.errors import ConfigError

LINE = "--mock-data --vocab-size 64 --num-layers 10"


def pattern_of(flags: str) -> str | None:
    return load(f"{LINE} {flags}".split(), to_train=False).config.model.hybrid_layer_pattern


def test_patterns_are_those_of_megatron_core():
    allocation = pytest.importorskip("megatron.core.ssm.mamba_hybrid_layer_allocation")
    for num_layers in (1, 2, 9, 10, 48, 52, 56):
        for tenths in range(11):
            attention = tenths / 20
            for mlp in (0.0, 0.08, 0.25, 0.5 - attention / 2):
                expected = allocation.allocate_layers(num_layers, attention, mlp)
                pattern = pattern_of_shares(num_layers, attention=attention, mlp=mlp)
                assert pattern == "".join(expected), (num_layers, attention, mlp)


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ("--hybrid-attention-ratio 0.2 --hybrid-mlp-ratio 0.3", "MM-*M-*MM-"),
        ("--hybrid-mlp-ratio 0.3 --hybrid-attention-ratio 0.2", "MM-*M-*MM-"),
        ("--is-hybrid-model", "MMMMMMMMMM"),
        ("--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec", "MMMMMMMMMM"),
        ("--spec local", None),
        # Megatron-LM's defaults, written out
        ("--hybrid-attention-ratio 0.0 --hybrid-mlp-ratio 0.0", None),
        ("--hybrid-attention-ratio 0.0 --is-hybrid-model", "MMMMMMMMMM"),
        ("--hybrid-attention-ratio 0.0 --hybrid-mlp-ratio 0.3", "MM-MMM-MM-"),
        # as many layers of each kind, in another order
        (
            "--hybrid-attention-ratio 0.2 --hybrid-mlp-ratio 0.3 "
            "--hybrid-override-pattern **MMMMM---",
            "**MMMMM---",
        ),
        ("--is-hybrid-model --hybrid-override-pattern M*MMMMMMM-", "M*MMMMMMM-"),
    ],
)
def test_flags_of_mamba_say_what_every_layer_is(flags, pattern):
    assert pattern_of(flags) == pattern


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--hybrid-attention-ratio 1.5", "a share of the layers, from 0 to 1"),
        ("--hybrid-mlp-ratio x", "a share of the layers"),
        ("--hybrid-mlp-ratio nan", "a share of the layers"),
        ("--hybrid-mlp-ratio 0.6 --hybrid-attention-ratio 0.5", "are more than 1"),
        (
            "--hybrid-attention-ratio 0.2 --hybrid-override-pattern M*MMMMMMMM",
            "asks for 2 layers .*: hybrid_layer_pattern has 1",
        ),
    ],
)
def test_shares_that_are_none_are_errors(flags, message):
    with pytest.raises(ConfigError, match=message):
        pattern_of(flags)
