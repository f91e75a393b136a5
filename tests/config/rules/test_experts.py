"""Rules of the model section for mixtures of experts."""

import pytest

from nanotrain.config.rules.check import check_model
from nanotrain.errors import ConfigError
from tests.config.asking import config_of

EXPERTS = {"num_experts": 8}
HYBRID = {"num_layers": 4, "hybrid_layer_pattern": "*-*-"}
SHORTCUT = {"num_experts": 8, "moe_shortcut": True, "moe_shared_expert_intermediate_size": 16}
GROUPS = {"num_experts": 8, "moe_router_num_groups": 4, "moe_router_group_topk": 2}


@pytest.mark.parametrize(
    "keys",
    [
        EXPERTS,
        GROUPS | {"moe_router_topk": 4},
        EXPERTS | {"moe_router_topk": 1, "moe_router_pre_softmax": True},
        EXPERTS | {"moe_router_topk": 1, "moe_router_score_function": "sigmoid"},
        EXPERTS | {"moe_layer_freq": "[0]*3+[1]"},
        SHORTCUT | {"moe_num_zero_experts": 4},
    ],
)
def test_what_fits_together_breaks_no_rule(keys):
    check_model(config_of(**keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            EXPERTS | {"moe_layer_freq": "[0]*4"},
            "no layer has the 8 experts: moe_layer_freq is [0]*4",
        ),
        (EXPERTS | {"moe_layer_freq": "[1]*5"}, "for each of 4 layers, and this has 5 values"),
        (EXPERTS | {"moe_layer_freq": "some"}, "moe_layer_freq is 'some'"),
        (EXPERTS | {"moe_router_topk": 9}, "a token cannot be sent to 9 of 8 experts"),
        (
            EXPERTS | {"moe_apply_probs_on_input": True},
            "moe_apply_probs_on_input with moe_router_topk 2",
        ),
        (
            EXPERTS | {"moe_router_topk": 1},
            "the router would get no gradient; set --moe-router-pre-softmax",
        ),
        (
            EXPERTS
            | {"moe_router_load_balancing_type": "none aux_loss", "moe_aux_loss_coeff": "0.1 0"},
            "load_balancing_type is none aux_loss",
        ),
        (
            EXPERTS
            | {"moe_router_load_balancing_type": "aux_loss aux_loss", "moe_aux_loss_coeff": "1 1"},
            "name every loss once",
        ),
        (EXPERTS | {"moe_router_load_balancing_type": "sinkhorn_loss"}, "takes one of aux_loss"),
        (
            EXPERTS
            | {
                "moe_router_load_balancing_type": "sinkhorn aux_loss",
                "moe_aux_loss_coeff": "0 0",
            },
            "sinkhorn with aux_loss",
        ),
        (
            EXPERTS | {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": "0.1"},
            "coefficient 0.1 of sinkhorn",
        ),
        (
            EXPERTS
            | {
                "moe_router_load_balancing_type": "sinkhorn",
                "moe_router_enable_expert_bias": True,
            },
            "sinkhorn with moe_router_enable_expert_bias",
        ),
        (
            EXPERTS
            | {
                "moe_router_load_balancing_type": "aux_loss global_aux_loss",
                "moe_aux_loss_coeff": 0.1,
            },
            "1 coefficient (moe_aux_loss_coeff) for 2 load-balancing losses",
        ),
        (GROUPS | {"moe_num_zero_experts": 4}, "every rank and belong to no group"),
        (
            EXPERTS | {"moe_num_zero_experts": 4, "moe_expert_capacity_factor": 2},
            "these experts compute nothing",
        ),
        (EXPERTS | {"moe_shortcut": True}, "moe_shared_expert_intermediate_size is unset"),
        (SHORTCUT | {"moe_shared_expert_gate": True}, "moe_shortcut with moe_shared_expert_gate"),
        (SHORTCUT | {"norm_placement": "sandwich"}, "moe_shortcut with norms of outputs"),
        (
            SHORTCUT | HYBRID | {"hybrid_layer_pattern": "M-*E"},
            "moe_shortcut with hybrid_layer_pattern",
        ),
        (SHORTCUT | {"hidden_dropout": 0.1}, "moe_shortcut with dropout"),
        (
            EXPERTS | {"moe_router_num_groups": 4},
            "moe_router_num_groups is 4 and moe_router_group_topk is unset",
        ),
        (
            EXPERTS | {"moe_router_group_topk": 4},
            "moe_router_group_topk is 4 and moe_router_num_groups is unset",
        ),
        (GROUPS | {"moe_router_num_groups": 3}, "8 experts cannot form 3 groups"),
        (GROUPS | {"moe_router_group_topk": 5}, "a token cannot use 5 of 4 groups"),
        (
            GROUPS | {"moe_router_topk": 5},
            "it may use 2 groups of 2 = 4 experts; set --moe-router-group-topk 3",
        ),
    ],
)
def test_a_broken_rule_is_named_with_its_numbers(keys, message):
    with pytest.raises(ConfigError) as caught:
        check_model(config_of(**keys))
    assert message in str(caught.value)
    assert caught.value.fix
