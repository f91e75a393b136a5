"""Megatron-LM's flags: the table is sound, and every row does what it says."""

import json
import re
from pathlib import Path

import pytest

from nanotrain.cli.main import COMMANDS
from nanotrain.config import tables
from nanotrain.config.arguments import ALIASES, FLAGS, NEGATIONS, SWITCHES
from nanotrain.config.flags import OWN_FLAGS, parse
from nanotrain.config.load import load
from nanotrain.config.megatron import (
    CONVERSIONS,
    MANY,
    ckpt_step,
    data_args_path,
    grad_comm_dtype,
    group_query_attention,
    layers_per_virtual_stage,
    main_grads_dtype,
    megatron,
    moe_layer_recompute,
    no_position_embedding,
    padded_vocab_size,
    per_split_data_args_path,
    row_of,
    train_samples,
)
from nanotrain.config.schema import ENTRIES, convert, value_of
from nanotrain.errors import ConfigError
from tests.config.asking import config_of

OURS = {*FLAGS, *NEGATIONS, *ALIASES, *OWN_FLAGS, *SWITCHES}
FLAGS_THERE, PATTERNS = megatron().flags, megatron().patterns


def test_no_flag_is_both_a_field_and_a_row():
    assert not OURS & FLAGS_THERE.keys()
    assert all(parse([flag]).megatron == [] for flag in OURS if FLAGS.get(flag, None) is None)
    assert row_of("--save-checkpoint-interval") is None, "a guess, not a flag of Megatron-LM"


def test_no_row_replaces_another():
    text = (Path(tables.__file__).parent / "megatron.yaml").read_text()
    rows = re.findall(r'^ +"?(--[^\s:"]+)', text, re.MULTILINE)
    assert sorted(rows) == sorted([*FLAGS_THERE, *PATTERNS])
    assert all("*" in pattern for pattern in PATTERNS) and not any("*" in flag for flag in FLAGS_THERE)


def test_every_row_is_complete():
    for flag, row in (FLAGS_THERE | PATTERNS).items():
        assert flag.startswith("--") and row.meaning and row.meaning == row.meaning.strip().rstrip("."), flag
        assert row.arity in (MANY, 0, 1) and (not row.accepts or row.arity == 1), flag
        is_rename = row.sets or row.to or row.convert or row.overrules or row.is_check
        assert row.kind == "rename" or not is_rename, flag
        assert bool(row.sets) + bool(row.to) + bool(row.convert) <= 1 and row.convert in {"", *CONVERSIONS}, flag
        assert {*row.sets} <= ENTRIES.keys() and row.to in {"", *ENTRIES} and (not row.to or row.arity == 1), flag
        assert not row.saves or row.kind == "no effect", flag
        assert all(convert(ENTRIES[name], value) is not None for name, value in row.sets.items()), flag


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
    assert [(argument.flag, argument.value) for argument in line.megatron] == [(flag, " ".join(values))]
    assert [setting.key for setting in line.settings] == ["optim.lr"]


def test_a_value_may_follow_an_equals_sign():
    assert parse(["--transformer-impl=local"]).megatron[0].value == "local"
    assert "gives --manual-gc a value" in str(parse(["--manual-gc=1"]).errors.errors[0])
    assert "--train-samples has no value" in str(parse(["--train-samples", "--bf16"]).errors.errors[0])


SIZES = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"


def test_a_script_of_an_earlier_version_loads_with_its_values():
    line = f"""{SIZES} --megatron-defaults --DDP-impl local --no-contiguous-buffers-in-local-ddp --data-impl mmap
        --layernorm-epsilon 1e-6 --no-query-key-layer-scaling --mmap-warmup --override-lr-scheduler --delay-grad-reduce
        --checkpoint-granularity full --checkpoint-method block --checkpoint-num-layers 2 --bf16 --fp8-hybrid
        --initial-loss-scale 65536"""
    loaded = load(line.split())
    config = loaded.config
    assert config.model.norm_epsilon == 1e-6 and config.precision.fp8.format == "hybrid"
    assert (config.memory.recompute_granularity, config.memory.recompute_method) == ("full", "block")
    assert config.memory.recompute_num_layers == 2
    assert config.precision.initial_loss_scale == 2.0**32, "bf16 has no loss scale, in Megatron-LM neither"
    assert any("initial_loss_scale: default" in note for note in loaded.notes)


def test_token_files_of_the_formats_before_are_an_error():
    with pytest.raises(ConfigError, match=r"--data-impl lazy contradicts .* PREFIX.bin and PREFIX.idx"):
        load([*SIZES.split(), "--data-impl", "lazy"])


