"""What a layer declares and computes around its sublayers, by kind of residual connections."""

import pytest

from nanotrain.config.model import ModelConfig
from nanotrain.model.transformer import RESIDUAL_MODULES
from nanotrain.spec.declaration import Declaration
from nanotrain.spec.kinds.block import block_operators
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.operators import Norm, Residual
from nanotrain.spec.parameters import layer
from nanotrain.spec.residuals import RESIDUALS
from nanotrain.spec.shape import ModelShape

PARALLEL = {"residual_type": "parallel"}
SHARED = PARALLEL | {"parallel_shared_norm": True}
CASES = [
    ({}, ["attention_norm", "mlp_norm"]),
    ({"norm_placement": "post"}, ["attention_post_norm", "mlp_post_norm"]),
    (PARALLEL, ["attention_norm", "mlp_norm"]),
    (SHARED, ["input_norm"]),
    (
        SHARED | {"norm_placement": "sandwich"},
        ["attention_post_norm", "input_norm", "mlp_post_norm"],
    ),
]


def test_every_kind_has_a_description_and_a_module() -> None:
    assert RESIDUALS.keys() == RESIDUAL_MODULES.keys()


@pytest.mark.parametrize(("fields", "norms"), CASES)
def test_a_layer_has_the_norms_of_its_kind_and_an_operator_for_each(fields, norms) -> None:
    shape = ModelShape.of(ModelConfig(vocab_size=10, **fields))
    names = {spec.name.split(".")[0] for spec in layer(Declaration(shape, "fp32"), 0)}
    assert sorted(names - {"attention", "mlp"}) == norms
    operators = block_operators(LayerSizes.for_model(shape, seq_length=8), 0)
    hidden_norms = [each for each in operators if isinstance(each, Norm) and each.name != "qk_norm"]
    assert len(hidden_norms) == len(norms)
    assert sum(isinstance(each, Residual) for each in operators) == 2
