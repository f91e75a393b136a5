"""Rules of pipeline stages. The default model has 4 layers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.config.rules.check import check_layout
from nanotrain.config.rules.settings import Settings
from nanotrain.config.rules.stages import longest_stage
from nanotrain.errors import ConfigError
from nanotrain.spec.stages import split_layers
from tests.config.asking import config_of

PP2 = {"pipeline_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2}
TURNS = {
    "overlap_moe_expert_parallel_comm": True,
    "expert_model_parallel_size": 2,
    "num_experts": 8,
}
V = {"pipeline_schedule": "zb-v", "num_virtual_stages_per_pipeline_rank": 2}
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
LAYOUT = "pipeline_model_parallel_layout"


@pytest.mark.parametrize(
    "keys",
    [
        PP2 | {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 2},
        PP2 | {"num_layers": 5},
        PP2 | {"num_layers": 5, LOSS: True},
        PP2 | {"num_layers": 2, LOSS: True, EMBEDDING: True},
        PP2 | {"num_layers": 5, FIRST: 2},
        PP2 | {"pipeline_model_parallel_layout": "Ett|ttmL", "mtp_num_layers": 1},
        PP2 | {"num_layers": 5, "pipeline_model_parallel_layout": "Et*5|L"},
        {
            "num_layers": 1,
            "pipeline_model_parallel_layout": "E|t|L",
            "pipeline_model_parallel_size": 3,
        },
        PP2 | {"num_layers": 5, FIRST: 2, LAST: 3},
        {"pipeline_model_parallel_size": 4, "num_layers": 10, FIRST: 3, LAST: 2},
    ],
)
def test_what_divides_breaks_no_rule(keys):
    check_layout(config_of(**keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"pipeline_model_parallel_size": 3, LAYOUT: "Et*4|m|L", "mtp_num_layers": 1},
            "leaves pipeline rank 1 without layers",
        ),
        (PP2 | V | TURNS, "has no full backward of another microbatch"),
        (
            TURNS | {"data_parallel_sharding_strategy": "optim_grads_params"},
            "gather and free the parameters of each other",
        ),
        (PP2 | V | {FIRST: 2}, "--decoder-last-pipeline-num-layers with --pipeline-schedule zb-v"),
        (
            PP2 | {"num_layers": 5, LOSS: True, EMBEDDING: True},
            "7 layers cannot be split evenly over pp=2",
        ),
        (PP2 | {"num_layers": 5, LOSS: True, FIRST: 2}, "beside lengths of stages"),
        (PP2 | {LAYOUT: "Ett|tttL"}, "pipeline_model_parallel_layout has 5 of 4 layers"),
        (
            PP2 | {LAYOUT: "Ett|ttm*2L", "mtp_num_layers": 1},
            "has 2 layers of multi-token prediction: mtp_num",
        ),
        (PP2 | {LAYOUT: "Ett|ttmL"}, "mtp_num_layers is unset"),
        (PP2 | {LAYOUT: "Ett|tt|L"}, "pipeline_model_parallel_layout has 3 stages for pp=2"),
        (PP2 | {LAYOUT: "Ett|tt"}, "the embedding E is first, the loss L is last"),
        (PP2 | {"num_layers": 1}, "1 layer cannot fill pp=2 pipeline stages"),
        (
            PP2 | {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 4},
            "4 layers cannot fill pp=2 x 4 = 8 pipeline stages",
        ),
        (
            PP2
            | {
                "pipeline_schedule": "interleaved",
                "num_virtual_stages_per_pipeline_rank": 2,
                FIRST: 1,
            },
            "with 2 virtual stages per pipeline rank",
        ),
        (
            {"pipeline_model_parallel_size": 4, "num_layers": 6, FIRST: 3, LAST: 2},
            "1 layer is left for 2 of pp=4 pipeline stages: of 6 layers the first and last rank have 3 + 2",
        ),
        (
            {"pipeline_model_parallel_size": 4, "num_layers": 6, FIRST: 3, LAST: 2},
            "so that they leave at least 2",
        ),
        (PP2 | {FIRST: 4}, "0 layers are left for 1 of pp=2"),
        (PP2 | {FIRST: 1, LAST: 1}, "2 layers are left for 0 of pp=2"),
    ],
)
def test_what_does_not_divide_is_named_with_its_numbers(keys, message):
    with pytest.raises(ConfigError) as caught:
        check_layout(config_of(**keys))
    assert message in str(caught.value)
    assert caught.value.fix


def test_settings_of_stages_break_no_rule_on_one_stage():
    """That they have no effect is an error, and the only one."""
    check_layout(
        config_of(
            num_layers=3,
            num_virtual_stages_per_pipeline_rank=2,
            **{FIRST: 9, LAST: 4, EMBEDDING: True},
        )
    )


@given(
    num_layers=st.integers(1, 9),
    pp=st.integers(2, 5),
    first=st.none() | st.integers(1, 5),
    last=st.none() | st.integers(1, 5),
    virtual=st.integers(1, 3),
)
def test_the_rule_of_stages_refuses_exactly_what_cannot_be_split(
    num_layers, pp, first, last, virtual
):
    config = config_of(
        num_layers=num_layers,
        pipeline_model_parallel_size=pp,
        num_virtual_stages_per_pipeline_rank=virtual,
        **{FIRST: first, LAST: last},
    )
    try:
        split_layers(num_layers, pp * virtual, first=first, last=last, stages_per_rank=virtual)
    except AssertionError:
        with pytest.raises(ConfigError):
            check_layout(config)
    else:
        check_layout(config)


@given(num_layers=st.integers(2, 40), pp=st.integers(1, 8), first=st.none() | st.integers(1, 5))
def test_the_longest_stage_is_that_of_the_split(num_layers, pp, first):
    if num_layers < 2 * pp + 5 or (pp == 1 and first):
        return
    fields = {
        "num_layers": num_layers,
        "pipeline_model_parallel_size": pp,
        "decoder_first_pipeline_num_layers": first,
    }
    stages = split_layers(num_layers, pp, first=first)
    assert longest_stage(Settings(config_of(**fields))) == max(
        len(stage.layers) for stage in stages
    )