@pytest.mark.parametrize(("flags", "method"), [("", "uniform"), ("--checkpoint-method block ", "block")])
def test_recomputation_of_earlier_versions_is_full(flags, method):
    line = f"{SIZES} {flags}--checkpoint-activations --checkpoint-num-layers 1 --tokenizer-name-or-path gpt2"
    config = load(line.split()).config
    memory = config.memory
    assert (memory.recompute_granularity, memory.recompute_method) == ("full", method)
    assert memory.recompute_num_layers == 1 and config.data.tokenizer_model == "gpt2"


def test_muon_with_a_sharded_state_has_no_name_of_its_own():
    assert load(f"{SIZES} --optimizer dist_muon --muon-momentum 0.8".split()).config.optim.optimizer == "muon"


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
            "yarn.original_max_position_embeddings",
            512,
        ),
        ("--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-beta-fast 16", "yarn.beta_fast", 16.0),
        ("--multi-latent-attention --qk-nope-head-dim 32", "mla.qk_head_dim", 32),
    ],
)
def test_other_spellings_set_the_field(arguments, key, value):
    model = load(arguments.split()).config.model
    assert value_of(model, key) == value


def test_the_padded_vocabulary_overrules_its_multiple():
    line = ["--vocab-size", "1000", "--padded-vocab-size", "1016", "--make-vocab-size-divisible-by", "128"]
    assert load(line).config.model.make_vocab_size_divisible_by == 1016
    line = ["--vocab-size", "1000", "--make-vocab-size-divisible-by", "128", "--no-pad-vocab-size"]
    assert load(line).config.model.make_vocab_size_divisible_by == 1


def test_muon_has_the_names_and_the_momentum_of_megatron():
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    line = f"{sizes} --megatron-defaults --optimizer muon --muon-nesterov --muon-tp-mode duplicated"
    optim = load([*line.split(), "--tensor-model-parallel-size", "2"]).config.optim
    assert (optim.muon_momentum, optim.muon_use_nesterov, optim.muon_tp_mode) == (0.9, True, "distributed")


def test_every_command_that_a_cure_names_exists():
    named = {
        word for row in (FLAGS_THERE | PATTERNS).values() for word in re.findall(r"nanotrain ([a-z]+) ", row.meaning)
    }
    assert named <= COMMANDS.keys() and {"generate", "topology", "checkpoint"} <= named


def test_samples_become_steps_rounded_down_and_the_length_of_the_schedule():
    config = config_of(global_batch_size=128)
    assert train_samples(config, "1953125000") == {"train_iters": 15258789, "lr_decay_samples": 1953125000}
    assert train_samples(config_of(global_batch_size=128, lr_decay_samples=5), "256") == {"train_iters": 2}
    assert train_samples(config_of(global_batch_size=10, lr_decay_samples=5), "1e9") == {"train_iters": 10**8}


def test_a_constant_learning_rate_has_a_schedule_only_for_a_warmup_that_is_a_fraction_of_it():
    constant = {"global_batch_size": 128, "lr_decay_style": "constant"}
    assert train_samples(config_of(**constant), "256") == {"train_iters": 2}
    assert train_samples(config_of(**constant, lr_warmup_fraction=0.1), "256")["lr_decay_samples"] == 256


@pytest.mark.parametrize(
    ("fields", "layers", "stages"),
    [((32, 4), "1", 8), ((32, 4), "2", 4), ((56, 8), "7", 1)],
)
def test_layers_per_virtual_stage_become_virtual_stages(fields, layers, stages):
    config = config_of(num_layers=fields[0], pipeline_model_parallel_size=fields[1])
    assert layers_per_virtual_stage(config, layers) == {"num_virtual_stages_per_pipeline_rank": stages}


def test_a_padded_vocabulary_is_padded_to_that_size():
    assert padded_vocab_size(config_of(vocab_size=50257), "51200") == {"make_vocab_size_divisible_by": 51200}


def test_grouped_queries_without_a_number_share_one_head():
    assert group_query_attention(config_of(), "") == {"num_query_groups": 1}
    assert group_query_attention(config_of(num_query_groups=2), "") == {}


@pytest.mark.parametrize("folder", ["runs/a", "runs/a/checkpoints"])
def test_the_step_of_a_checkpoint_is_a_folder_of_the_run_to_load(folder):
    assert ckpt_step(config_of(load=folder), "400") == {"load": "runs/a/checkpoints/step-00000400"}


