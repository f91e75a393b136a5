"""With `--invariant` layers of experts train in every layout as on one rank, in every bit."""

import pytest

from tests.laws.invariant import assert_same_bits, invariant
from tests.laws.more_layouts import with_mark
from tests.laws.test_invariant import layout
from tests.laws.worlds import Case

SOFTMAX = {
    "num_layers": 2,
    "num_query_groups": 4,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_layer_freq": "[0,1]",
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-2,
}
SIGMOID = SOFTMAX | {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "moe_shared_expert_intermediate_size": 16,
    "untie_embeddings_and_output_weights": True,
}
MODELS = {"softmax": SOFTMAX, "sigmoid": SIGMOID}
LAYOUTS = [
    layout(2, 3, strategy="optim", ep=2),
    layout(2, 4, tp=2, sp=True, etp=1),
    layout(2, 2, cp=2, kind="p2p", ep=2),
    layout(4, 1, strategy="optim_grads", ep=4),
    layout(4, 3, tp=2, strategy="optim_grads_params", ep=4, etp=1),
    layout(4, 2, tp=2, sp=True, ep=2, etp=2),
]
MORE_LAYOUTS = [
    layout(1, 2, memory="full"),
    layout(2, 2, pp=2, schedule="zb-h1"),
    layout(2, 4, tp=2, ep=2, etp=1),
    layout(3, 2, strategy="optim_grads_params"),
    layout(4, 3, strategy="optim", memory="full", ep=2),
    layout(4, 2, tp=2, cp=2, sp=True, kind="allgather", ep=2, etp=1),
    layout(4, 2, pp=2, strategy="optim", ep=2),
    layout(4, 3, tp=4, sp=True, ep=4, etp=1),
    layout(2, 4, tp=2, etp=2, memory="full"),
    layout(4, 3, tp=2, etp=2, strategy="optim_grads_params"),
    layout(4, 2, tp=4, sp=True, etp=4),
    layout(8, 1, tp=2, cp=2, sp=True, ep=2, etp=2),
]


def case_of(model: str, dtype: str) -> Case:
    return invariant(3, model=MODELS[model], precision={"params_dtype": dtype})


@pytest.mark.parametrize(("model", "dtype"), [("softmax", "bf16"), ("sigmoid", "fp32")])
def test_layouts_of_experts_have_the_bits_of_one_rank(model: str, dtype: str) -> None:
    assert_same_bits(LAYOUTS, case_of(model, dtype))


@pytest.mark.parametrize("kind", with_mark([("softmax", "fp32"), ("sigmoid", "bf16")]))
def test_more_layouts_of_experts_have_the_bits_of_one_rank(kind: tuple[str, str]) -> None:
    assert_same_bits(LAYOUTS + MORE_LAYOUTS, case_of(*kind))
