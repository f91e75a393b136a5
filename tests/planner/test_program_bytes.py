"""Bytes per operator in closed form: Korthikanti et al. (2022), section 4, where their terms are
the same.
"""

from dataclasses import replace
from typing import Any

import pytest

from nanotrain.planner.operator_time import OperatorTimes
from nanotrain.planner.prediction import estimate_memory
from nanotrain.planner.program_bytes import OperatorBytes, ProgramBytes
from nanotrain.planner.scenario import Scenario
from nanotrain.spec.counts import layer_weights
from nanotrain.spec.kinds import MIXERS
from nanotrain.spec.kinds.block import block_operators, head_operators
from nanotrain.spec.stages import StageSpec
from tests.planner.scenarios import llama

S, B, H, F = 4096, 1, 4096, 14336


def head(scenario: Scenario) -> list[OperatorBytes]:
    program = ProgramBytes(scenario)
    return program.transform(head_operators(program.sizes))


def block_flops(scenario: Scenario) -> float:
    times = OperatorTimes(scenario)
    return sum(part.flops for part in times.parts(block_operators(times.sizes, 0)))


def kept(layer: int = 0, **values: Any) -> int:
    return sum(op.saved for op in ProgramBytes(llama(8, **values)).block(layer))


def test_a_dense_block_keeps_what_its_operators_read() -> None:
    tokens, statistics = S * B, S * B * 4
    norms = 2 * (2 * tokens * H * 2 + statistics)  # input and output of both
    # queries, keys, values, output, log-sum-exp
    attention = tokens * (H + 2 * H // 4 + H) * 2 + statistics * 32
    mlp = tokens * 3 * F * 2  # gate and up, and their product
    assert kept() == norms + attention + mlp


def test_sequence_parallelism_divides_all_of_it() -> None:
    assert kept(tp=8) == kept() // 8
    assert kept(tp=8, sequence_parallel=False) > kept(tp=8)


def test_written_scores_are_kept_with_their_dropout() -> None:
    scores = 32 * S * S * B * 2
    statistics = 32 * S * B * 4
    assert kept(attention_backend="unfused") == kept() + scores - statistics
    dropped = kept(attention_backend="unfused", attention_dropout=0.1)
    assert dropped == kept(attention_backend="unfused") + scores + scores // 2


def test_a_softmax_that_is_not_fused_is_kept_in_fp32() -> None:
    fused = llama(8, attention_backend="unfused")
    unfused = replace(fused, features=frozenset({"unfused softmax"}))
    ops = [ProgramBytes(scenario).block(0) for scenario in (fused, unfused)]
    assert sum(op.saved for op in ops[1]) - sum(op.saved for op in ops[0]) == 32 * S * S * B * 2


@pytest.mark.parametrize(("module", "less"), [("layernorm", 2 * S * H * 2), ("mlp", 3 * S * F * 2)])
def test_recomputed_modules_are_not_kept(module: str, less: int) -> None:
    assert kept(recompute_granularity="selective", recompute_modules=[module]) == kept() - less


def test_full_recomputation_keeps_the_input_of_every_block() -> None:
    layers = ProgramBytes(llama(8, recompute_granularity="full"))
    stage = layers.stage(StageSpec(1, 8, 16, has_embedding=False, has_head=False))
    assert stage.kept == 8 * S * B * H * 2
    assert stage.further > kept() - S * B * H * 2


def test_offloaded_layers_are_kept_elsewhere() -> None:
    stage = StageSpec(1, 8, 16, has_embedding=False, has_head=False)
    all_kept = ProgramBytes(llama(8)).stage(stage)
    few = ProgramBytes(llama(8, cpu_offloading=True, cpu_offloading_num_layers=6)).stage(stage)
    assert few.kept * 4 == all_kept.kept


def test_the_backward_frees_what_it_has_read() -> None:
    layers = ProgramBytes(llama(8))
    peak = layers.peak_of_backward(
        [OperatorBytes(10, 3), OperatorBytes(20, 5), OperatorBytes(30, 1)]
    )
    assert peak.kept == 60
    assert peak.further == 1  # later 5 - 30 and 3 - 50
    assert layers.peak_of_backward([OperatorBytes(10, 50), OperatorBytes(20, 5)]).further == 30


def test_unfused_weight_gradients_are_tensors() -> None:
    fused, unfused = (
        ProgramBytes(llama(8, gradient_accumulation_fusion=fusion)) for fusion in (None, False)
    )
    ops = fused.block(0)
    weights = max(out * inputs for op in ops for out, inputs in op.weights)
    assert (
        0
        < unfused.peak_of_backward(ops).further - fused.peak_of_backward(ops).further
        <= weights * 2
    )


def test_experts_keep_evenly_routed_tokens() -> None:
    values = {"num_experts": 8, "moe_router_topk": 2, "ep": 4, "expert_tensor_parallel_size": 1}
    layers = ProgramBytes(llama(8, **values))
    pairs = 2 * S * B
    assert sum(op.saved for op in layers.block(0)) > pairs * (H + 3 * F) * 2
    assert (
        ProgramBytes(replace(layers.scenario, imbalance=1.5)).block(0)[4].saved
        == layers.block(0)[4].saved
    )
    more = sum(op.saved for op in ProgramBytes(replace(layers.scenario, imbalance=1.5)).block(0))
    assert more - sum(op.saved for op in layers.block(0)) == pairs // 2 * (H + 3 * F) * 2
    padded = ProgramBytes(llama(8, moe_expert_rank_capacity_factor=1.5, **values))
    assert sum(op.saved for op in padded.block(0)) == more


def test_inputs_in_8_bits_are_smaller() -> None:
    scenario = llama(8)
    low = replace(scenario, matmul_dtype="fp8")
    assert sum(op.saved for op in ProgramBytes(low).block(0)) < kept()


def test_a_fused_loss_keeps_low_precision_logits() -> None:
    scenario = llama(8)
    logits = S * B * 128256
    assert head(scenario)[-1] == OperatorBytes(logits * 4, logits * 2)
    assert head(replace(scenario, features=frozenset({"fused loss"})))[-1] == OperatorBytes(
        logits * 2, 0
    )


@pytest.mark.parametrize(
    "kind", ["gated_delta_net", "kda", "mamba2", "attention_mamba2", "short_conv"]
)
def test_layers_of_other_kinds_are_estimated_for_every_engine(kind: str) -> None:
    of_kind = {"linear_attention_type": kind, "linear_attention_freq": "2"}
    of_kind |= {"linear_num_key_heads": 32} if kind == "kda" else {}
    for engine in ("megatron", "nanotrain"):
        one, four = (llama(8, engine=engine, tp=tp, cp=2, **of_kind) for tp in (1, 4))
        bytes_of = [sum(op.saved for op in ProgramBytes(each).block(0)) for each in (one, four)]
        assert bytes_of[0] / 8 < bytes_of[1] < bytes_of[0] / 3
        flops = [block_flops(scenario) for scenario in (one, four)]
        assert flops[0] == pytest.approx(4 * flops[1], rel=0.15)
        # of the tokens of a rank
        assert flops[0] == pytest.approx(2 * layer_weights(one.shape)[0] * 2048, rel=0.4)
        assert estimate_memory(one).activations > 0


def test_sparse_attention_is_estimated_with_its_temporaries() -> None:
    sparse = {"multi_latent_attention": True, "q_lora_rank": 256, "num_query_groups": None}
    sparse |= {"sparse_attention_type": "dsa"}
    for tp in (1, 4):
        scenario = llama(8, engine="nanotrain", tp=tp, **sparse)
        layers = ProgramBytes(scenario)
        operators = MIXERS["dsa"].operators(layers.sizes)
        working = max(operator.working for operator in operators)
        assert working > 2**29 and max(op.working for op in layers.block(0)) >= working
        assert block_flops(scenario) > 0
