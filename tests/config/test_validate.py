"""Rules that span several fields."""

from dataclasses import replace

import pytest

from nanotrain.config.config import Config
from nanotrain.config.schema import config_from_dict
from nanotrain.config.validate import require_trainable, validate, validate_for_world
from nanotrain.errors import ConfigError


def config_of(**keys: object) -> Config:
    """A configuration from `section__field=value`."""
    values: dict[str, dict[str, object]] = {}
    for key, value in keys.items():
        section, name = key.split("__")
        values.setdefault(section, {})[name] = value
    return config_from_dict(values)


def test_the_defaults_break_no_rule():
    validate(Config())
    require_trainable(Config())
    validate_for_world(Config(), 3)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model__hidden_size": 100, "model__num_attention_heads": 3}, "hidden_size 100 cannot be cut into 3 heads"),
        ({"model__num_query_groups": 3}, "4 query heads cannot share 3 key/value heads"),
        ({"model__num_query_groups": 8}, "4 query heads cannot share 8 key/value heads"),
        ({"model__kv_channels": 5}, "a head is 5 wide"),
        ({"data__seq_length": 2048}, "seq_length 2048 is longer than max_position_embeddings 1024"),
        ({"optim__min_lr": 1.0}, "min_lr 1 is above lr 0.0003"),
        ({"optim__lr_warmup_init": 1.0, "optim__lr_warmup_iters": 5}, "lr_warmup_init 1 is above lr 0.0003"),
        ({"optim__lr_decay_iters": 5, "optim__lr_warmup_iters": 6}, "lr_decay_iters 5 is below lr_warmup_iters 6"),
        ({"optim__lr_decay_style": "WSD"}, "set --lr-wsd-decay-iters, for example 10"),
        ({"optim__lr_decay_style": "WSD", "optim__lr_wsd_decay_iters": 101}, "longer than the whole curve of 100"),
        ({"train__micro_batch_size": 4, "train__global_batch_size": 6}, "a global batch of 6 samples cannot be cut"),
        ({"data__split": "1,2,3,4"}, "split is '1,2,3,4'"),
        ({"data__split": "0,1"}, "training needs some"),
        ({"data__split": "a"}, "split is 'a'"),
        ({"data__split": "1,-1"}, "split is '1,-1'"),
        ({"checkpoint__load": "a", "checkpoint__pretrained_checkpoint": "b"}, "leave out --load or --pretrained"),
        ({"train__profile": True, "train__train_iters": 4}, "steps 3 to 5 of 4 cannot be profiled"),
        (
            {"precision__params_dtype": "fp16", "precision__min_loss_scale": 4.0, "precision__initial_loss_scale": 2.0},
            "min_loss_scale 4 is above initial_loss_scale 2",
        ),
        ({"data__mock_data": True, "data__data_path": ["a"]}, "data.data_path = ['a'] has no effect: mock_data"),
    ],
)
def test_a_broken_rule_is_named_with_its_numbers(keys, message):
    with pytest.raises(ConfigError) as caught:
        validate(config_of(**keys))
    assert message in str(caught.value)
    assert caught.value.fix


def test_a_model_that_is_still_to_be_read_breaks_no_rule():
    config = config_of(model__hidden_size=100, model__num_attention_heads=3, checkpoint__pretrained_checkpoint="x")
    validate(config)


def test_the_world_must_share_the_global_batch():
    config = config_of(train__micro_batch_size=2, train__global_batch_size=12)
    for world in (1, 2, 3, 6):
        validate_for_world(config, world)
    with pytest.raises(ConfigError, match="micro_batch_size 2 x data-parallel size 4 = 8 must divide it"):
        validate_for_world(config, 4)


def test_the_world_must_hold_every_axis():
    config = config_of(parallel__tensor_model_parallel_size=4)
    with pytest.raises(ConfigError, match=r"6 ranks cannot form tp=4 x cp=1 x pp=1: tp\*cp\*pp = 4 must divide"):
        validate_for_world(config, 6)


def test_data_parallel_size_only_checks():
    validate_for_world(Config(), 4, expected_dp=4)
    with pytest.raises(ConfigError, match="--data-parallel-size is 2, the run has 4"):
        validate_for_world(Config(), 4, expected_dp=2)


@pytest.mark.parametrize(
    "name",
    [
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "num_distributed_optimizer_instances",
        "use_tp_pp_dp_mapping",
    ],
)
def test_what_is_planned_but_not_trained_is_refused_by_name(name):
    value = True if name.startswith("use_") else 2
    config = replace(Config(), parallel=replace(Config().parallel, **{name: value}))
    validate(config)
    with pytest.raises(ConfigError, match=name):
        require_trainable(config)
