"""Settings that other settings imply: each with its reason, none over what is set."""

import pytest

from nanotrain.config.flags import parse
from nanotrain.config.implied import implied_settings, stages_of_layout
from nanotrain.config.load import load
from nanotrain.config.schema import value_of
from nanotrain.errors import ConfigError

LAYOUT = "parallel.pipeline_model_parallel_layout"
DATA = "--mock-data --vocab-size 64 --num-layers 8"


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        ("--wandb-project p", "train.wandb", True),
        (
            "--num-experts 4 --moe-router-load-balancing-type quantile_balancing",
            "model.moe.router_enable_expert_bias",
            True,
        ),
        ("--tensorboard-dir tb", "train.tensorboard", True),
        ("--run-dir s3://bucket/run", "checkpoint.async_save", True),
        ("--run-dir s3://bucket/run --no-async-save", "checkpoint.async_save", False),
        ("--save ck --load ck", "checkpoint.load", None),
        ("--save ck --load other", "checkpoint.load", "other"),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
            "parallel.pipeline_schedule",
            "interleaved",
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|tt|tt|ttL",
            "parallel.num_virtual_stages_per_pipeline_rank",
            2,
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|tt|tt|t|tL",
            "parallel.num_virtual_stages_per_pipeline_rank",
            3,  # the rules name the stage that is missing
        ),
        (
            "--multi-latent-attention --rotary-scaling-factor 1",
            "model.position_embedding_type",
            "rope",
        ),
        (
            "--multi-latent-attention --rotary-scaling-factor 4",
            "model.position_embedding_type",
            "yarn",
        ),
        (
            "--use-megatron-fsdp",
            "parallel.data_parallel_sharding_strategy",
            "optim_grads_params",
        ),
    ],
)
def test_a_setting_implies_another_unless_it_is_set(arguments, key, value):
    loaded = load(f"{DATA} {arguments}".split(), to_train=False)
    assert value_of(loaded.config, key) == value


def test_what_is_implied_is_noted_with_its_reason():
    loaded = load(f"{DATA} --wandb-project p".split(), to_train=False)
    assert "--wandb is implied: wandb_project is set" in loaded.notes
    assert loaded.origins["train.wandb"] == "wandb_project is set"


def test_a_plain_line_implies_nothing():
    line = parse(DATA.split())
    config = load(DATA.split()).config
    assert implied_settings(config, line.explicit, line=line) == []


def test_layers_are_the_letters_of_a_hybrid_pattern():
    line = "--mock-data --vocab-size 64 --hybrid-layer-pattern M-*-M-"
    assert load(line.split()).config.model.num_layers == 6


@pytest.mark.parametrize(("layout", "stages"), [(None, 0), ("Et|tL", 2), ("no layout", 0)])
def test_an_invalid_layout_has_no_stages(layout, stages):
    assert stages_of_layout(layout) == stages


PATTERN = "--mock-data --vocab-size 64 --hybrid-layer-pattern M-|*-"


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (f"{DATA} --trackers wandb --no-wandb", "train.wandb", False),
        (f"{DATA} --save ck --load ck --finetune", "checkpoint.load", "ck"),
        (f"{DATA} --save ck --load ck/ --no-load-optim", "checkpoint.load", None),
        (
            f"{DATA} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
            " --pipeline-schedule zb-v",
            "parallel.pipeline_schedule",
            "zb-v",
        ),
        (
            f"{DATA} --multi-latent-attention --rotary-scaling-factor 4 --rope-type rope",
            "model.position_embedding_type",
            "rope",
        ),
        (
            f"{DATA} --use-megatron-fsdp --data-parallel-sharding-strategy optim",
            "parallel.data_parallel_sharding_strategy",
            "optim",
        ),
        (f"{PATTERN} --pipeline-model-parallel-size 2", LAYOUT, "Et*2|t*2L"),
        (PATTERN, LAYOUT, None),
        ("--data-path a --vocab-size 64 --sft", "data.packing", "best_fit"),
        ("--data-path a --vocab-size 64 --sft", "data.reset_position_ids", True),
        ("--data-path a --vocab-size 64 --sft --packing stream", "data.packing", "stream"),
        (f"{PATTERN}/*-/*-", "model.mtp.num_layers", 2),
        (f"{PATTERN}/*- --mtp-num-layers 1", "model.mtp.num_layers", 1),
    ],
)
def test_what_is_set_stays_and_the_smallest_cases_are_implied(arguments, key, value):
    loaded = load(arguments.split(), to_train=False)
    assert value_of(loaded.config, key) == value


@pytest.mark.parametrize(
    ("arguments", "name"),
    [("--wandb-project p --no-wandb", "wandb"), ("--tensorboard-dir t --no-tensorboard", "board")],
)
def test_a_tracker_that_is_switched_off_is_not_implied(arguments, name):
    with pytest.raises(ConfigError, match=f"{name} is off"):
        load(f"{DATA} {arguments}".split(), to_train=False)


def test_a_setting_that_contradicts_what_another_implies_is_named():
    flags = "--num-experts 4 --moe-router-load-balancing-type quantile_balancing"
    words = [*DATA.split(), *flags.split(), "--no-moe-router-enable-expert-bias"]
    with pytest.raises(ConfigError, match="quantile_balancing without moe_router_enable"):
        load(words)
