"""With `--invariant` rules for matrices and Lion update in every layout as on one rank, in every bit."""

from typing import Any

import pytest

from tests.laws.invariant import assert_same_bits, invariant
from tests.laws.more_layouts import with_mark
from tests.laws.test_invariant import layout
from tests.laws.test_invariant_experts import SIGMOID
from tests.laws.worlds import Case

# odd widths: shards end within vectors
LLAMA = {"num_query_groups": 4, "ffn_hidden_size": 60, "num_layers": 1}
PER_HEAD = {"muon_split_qkv_per_head": True, "muon_ns_algorithm": "gram"}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": {"optimizer": "muon", "muon_use_nesterov": True},
    "muon_heads": {"optimizer": "muon", "muon_fp32_matmul_prec": "highest", **PER_HEAD},
    "normuon": {"optimizer": "normuon", "muon_scalar_optimizer": "lion"},
    "muon_h": {"optimizer": "muon_h"},
    "adam_h": {"optimizer": "adam_h"},
    "lion": {"optimizer": "lion"},
}
LAYOUTS = [
    layout(2, 3, tp=2, sp=True, strategy="optim"),
    layout(3, 2, strategy="optim_grads"),
]
MORE_LAYOUTS = [
    layout(2, 2, cp=2, kind="p2p"),
    layout(2, 2, strategy="no_shard"),
    layout(4, 1, strategy="optim_grads_params"),
    layout(4, 3, strategy="optim", instances=2, outer="optim"),
    layout(4, 3, tp=4),
    layout(4, 3, tp=2, strategy="optim_grads_params"),
    layout(8, 1, tp=2, cp=2, sp=True, strategy="optim_grads"),
]
OF_EXPERTS = [
    layout(2, 3, strategy="optim", ep=2),
    layout(4, 2, tp=2, sp=True, ep=2, etp=1, strategy="optim"),
    layout(4, 3, tp=2, pp=2, sp=True, ep=2, etp=1),
]


def case_of(name: str, dtype: str = "fp32", **model: Any) -> Case:
    return invariant(
        3, model=LLAMA | model, optim=OPTIMIZERS[name], precision={"params_dtype": dtype}
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_layouts_of_rules_have_the_bits_of_one_rank(name: str) -> None:
    assert_same_bits(LAYOUTS, case_of(name))


@pytest.mark.parametrize("name", with_mark(OPTIMIZERS))
def test_more_layouts_of_rules_have_the_bits_of_one_rank(name: str) -> None:
    dtype = "bf16" if name == "muon" else "fp32"
    assert_same_bits(MORE_LAYOUTS, case_of(name, dtype))
    assert_same_bits(OF_EXPERTS, case_of(name, dtype, **SIGMOID))
