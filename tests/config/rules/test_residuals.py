"""Combinations of residual connections that cannot be formed are one message, those that can load."""

import pytest

from nanotrain.config.load import load
from nanotrain.errors import ConfigError

LINE = "--mock-data --vocab-size 300 --num-layers 2 --seq-length 16"
PARALLEL = "--residual-type parallel"
SHARED = f"{PARALLEL} --parallel-shared-norm"
MHC = "--residual-type mhc"
SHORTCUT = "--num-experts 4 --moe-shortcut --moe-shared-expert-intermediate-size 64"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (f"{PARALLEL} --hybrid-layer-pattern *-", "residual_type parallel with hybrid_layer"),
        (f"{PARALLEL} {SHORTCUT}", "residual_type parallel with moe_shortcut"),
        (f"{PARALLEL} --layer-scale", "layer_scale with residual_type parallel"),
        (f"{SHARED} --norm-placement post", "parallel_shared_norm with norm_placement post"),
        (f"{MHC} --mtp-num-layers 1", "residual_type mhc with mtp_num_layers 1"),
        (f"{MHC} {SHORTCUT}", "residual_type mhc with moe_shortcut"),
        (f"--residual-type gated {SHORTCUT}", "residual_type gated with moe_shortcut"),
        (f"{MHC} --layer-scale", "layer_scale with residual_type mhc"),
        ("--residual-type attention --mtp-num-layers 1", "residual_type attention with mtp_num"),
        (
            "--residual-type attention --residual-streams 9",
            "residual_streams 9 with num_layers .*: .* blocks of at least one layer each",
        ),
        ("--parallel-shared-norm", "parallel_shared_norm"),
        ("--residual-streams 3", "residual_streams"),
        (f"{PARALLEL} --mhc-epsilon 1e-3", "mhc_epsilon"),
        ("--layernorm-parameters none", "layernorm_parameters"),
        (
            "--normalization LayerNorm --layernorm-parameters none --norm-placement post",
            "layernorm_parameters none with .* set --layernorm-parameters weight or",
        ),
    ],
)
def test_what_cannot_be_formed_or_has_no_effect_is_named(words: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(f"{LINE} {words}".split())


@pytest.mark.parametrize(
    "words",
    [
        f"{SHARED} --norm-placement sandwich --mtp-num-layers 1 --num-experts 4",
        f"{MHC} --hybrid-layer-pattern *- --residual-streams 2 --norm-placement sandwich",
        "--residual-type attention --residual-streams 2 --linear-attention-type short_conv",
        "--residual-type hyper_connections --num-experts 4 --linear-attention-type short_conv",
    ],
)
def test_other_combinations_load(words: str) -> None:
    assert load(f"{LINE} {words}".split()).config.model.residual_type in words
