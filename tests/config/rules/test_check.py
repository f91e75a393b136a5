"""Rules that span several fields."""

import pytest

from nanotrain.config.config import Config
from nanotrain.config.rules.check import validate_for_world
from nanotrain.errors import ConfigError
from tests.config.asking import config_of, validate


def test_the_defaults_break_no_rule():
    validate(Config())
    validate(Config(), to_train=True)
    validate_for_world(Config(), 3)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"min_lr": 1.0}, "min_lr 1 is above lr 0.0003"),
        ({"lr_warmup_init": 1.0, "lr_warmup_iters": 5}, "lr_warmup_init 1 is above lr 0.0003"),
        (
            {"lr_decay_iters": 5, "lr_warmup_iters": 6},
            "a warmup of 6 steps leaves nothing of a schedule of 5 steps",
        ),
        (
            {"lr_decay_iters": 5, "lr_warmup_iters": 5},
            "a warmup of 5 steps leaves nothing of a schedule of 5 steps",
        ),
        (
            {"lr_decay_samples": 40, "lr_warmup_iters": 5, "global_batch_size": 8},
            "a warmup of 40 samples leaves nothing of a schedule of 40 samples",
        ),
        ({"vocab_file": "vocab.json"}, "set --vocab-file and --merge-file"),
        ({"lr_decay_style": "WSD"}, "set --lr-wsd-decay-iters, for example 10"),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 101},
            "longer than the whole schedule of 100",
        ),
        (
            {"micro_batch_size": 4, "global_batch_size": 6},
            "a global batch of 6 samples cannot be split",
        ),
        (
            {"weight_decay_incr_style": "cosine", "start_weight_decay": 0.1},
            "cosine has no start or no end: start_weight_decay is 0.1, end_weight_decay is unset",
        ),
        (
            {
                "weight_decay_incr_style": "linear",
                "start_weight_decay": 0.2,
                "end_weight_decay": 0.1,
            },
            "start_weight_decay 0.2 is above end_weight_decay 0.1",
        ),
        ({"split": "1,2,3,4"}, "split is '1,2,3,4'"),
        ({"split": "0,1"}, "training needs some"),
        ({"split": "a"}, "split is 'a'"),
        ({"split": "1,-1"}, "split is '1,-1'"),
        ({"load": "a", "pretrained_checkpoint": "b"}, "leave out --load or --pretrained"),
        ({"profile": True, "train_iters": 4}, "steps 3 to 5 of 4 cannot be profiled"),
        (
            {"params_dtype": "fp16", "min_loss_scale": 4.0, "initial_loss_scale": 2.0},
            "min_loss_scale 4 is above initial_loss_scale 2",
        ),
        ({"mock_data": True, "data_path": ["a"]}, "data.data_path = a has no effect: mock_data"),
    ],
)
def test_a_broken_rule_is_named_with_its_numbers(keys, message):
    with pytest.raises(ConfigError) as caught:
        validate(config_of(**keys))
    assert message in str(caught.value)
    assert caught.value.fix


def test_a_model_that_is_still_to_be_read_breaks_no_rule():
    config = config_of(hidden_size=100, num_attention_heads=3, pretrained_checkpoint="x")
    validate(config)


def test_the_world_must_share_the_global_batch():
    config = config_of(micro_batch_size=2, global_batch_size=12)
    for world in (1, 2, 3, 6):
        validate_for_world(config, world)
    validate_for_world(config, 5)  # padded
    with pytest.raises(
        ConfigError, match="12 samples has less than one microbatch per rank: .* size 7 = 14"
    ):
        validate_for_world(config, 7)
    with pytest.raises(
        ConfigError,
        match="set --global-batch-size 32 or run on fewer ranks: data-parallel size 12 or",
    ):
        validate_for_world(config, 16)
    ramp = {"rampup_batch_size": [4, 4, 40], "num_experts": 4}
    validate_for_world(config_of(micro_batch_size=2, global_batch_size=12, num_experts=4), 4)
    validate_for_world(config_of(micro_batch_size=2, global_batch_size=12, **ramp), 2)
    with pytest.raises(
        ConfigError, match="batch of 4 samples of --rampup-batch-size .* multiples of 2 from 6 on"
    ):
        validate_for_world(config_of(micro_batch_size=2, global_batch_size=12, **ramp), 3)


def test_the_world_must_hold_every_axis():
    config = config_of(tensor_model_parallel_size=4)
    with pytest.raises(
        ConfigError, match=r"6 ranks cannot form tp=4 x cp=1 x pp=1: tp\*cp\*pp = 4 must divide"
    ):
        validate_for_world(config, 6)


def test_data_parallel_size_only_checks():
    validate_for_world(Config(), 4, expected_dp=4)
    with pytest.raises(ConfigError, match="--data-parallel-size is 2, the run has 4"):
        validate_for_world(Config(), 4, expected_dp=2)


def test_the_world_must_have_the_ranks_that_are_profiled():
    config = config_of(profile=True, profile_ranks=[0, 2])
    validate_for_world(config, 3)
    with pytest.raises(ConfigError, match="profile_ranks has rank 2: the run has 2 ranks, from 0"):
        validate_for_world(config, 2)


def test_optimizer_instances_are_trainable():
    validate(
        config_of(num_distributed_optimizer_instances=2, data_parallel_sharding_strategy="optim"),
        to_train=True,
    )


def test_every_product_of_axes_is_trainable():
    sizes = {
        f"{axis}_parallel_size": 2
        for axis in ("tensor_model", "pipeline_model", "context", "expert_model")
    }
    validate(
        config_of(**sizes, num_experts=4, sequence_parallel=True, expert_tensor_parallel_size=2),
        to_train=True,
    )
    validate(
        config_of(**sizes, num_experts=4, use_tp_pp_dp_mapping=True, expert_tensor_parallel_size=2),
        to_train=True,
    )


def test_only_training_asks_whether_the_layout_fits_the_model():
    """`nanotrain topology` plans ranks for models that are described elsewhere."""
    config = config_of(tensor_model_parallel_size=8)
    validate(config)
    with pytest.raises(ConfigError, match="num_attention_heads 4 cannot be shared by tp=8 ranks"):
        validate(config, to_train=True)


def test_the_limit_on_microbatches_counts_those_of_a_rank():
    config = config_of(global_batch_size=100_000, micro_batch_size=1)
    validate(config)
    validate_for_world(config, 1024)
    with pytest.raises(ConfigError, match="100,000 microbatches per rank: at most 65,536"):
        validate_for_world(config, 1)
