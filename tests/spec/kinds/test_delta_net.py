"""Gated DeltaNet and KDA, pure: sizes of the published models, gradients summed over tp, FLOPs and
bytes sent.
"""

from dataclasses import replace

import pytest

from nanotrain.config.layer_kinds import LinearAttentionConfig
from nanotrain.config.model import ModelConfig
from nanotrain.spec.declaration import Declaration
from nanotrain.spec.kinds import MIXERS
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.shape import ModelShape
from tests.spec.kinds.sent import sent_over_cp

MODEL = ModelConfig(num_layers=2, hidden_size=2048, vocab_size=8)
QWEN3_NEXT = replace(
    MODEL, linear_attention_type="gated_delta_net", linear_attention=LinearAttentionConfig()
)
KIMI = replace(
    MODEL,
    hidden_size=2304,
    linear_attention_type="kda",
    linear_attention=LinearAttentionConfig(num_key_heads=32, num_value_heads=32),
)
NUM_PARAMETERS = {  # projections, convolutions, decays and steps, norm, output
    "gated_delta_net": 2048 * (2 * 2048 + 2 * 4096 + 2 * 32)
    + 4 * 8192
    + 2 * 32
    + 128
    + 4096 * 2048,
    "kda": 2304 * (3 * 4096 + 32 + 2 * 128)
    + 2 * 128 * 4096
    + 4 * 3 * 4096
    + 32
    + 4096
    + 128
    + 4096 * 2304,
}


@pytest.mark.parametrize("model", [QWEN3_NEXT, KIMI], ids=lambda model: model.linear_attention_type)
def test_parameters_are_those_of_the_published_model_and_follow_the_heads(
    model: ModelConfig,
) -> None:
    kind = model.mixers[0]
    specs = MIXERS[kind].declare(Declaration(ModelShape.of(model), "bf16", sequence_parallel=True))
    assert sum(spec.numel for spec in specs) == NUM_PARAMETERS[kind]
    replicated = {spec.name for spec in specs if not spec.shards}
    assert replicated == {"norm.weight"} | (
        {"gate_down.weight", "step_down.weight"} if kind == "kda" else set()
    )
    assert all(spec.grad_sum_axes == (("tp",) if spec.name in replicated else ()) for spec in specs)
    # too narrow for fp8; vectors and convolutions are no matrices
    narrow = {"beta.weight"} | ({"step.weight"} if kind != "kda" else set())
    matrices = {spec.name for spec in specs if spec.needs_whole_matrix}
    assert matrices - {spec.name for spec in specs if spec.in_fp8} == narrow
    assert {spec.name.split(".")[0] for spec in specs} - {
        name.split(".")[0] for name in matrices
    } == {
        *("decay", "step_bias", "norm"),
        *("query_conv", "key_conv", "value_conv"),
    }


def test_a_state_is_read_twice_and_written_once_per_token() -> None:
    sizes = LayerSizes.for_model(ModelShape.of(QWEN3_NEXT), seq_length=10)
    operators = MIXERS["gated_delta_net"].operators(sizes)
    flops = sum(operator.sequence_flops for operator in operators)
    assert flops == 10 * 3 * 2 * 32 * 128 * 128


@pytest.mark.parametrize("num_tokens", [1024, 4096])
def test_states_over_cp_are_as_large_for_every_length_and_heads_are_not(num_tokens: int) -> None:
    rank = LayerSizes(
        ModelShape.of(QWEN3_NEXT),
        batch_size=1,
        seq_length=num_tokens,
        tp=2,
        cp=4,
        cp_comm_type="p2p",
    )
    states = sent_over_cp("gated_delta_net", rank)
    assert states["all_gather"] == (3 * 2 * 16 * 128 * 256 * 4, 0) == states["reduce_scatter"][::-1]
    assert states["p2p"] == (3 * 8192 // 2 * 2,) * 2
    heads = sent_over_cp("gated_delta_net", replace(rank, cp_comm_type="a2a"))
    # key heads are 8 per tp rank, which 4 divides: none is repeated
    assert (
        heads["all_to_all"]
        == (num_tokens * 3 // 4 * (2 * (1024 + 1024 + 2048 + 2048) + 2 * 16 * 4),) * 2
    )
