"""MLPs, pure: tensors of the inner width, the input of a router, and experts of a rank."""

from dataclasses import replace

import pytest

from nanotrain.config.model import ModelConfig, MoEConfig
from nanotrain.spec.kinds.mlp import dense_operators, moe_operators, num_inner_tensors
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.operators import Dispatch, ExpertProduct, Router
from nanotrain.spec.shape import ModelShape

MODEL = ModelConfig(num_layers=1, hidden_size=32, num_attention_heads=4, vocab_size=8)
SHAPE = ModelShape.of(replace(MODEL, moe=MoEConfig(num_experts=8, router_topk=2)))
SIZES = LayerSizes(SHAPE, batch_size=1, seq_length=16, ep=4, routed_rows=32, expert_rows=40)


@pytest.mark.parametrize(
    ("values", "number"),
    [
        ({"activation": "gelu"}, 2),
        ({"activation": "swiglu"}, 3),
        ({"activation": "geglu_tanh"}, 4),
        ({"activation": "swiglu", "glu_linear_offset": 1.0}, 4),
        ({"activation": "geglu_tanh", "activation_func_clamp_value": 7.0}, 6),
    ],
)
def test_an_mlp_keeps_the_inputs_of_its_activation_and_of_the_product(
    values: dict[str, object], number: int
) -> None:
    shape = ModelShape.of(replace(MODEL, **values))  # type: ignore[arg-type]
    assert num_inner_tensors(shape) == number
    sizes = LayerSizes.for_model(shape, seq_length=16)
    unit = 16 * shape.ffn_size * 2
    kept = sum(operator.saved_bytes() for operator in dense_operators(sizes))
    assert kept == number * unit + 16 * 32 * 2
    assert sum(operator.saved_bytes({"mlp"}) for operator in dense_operators(sizes)) == 16 * 32 * 2


def test_a_rank_multiplies_the_rows_that_reach_its_experts() -> None:
    operators = moe_operators(SIZES)
    products = [operator for operator in operators if isinstance(operator, ExpertProduct)]
    assert {(product.rows, product.num_experts) for product in products} == {(32, 2)}
    dispatches = [operator for operator in operators if isinstance(operator, Dispatch)]
    assert [(each.name, each.tokens, each.rows) for each in dispatches] == [
        ("dispatch", 16, 40),
        ("combine", 16, 40),
    ]


@pytest.mark.parametrize(("device", "copies"), [("cuda", 0), ("cpu", 1)])
def test_a_router_keeps_a_copy_of_its_input_where_it_converts_it(device: str, copies: int) -> None:
    router = moe_operators(replace(SIZES, device=device))[0]
    assert isinstance(router, Router)
    scores = 5 * 16 * 8 * 4 + copies * 8 * 32 * 4
    layer_input = 16 * 32 * (4 if copies else 2)
    assert router.saved_bytes() == scores + layer_input
    assert router.saved_bytes({"moe"}) == 16 * 32 * 2