def test_the_step_of_a_checkpoint_needs_a_run_to_load():
    with pytest.raises(ConfigError, match="--ckpt-step 4 without --load: .* set --load RUN, also for the run's own"):
        ckpt_step(config_of(), "4")
    with pytest.raises(ConfigError, match="step-00000002 is the checkpoint of one step; leave --ckpt-step out"):
        ckpt_step(config_of(load="a/step-00000002"), "4")


def test_a_run_goes_back_to_a_step_of_its_own_folder():
    config = load(["--mock-data", "--save", "runs/a", "--load", "runs/a", "--ckpt-step", "400"]).config
    assert (config.train.run_dir, config.checkpoint.load) == ("runs/a", "runs/a/checkpoints/step-00000400")


def test_no_position_embedding_is_accepted_with_rope():
    assert no_position_embedding(config_of(), "") == {}
    with pytest.raises(ConfigError, match="set --position-embedding-type none instead"):
        no_position_embedding(config_of(position_embedding_type="learned_absolute"), "")


def test_the_dtypes_of_megatron_fsdp_become_those_of_gradients():
    assert main_grads_dtype(config_of(), "auto") == grad_comm_dtype(config_of(), "fp32") == {}
    assert main_grads_dtype(config_of(), "bf16") == {"main_grads_dtype": "bf16"}
    assert grad_comm_dtype(config_of(), "bf16") == {"grad_reduce_in_bf16": True}


def test_recomputing_moe_layers_adds_to_what_is_recomputed():
    assert moe_layer_recompute(config_of(), "")["recompute_modules"] == ["moe"]
    selective = config_of(recompute_granularity="selective")
    assert moe_layer_recompute(selective, "")["recompute_modules"] == ["core_attn", "moe"]
    listed = config_of(recompute_granularity="selective", recompute_modules=["mlp", "moe"])
    assert moe_layer_recompute(listed, "")["recompute_modules"] == ["mlp", "moe"]


@pytest.mark.parametrize(
    ("convert", "fields", "text", "message"),
    [
        (train_samples, {}, "512", "set --global-batch-size"),
        (train_samples, {"global_batch_size": 8}, "7", "--train-samples 7 is no whole step"),
        (train_samples, {"global_batch_size": 8}, "1.5e0", "it takes a whole number from 1"),
        (
            layers_per_virtual_stage,
            {"num_layers": 10, "pipeline_model_parallel_size": 4},
            "1",
            "10 layers are not a multiple",
        ),
        (
            layers_per_virtual_stage,
            {"num_layers": 8, "pipeline_model_parallel_size": 2, "decoder_last_pipeline_num_layers": 2},
            "1",
            "set --num-virtual-stages-per-pipeline-rank",
        ),
        (grad_comm_dtype, {}, "fp16", "gradients are reduced in fp32 or bf16"),
        (padded_vocab_size, {"vocab_size": 300}, "256", "the vocabulary has 300 tokens"),
    ],
)
def test_what_has_no_exact_value_is_an_error(convert, fields, text, message):
    with pytest.raises(ConfigError) as caught:
        convert(config_of(**fields), text)
    assert message in str(caught.value)


def test_a_file_holds_the_words_of_data_path(tmp_path):
    (file := tmp_path / "blend.txt").write_text("0.7 data/a\n0.3 data/b\n")
    assert data_args_path(config_of(), str(file)) == {"data_path": ["0.7", "data/a", "0.3", "data/b"]}
    file.write_text("\n")
    for path, why in ((file, "the file is empty"), (tmp_path / "none", "it does not exist"), (tmp_path, "directory")):
        with pytest.raises(ConfigError, match=why):
            data_args_path(config_of(), str(path))


def test_a_json_file_holds_the_words_of_each_split_as_a_text_or_a_list(tmp_path):
    (file := tmp_path / "blend.json").write_text(json.dumps({"train": "0.7 a 0.3 b", "valid": [1, "c"], "test": None}))
    expected = {"train_data_path": ["0.7", "a", "0.3", "b"], "valid_data_path": ["1", "c"]}
    assert per_split_data_args_path(config_of(), str(file)) == expected
    bad = {
        "[]": "must be an object",
        "{": "Expecting",
        '{"valid": "c"}': "train has no data",
        '{"train": 1}': "must be a list",
        '{"train": [[]]}': "must be text",
        '{"train": "a", "dev": "b"}': "the key 'dev'",
    }
    for text, why in bad.items():
        file.write_text(text)
        with pytest.raises(ConfigError, match=why):
            per_split_data_args_path(config_of(), str(file))
