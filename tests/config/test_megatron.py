"""Megatron-LM's flags: the table is sound, and every row does what it says."""

import re
from pathlib import Path

import pytest
import yaml

from nanotrain.cli.main import COMMANDS
from nanotrain.config import conversions, tables
from nanotrain.config.arguments import ALIASES, FLAGS, NEGATIONS, SWITCHES
from nanotrain.config.flags import OWN_FLAGS, parse
from nanotrain.config.load import load
from nanotrain.config.megatron import MANY, megatron, row_of
from nanotrain.config.schema import ENTRIES, convert, value_of
from nanotrain.errors import ConfigError

OURS = {*FLAGS, *NEGATIONS, *ALIASES, *OWN_FLAGS, *SWITCHES}
FLAGS_THERE, PATTERNS = megatron().flags, megatron().patterns


def test_no_flag_is_both_a_field_and_a_row():
    assert not OURS & FLAGS_THERE.keys()
    assert all(parse([flag]).megatron == [] for flag in OURS if FLAGS.get(flag, None) is None)
    assert row_of("--save-checkpoint-interval") is None, "a guess, not a flag of Megatron-LM"


def mapping_keys(node):
    """The keys of all nested mappings of a YAML document, repeated ones included."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        yield key.value
        yield from mapping_keys(value)


def test_no_row_replaces_another():
    text = (Path(tables.__file__).parent / "megatron.yaml").read_text()
    # a row that stands twice is two nodes; the loaded mapping has the last one
    rows = [key.split()[0] for key in mapping_keys(yaml.compose(text)) if key.startswith("--")]
    assert sorted(rows) == sorted([*FLAGS_THERE, *PATTERNS])
    assert all("*" in pattern for pattern in PATTERNS) and not any(
        "*" in flag for flag in FLAGS_THERE
    )


def test_every_row_is_complete():
    for flag, row in (FLAGS_THERE | PATTERNS).items():
        assert (
            flag.startswith("--") and row.meaning and row.meaning == row.meaning.strip().rstrip(".")
        ), flag
        assert row.arity in (MANY, 0, 1) and (not row.accepts or row.arity), flag
        is_rename = (
            row.sets or row.to or row.choices or row.convert or row.overrules or row.is_check
        )
        assert row.kind == "rename" or not is_rename, flag
        assert sum(map(bool, (row.sets, row.to, row.choices, row.convert))) <= 1 and (
            not row.convert or hasattr(conversions, row.convert)
        ), flag
        assert (
            {*row.sets} <= ENTRIES.keys()
            and row.to in {"", *ENTRIES}
            and (not row.to or row.arity == 1)
        ), flag
        assert not (row.saves or row.differs) or row.kind == "no effect", flag
        for values in (row.sets, *row.choices.values()):
            assert all(
                convert(ENTRIES[name], value) is not None for name, value in values.items()
            ), flag


def test_every_default_of_megatron_is_a_value_of_its_field_and_differs_from_ours():
    for name, value in megatron().defaults.items():
        assert convert(ENTRIES[name], value) != ENTRIES[name].default, name
    assert set(megatron().shaping) <= megatron().defaults.keys() and all(
        name in ENTRIES for name in megatron().required
    )


@pytest.mark.parametrize("flag", FLAGS_THERE)
def test_a_row_takes_its_values_and_leaves_the_next_flag(flag):
    arity = FLAGS_THERE[flag].arity
    values = ["1", "2"] if arity == MANY else ["1"] * arity
    line = parse([flag, *values, "--lr", "1e-3"])
    assert not line.errors.errors
    assert [(argument.flag, argument.value) for argument in line.megatron] == [
        (flag, " ".join(values))
    ]
    assert [setting.key for setting in line.settings] == ["optim.lr"]


def test_a_value_may_follow_an_equals_sign():
    assert parse(["--transformer-impl=local"]).megatron[0].value == "local"
    assert "gives --manual-gc a value" in str(parse(["--manual-gc=1"]).errors.errors[0])
    assert "--train-samples has no value" in str(
        parse(["--train-samples", "--bf16"]).errors.errors[0]
    )


SIZES = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"


def test_a_script_of_an_earlier_version_loads_with_its_values():
    line = f"""{SIZES} --megatron-defaults --DDP-impl local --no-contiguous-buffers-in-local-ddp --data-impl mmap
        --layernorm-epsilon 1e-6 --no-query-key-layer-scaling --mmap-warmup --override-lr-scheduler --delay-grad-reduce
        --checkpoint-granularity full --checkpoint-method block --checkpoint-num-layers 2 --bf16 --fp8-hybrid
        --initial-loss-scale 65536"""
    loaded = load(line.split())
    config = loaded.config
    assert config.model.norm_epsilon == 1e-6 and config.precision.fp8.format == "hybrid"
    assert (config.memory.recompute_granularity, config.memory.recompute_method) == (
        "full",
        "block",
    )
    assert config.memory.recompute_num_layers == 2
    assert config.precision.initial_loss_scale == 2.0**32, (
        "bf16 has no loss scale, in Megatron-LM neither"
    )
    assert any("initial_loss_scale: default" in note for note in loaded.notes)


def test_token_files_of_the_formats_before_are_an_error():
    with pytest.raises(
        ConfigError, match=r"--data-impl lazy contradicts .* PREFIX.bin and PREFIX.idx"
    ):
        load([*SIZES.split(), "--data-impl", "lazy"])


@pytest.mark.parametrize(
    ("flags", "method"), [("", "uniform"), ("--checkpoint-method block ", "block")]
)
def test_recomputation_of_earlier_versions_is_full(flags, method):
    line = f"{SIZES} {flags}--checkpoint-activations --checkpoint-num-layers 1 --tokenizer-name-or-path gpt2"
    config = load(line.split()).config
    memory = config.memory
    assert (memory.recompute_granularity, memory.recompute_method) == ("full", method)
    assert memory.recompute_num_layers == 1 and config.data.tokenizer_model == "gpt2"


def test_muon_with_a_sharded_state_has_no_name_of_its_own():
    assert (
        load(f"{SIZES} --optimizer dist_muon --muon-momentum 0.8".split()).config.optim.optimizer
        == "muon"
    )


def test_a_flag_of_a_pattern_takes_its_values_and_leaves_the_next_flag():
    line = parse(
        ["--gdp-head-dim", "64", "--rl-profile", "--lr", "1e-3", "--no-tp-comm-split-ag", "--bf16"]
    )
    assert not line.errors.errors
    assert [argument.text for argument in line.megatron] == [
        "--gdp-head-dim 64",
        "--rl-profile",
        "--no-tp-comm-split-ag",
    ]
    assert [setting.key for setting in line.settings] == ["precision.params_dtype", "optim.lr"]


def test_flags_with_one_cure_are_named_together():
    with pytest.raises(ConfigError) as caught:
        load(["--offload-modules", "mlp", "--moe-paged-stash", "--chat-template", "a"])
    text = str(caught.value)
    assert text.startswith(
        "3 flags ask for what does not exist here: --offload-modules mlp, --moe-paged-stash ("
    )
    assert text.count("set --cpu-offloading with") == 1 and "--chat-template a (" in text


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (
            "--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 512",
            "yarn.original_max_position_embeddings",
            512,
        ),
        (
            "--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-beta-fast 16",
            "yarn.beta_fast",
            16.0,
        ),
        ("--multi-latent-attention --qk-nope-head-dim 32", "mla.qk_head_dim", 32),
    ],
)
def test_other_spellings_set_the_field(arguments, key, value):
    model = load(arguments.split()).config.model
    assert value_of(model, key) == value


def test_the_padded_vocabulary_overrules_its_multiple():
    line = [
        "--vocab-size",
        "1000",
        "--padded-vocab-size",
        "1016",
        "--make-vocab-size-divisible-by",
        "128",
    ]
    assert load(line).config.model.make_vocab_size_divisible_by == 1016
    line = ["--vocab-size", "1000", "--make-vocab-size-divisible-by", "128", "--no-pad-vocab-size"]
    assert load(line).config.model.make_vocab_size_divisible_by == 1


def test_muon_has_the_names_and_the_momentum_of_megatron():
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    line = f"{sizes} --megatron-defaults --optimizer muon --muon-nesterov --muon-tp-mode duplicated"
    optim = load([*line.split(), "--tensor-model-parallel-size", "2"]).config.optim
    assert (optim.muon_momentum, optim.muon_use_nesterov, optim.muon_tp_mode) == (
        0.9,
        True,
        "distributed",
    )
    assert optim.muon_coefficient_type == "quintic"


def test_every_command_that_a_cure_names_exists():
    named = {
        word
        for row in (FLAGS_THERE | PATTERNS).values()
        for word in re.findall(r"nanotrain ([a-z-]+) ", row.meaning)
    }
    assert named <= COMMANDS.keys() and {"generate", "dry-run", "prepare", "checkpoint"} <= named
