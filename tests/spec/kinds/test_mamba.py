"""Mamba-2, pure: every parameter is sharded by heads or groups, and begins as in Mamba-2."""

from dataclasses import replace

import pytest

from nanotrain.config.layer_kinds import MambaConfig
from nanotrain.config.model import ModelConfig
from nanotrain.spec.declaration import Declaration
from nanotrain.spec.kinds import MIXERS
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.params import ParamSpec
from nanotrain.spec.shape import ModelShape
from tests.spec.kinds.sent import sent_over_cp

MODEL = ModelConfig(
    num_layers=1,
    hidden_size=32,
    vocab_size=8,
    linear_attention_type="mamba2",
    mamba=MambaConfig(state_dim=6, head_dim=4, num_groups=2),
)
SHAPE, KIND = ModelShape.of(MODEL), MIXERS["mamba2"]


def declared() -> dict[str, ParamSpec]:
    return {spec.name: spec for spec in KIND.declare(Declaration(SHAPE, "fp32", 2))}


def test_heads_follow_from_the_width_and_are_sharded_with_their_groups() -> None:
    shapes = {name: spec.shape for name, spec in declared().items()}
    assert SHAPE.mamba_heads == 16
    assert shapes["gate.weight"] == shapes["value.weight"] == (64, 32) and shapes["key.weight"] == (
        12,
        32,
    )
    assert (
        shapes["step.weight"] == (16, 32)
        and shapes["norm"] == (64,)
        and shapes["output.weight"] == (32, 64)
    )
    for spec in declared().values():
        assert [shard.dim for shard in spec.shards] == [int(spec.name == "output.weight")]
        assert not spec.grad_sum_axes


def test_only_wide_products_are_in_fp8() -> None:
    in_fp8 = {name for name, spec in declared().items() if spec.in_fp8}
    assert in_fp8 == {f"{name}.weight" for name in ("gate", "value", "key", "query", "output")}


@pytest.mark.parametrize("comm_type", ["p2p", "a2a"])
def test_what_is_sent_for_the_scan_grows_with_the_sequence_by_heads_only(comm_type: str) -> None:
    rank = LayerSizes(SHAPE, batch_size=2, seq_length=32, cp=4, cp_index=1, cp_comm_type=comm_type)
    sent, longer = (sent_over_cp("mamba2", each) for each in (rank, replace(rank, seq_length=64)))
    assert (sent == longer) == (comm_type == "p2p")
    # three tokens before both chunks, of values, keys and queries
    assert sent["p2p"] == (2 * 2 * 3 * (64 + 2 * 12) * 2,) * 2
    if comm_type == "p2p":
        assert sent["all_gather"] == (3 * 2 * 2 * 16 * (1 + 4 * 6) * 4, 0)
