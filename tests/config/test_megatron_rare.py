"""Rare flags of Megatron-LM, and patterns of flags."""

import re

import pytest

from nanotrain.cli.main import COMMANDS
from nanotrain.config.arguments import ALIASES, FLAGS, NEGATIONS, SWITCHES
from nanotrain.config.flags import OWN_FLAGS, parse
from nanotrain.config.load import load
from nanotrain.config.megatron import (
    CHECKPOINT,
    DATA,
    MEGATRON,
    MEMORY,
    MODEL,
    MOE,
    OPTIM,
    PARALLEL,
    PRECISION,
    REDUCED_PRECISION,
    RUN,
    row_of,
)
from nanotrain.config.megatron_kinds import MANY
from nanotrain.config.megatron_old import OLD
from nanotrain.config.megatron_rare import PATTERNS, RARE
from nanotrain.errors import ConfigError

OURS = {*FLAGS, *NEGATIONS, *ALIASES, *OWN_FLAGS, *SWITCHES}


def test_a_flag_that_is_known_by_name_is_not_taken_for_one_of_a_pattern():
    others = (*MODEL, *MOE, *PARALLEL, *PRECISION, *MEMORY, *REDUCED_PRECISION, *OPTIM, *DATA, *CHECKPOINT, *RUN)
    assert len(others) + len(RARE) + len(OLD) == len({*others, *RARE, *OLD}), "a row of one group would replace another"
    assert row_of("--save-checkpoint-interval") is None, "a guess, not a flag of Megatron-LM"
    assert all(parse([flag]).megatron == [] for flag in OURS if FLAGS.get(flag, None) is None)
    for pattern, row in PATTERNS.items():
        assert row.kind in ("no effect", "not yet") and row.meaning and row.arity in (MANY, 0, 1)
        assert "*" in pattern, "a name belongs to RARE"


def test_a_flag_of_a_pattern_takes_its_values_and_leaves_the_next_flag():
    line = parse(["--mamba-head-dim", "64", "--rl-profile", "--lr", "1e-3", "--no-tp-comm-split-ag", "--bf16"])
    assert not line.errors.errors
    assert [argument.text for argument in line.megatron] == [
        "--mamba-head-dim 64",
        "--rl-profile",
        "--no-tp-comm-split-ag",
    ]
    assert [setting.key for setting in line.settings] == ["precision.params_dtype", "optim.lr"]


def test_flags_with_one_cure_are_named_together():
    with pytest.raises(ConfigError) as caught:
        load(["--mamba-head-dim", "64", "--hybrid-layer-pattern", "M*M", "--sft"])
    text = str(caught.value)
    assert text.startswith(
        "3 flags ask for what does not exist here: --mamba-head-dim 64, --hybrid-layer-pattern M*M ("
    )
    assert text.count("layers are attention") == 1 and "--sft (" in text


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (
            "--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 512",
            "original",
            512,
        ),
        ("--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-beta-fast 16", "beta_fast", 16.0),
        ("--multi-latent-attention --qk-nope-head-dim 32", "qk_head_dim", 32),
    ],
)
def test_other_spellings_set_the_field(arguments, key, value):
    model = load(arguments.split()).config.model
    found = {"original": model.original_max_position_embeddings, "beta_fast": model.beta_fast}
    assert (found | {"qk_head_dim": model.mla.qk_head_dim})[key] == value


def test_the_padded_vocabulary_overrules_its_multiple():
    line = ["--vocab-size", "1000", "--padded-vocab-size", "1016", "--make-vocab-size-divisible-by", "128"]
    assert load(line).config.model.make_vocab_size_divisible_by == 1016
    line = ["--vocab-size", "1000", "--make-vocab-size-divisible-by", "128", "--no-pad-vocab-size"]
    assert load(line).config.model.make_vocab_size_divisible_by == 1


def test_muon_has_the_names_and_the_momentum_of_megatron():
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    line = f"{sizes} --megatron-defaults --optimizer muon --muon-nesterov --muon-tp-mode duplicated"
    optim = load([*line.split(), "--tensor-model-parallel-size", "2"]).config.optim
    assert (optim.muon_momentum, optim.muon_use_nesterov, optim.muon_tp_mode.value) == (0.9, True, "distributed")


def test_every_command_that_a_cure_names_exists():
    named = {word for row in (MEGATRON | PATTERNS).values() for word in re.findall(r"nanotrain ([a-z]+) ", row.meaning)}
    assert named <= COMMANDS.keys() and {"generate", "topology", "checkpoint"} <= named
