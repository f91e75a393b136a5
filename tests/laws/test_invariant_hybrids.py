"""With `--invariant` hybrids with Mamba-2 or gated DeltaNet train in every layout as on one rank, in
every bit.
"""

from typing import Any

import pytest

from tests.laws.invariant import assert_same_bits, invariant
from tests.laws.more_layouts import with_mark
from tests.laws.test_invariant import layout
from tests.laws.test_invariant_experts import SOFTMAX
from tests.laws.worlds import Case

MAMBA = SOFTMAX | {
    "num_layers": 4,
    "moe_layer_freq": "1",
    "hybrid_layer_pattern": "ME*-",
    "mamba_state_dim": 6,
    "mamba_head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_num_groups": 4,
}
DELTA_NET = {
    "num_layers": 4,
    "num_query_groups": 4,
    "linear_attention_type": "gated_delta_net",
    "linear_attention_freq": "2",
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "untie_embeddings_and_output_weights": True,
}
MODELS = {"mamba": MAMBA, "delta_net": DELTA_NET}
DOCUMENTS = {"reset_attention_mask": True, "reset_position_ids": True}
LAYOUTS = [
    layout(2, 3, tp=2, sp=True, strategy="optim"),
    layout(3, 2, strategy="optim_grads"),
    layout(4, 3, tp=2, pp=2, schedule="zb-h1"),
]
MORE_LAYOUTS = [
    layout(1, 2, memory="full"),
    layout(1, 3, memory="selective"),
    layout(2, 2, tp=2, memory="full"),
    layout(4, 1, strategy="optim_grads_params"),
    layout(4, 3, tp=4, sp=True),
    layout(4, 2, pp=4),
    layout(8, 1, tp=4, sp=True, strategy="optim"),
    layout(8, 3, tp=2, pp=2, sp=True, strategy="optim"),
]


def case_of(model: str, dtype: str, **data: Any) -> Case:
    return invariant(3, model=MODELS[model], precision={"params_dtype": dtype}, data=data)


@pytest.mark.parametrize(("model", "dtype"), [("mamba", "fp32"), ("delta_net", "bf16")])
def test_layouts_of_hybrids_have_the_bits_of_one_rank(model: str, dtype: str) -> None:
    assert_same_bits(LAYOUTS, case_of(model, dtype))


@pytest.mark.parametrize("kind", with_mark([("mamba", "bf16"), ("delta_net", "fp32")]))
def test_more_layouts_of_hybrids_have_the_bits_of_one_rank(kind: tuple[str, str]) -> None:
    """Documents of random lengths in a sequence."""
    assert_same_bits(LAYOUTS + MORE_LAYOUTS, case_of(*kind, **DOCUMENTS))
