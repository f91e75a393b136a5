"""With `--invariant` multi-head latent attention and multi-token prediction train in every layout as
on one rank, in every bit.
"""

import pytest

from tests.laws.invariant import assert_same_bits, invariant
from tests.laws.more_layouts import with_mark
from tests.laws.test_invariant import layout
from tests.laws.test_mla import DEEPSEEK, LEARNED
from tests.laws.worlds import Case

# DeepSeek-V3's layers: experts with groups, biases and a shared expert, balanced by sequences
MODELS = {
    "deepseek": DEEPSEEK
    | {
        "num_layers": 2,
        "moe_layer_freq": "[0,1]",
        "moe_router_load_balancing_type": "seq_aux_loss",
    },
    "learned": LEARNED | {"num_layers": 2},
}
MODELS["mtp"] = MODELS["deepseek"] | {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.8}
MODELS["tied_mtp"] = {"mtp_num_layers": 2, "hidden_dropout": 0.1, "num_query_groups": 4}
LAYOUTS = [
    layout(2, 3, tp=2, sp=True, etp=1, strategy="optim"),
    layout(2, 4, cp=2, kind="p2p"),
    layout(3, 1, strategy="optim_grads_params"),
    layout(4, 3, tp=2, pp=2, etp=1, schedule="zb-h1"),
]
MORE_LAYOUTS = [
    layout(1, 2, memory="full"),
    layout(1, 3, memory="selective"),
    layout(2, 2, cp=2, kind="a2a", memory="full"),
    layout(2, 3, tp=2, etp=1),
    layout(4, 3, tp=4, sp=True, etp=1),
    layout(4, 2, tp=2, cp=2, sp=True, kind="allgather", etp=1),
    layout(4, 3, tp=2, sp=True, strategy="optim_grads_params", etp=1),
    layout(8, 1, tp=4, cp=2, sp=True, etp=1),
    layout(8, 2, tp=2, cp=2, pp=2, sp=True, etp=1),
]


def case_of(model: str, dtype: str) -> Case:
    return invariant(3, model=MODELS[model], precision={"params_dtype": dtype})


@pytest.mark.parametrize(("model", "dtype"), [("deepseek", "bf16"), ("learned", "fp32")])
def test_layouts_of_mla_have_the_bits_of_one_rank(model: str, dtype: str) -> None:
    assert_same_bits(LAYOUTS, case_of(model, dtype))


def test_layouts_of_further_tokens_have_the_bits_of_one_rank() -> None:
    assert_same_bits(LAYOUTS[:2], case_of("mtp", "fp32"))
    assert_same_bits(LAYOUTS[2:], case_of("tied_mtp", "bf16"))


MORE = [("deepseek", "fp32"), ("learned", "bf16"), ("mtp", "bf16"), ("tied_mtp", "fp32")]


@pytest.mark.parametrize("kind", with_mark(MORE))
def test_more_layouts_have_the_bits_of_one_rank(kind: tuple[str, str]) -> None:
    assert_same_bits(LAYOUTS + MORE_LAYOUTS, case_of(*kind))
