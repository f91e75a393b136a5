"""What layers run: parallelism, recomputation, experts and 8 bits change the operators as they
should.
"""

import csv
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from nanotrain.planner.engine import engine_of, with_sections
from nanotrain.planner.operator_time import SCAN_STEP_S, OperatorTimes
from nanotrain.planner.parts import Part, Parts, Streams
from nanotrain.planner.prediction import estimate_memory
from nanotrain.planner.program_bytes import ProgramBytes
from nanotrain.spec.kinds import MLPS
from nanotrain.spec.kinds.block import block_operators
from nanotrain.spec.operators import Convolution, Scan, ScanCost
from tests.planner.scenarios import llama

MEASURED = list(
    csv.DictReader(Path(__file__).with_name("measured_moe_layers.tsv").open(), delimiter="\t")
)
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"hidden_size": 4096, "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 14336},
    "deepseek": {
        "hidden_size": 7168, "num_experts": 32, "moe_router_topk": 8, "moe_ffn_hidden_size": 2048,
        "moe_shared_expert_intermediate_size": 2048, "moe_router_num_groups": 8, "moe_router_group_topk": 4,
    },
}  # fmt: skip
MOE = {"num_experts": 64, "moe_router_topk": 8, "moe_ffn_hidden_size": 1024}


def block(times: OperatorTimes, layer: int = 0) -> Parts:
    return times.parts(block_operators(times.sizes, layer))


def core_attention(times: OperatorTimes, layer: int = 0) -> Part:
    return next(part for part in block(times, layer) if part.name == "core_attn")


def passes(layers: OperatorTimes, **options: Any) -> tuple[Streams, Streams]:
    forward, backward = Streams(), Streams()
    for part in block(layers):
        part.run_forward(forward)
        part.run_backward(backward, **options)
    return forward, backward


def test_both_halves_of_the_backward_are_all_of_it() -> None:
    layers = OperatorTimes(llama(8))
    _, whole = passes(layers)
    _, dgrad = passes(layers, wgrad=False)
    _, wgrad = passes(layers, dgrad=False)
    assert dgrad.compute + wgrad.compute == pytest.approx(whole.compute)
    assert dgrad.launches + wgrad.launches == whole.launches


def test_the_backward_is_about_twice_the_forward() -> None:
    forward, backward = passes(OperatorTimes(llama(8)))
    assert 1.8 < backward.compute / forward.compute < 2.4
    assert forward.seconds == forward.compute


def test_tensor_parallelism_splits_the_products_and_communicates() -> None:
    one, _ = passes(OperatorTimes(llama(8)))
    eight, _ = passes(OperatorTimes(llama(8, tp=8)))
    assert one.compute / 8 < eight.compute < one.compute / 4
    assert eight.exposed["tp"] > 0
    assert eight.collectives == 4


@pytest.mark.parametrize("comm_type", ["p2p", "a2a", "allgather"])
def test_context_parallelism_splits_the_tokens(comm_type: str) -> None:
    one, _ = passes(OperatorTimes(llama(8, seq_length=16384, max_position_embeddings=16384)))
    values = {
        "seq_length": 16384,
        "max_position_embeddings": 16384,
        "cp": 4,
        "cp_comm_type": comm_type,
    }
    four, _ = passes(OperatorTimes(llama(8, **values)))
    assert one.compute / 4.5 < four.compute < one.compute / 3
    assert (four.exposed["cp"] > 0) == (comm_type != "p2p")


def test_experts_take_the_time_of_the_tokens_that_they_get() -> None:
    dense, _ = passes(OperatorTimes(llama(8, ffn_hidden_size=8 * 1024)))
    experts, _ = passes(OperatorTimes(llama(8, ep=8, **MOE)))
    busy, _ = passes(OperatorTimes(llama(8, ep=8, options={"imbalance": 1.5}, **MOE)))
    padded, _ = passes(OperatorTimes(llama(8, ep=8, moe_expert_rank_capacity_factor=1.5, **MOE)))
    assert dense.compute < experts.compute < padded.compute < busy.compute, "products skip padding"
    assert 0 < experts.exposed["ep"] < padded.exposed["ep"] == busy.exposed["ep"]


def test_a_node_gets_every_token_once_with_a_flexible_dispatcher() -> None:
    sent, flex = (
        passes(OperatorTimes(llama(64, ep=64, options={"dispatcher": name}, **MOE)))[0].exposed[
            "ep"
        ]
        for name in ("alltoall", "flex")
    )
    assert flex < sent


def test_group_limited_routing_reaches_fewer_nodes() -> None:
    limited = {"moe_router_num_groups": 8, "moe_router_group_topk": 4}
    anywhere, grouped = (
        passes(OperatorTimes(llama(64, ep=64, options={"dispatcher": "flex"}, **MOE, **groups)))[
            0
        ].exposed["ep"]
        for groups in ({}, limited)
    )
    # 8 nodes: 8 experts in any of them are on 5.25 on average, in those of 4 groups on 3.6
    assert grouped == pytest.approx(3.6 / 5.25 * anywhere, rel=0.1)


def test_eight_bits_shorten_products_and_add_casts() -> None:
    bf16, _ = passes(OperatorTimes(llama(8)))
    fp8, _ = passes(OperatorTimes(llama(8, options={"matmul_dtype": "fp8"})))
    assert 0.5 < fp8.compute / bf16.compute < 0.9
    assert fp8.launches > bf16.launches


def test_latent_attention_and_windows() -> None:
    latent = llama(8, multi_latent_attention=True, q_lora_rank=1536, num_query_groups=None)
    forward, _ = passes(OperatorTimes(latent))
    assert forward.compute > 0
    full, window = (
        core_attention(
            OperatorTimes(llama(8, seq_length=16384, max_position_embeddings=16384, **more))
        ).forward
        for more in ({}, {"window_size": 1024})
    )
    assert window < 0.4 * full


def test_chunks_of_attention_are_sequences_of_their_own() -> None:
    sizes = {"seq_length": 8192, "max_position_embeddings": 8192}
    chunked = OperatorTimes(llama(8, **sizes, attention_chunk_size=3072, window_attn_skip_freq="2"))
    full, first = (core_attention(chunked, layer) for layer in (1, 0))
    shape = chunked.sizes.shape
    assert first.flops / full.flops == pytest.approx((2 * 3072**2 + 2048**2) / 8192**2, rel=1e-3)
    assert first.forward < 0.5 * full.forward
    assert [shape.attention_chunks(layer, seq_length=8192) for layer in (0, 1)] == [
        ((2, 3072), (1, 2048)),
        ((1, 8192),),
    ]


def test_attention_that_writes_its_scores_takes_longer() -> None:
    flash, written = (
        core_attention(OperatorTimes(llama(8, attention_backend=name))).forward
        for name in ("flash", "unfused")
    )
    assert written > 2 * flash


def test_layers_with_experts_take_as_long_as_measured() -> None:
    """Forward and backward on 8 H100, whose router's launches are hidden behind a product before
    it.
    """
    free = {"launches": {"operator_s": 0.0}}
    engine, errors = with_sections(engine_of("megatron"), free), []
    for row in MEASURED:
        scenario = llama(
            8, ep=8, expert_tensor_parallel_size=1, activation="gelu", num_query_groups=None, **MODELS[row["sizes"]],
            options={"matmul_dtype": row["dtype"], "dispatcher": row["dispatcher"]},
        )  # fmt: skip
        layers = OperatorTimes(replace(scenario, engine=engine))
        streams = Streams(), Streams()
        for part in layers.parts(MLPS["moe"].operators(layers.sizes)):
            part.run_forward(streams[0])
            part.run_backward(streams[1])
        for name, each in zip(("forward_ms", "backward_ms"), streams, strict=True):
            errors.append(abs(1e3 * each.seconds / float(row[name]) - 1))
    assert median(errors) < 0.08
    assert max(errors) < 0.18


@pytest.mark.parametrize("kind", ["mamba2", "gated_delta_net", "kda"])
def test_a_scan_takes_as_long_as_the_bytes_of_its_kernels(kind: str, monkeypatch) -> None:
    values = {"linear_attention_type": kind}
    values |= {"linear_num_key_heads": 32} if kind == "kda" else {}
    scenario = llama(8, engine="nanotrain", **values)
    bandwidth = scenario.machine.memory_bandwidth
    times = OperatorTimes(scenario)
    (scan,) = (each for each in block_operators(times.sizes, 0) if isinstance(each, Scan))
    with monkeypatch.context() as patched:
        patched.setattr(OperatorTimes, "_scan_row", lambda *_: "torch")
        (torch_part,) = times.scan(scan)
    assert torch_part.forward > scan.forward.num_bytes / bandwidth
    assert torch_part.dgrad > scan.backward.num_bytes / bandwidth
    rows = {"none": "triton", "fla": "fla", "mamba_ssm": "triton"}
    if kind == "mamba2":
        rows["mamba_ssm"] = "mamba_ssm"
    for package, row in rows.items():
        gpu = replace(scenario.gpu, kernel_packages=frozenset({package}))
        (part,) = OperatorTimes(replace(scenario, gpu=gpu)).scan(scan)
        passes = scan.kernels[row]
        assert part.forward > sum(cost.num_bytes for cost in passes.forward) / bandwidth
        assert part.dgrad > sum(cost.num_bytes for cost in passes.backward) / bandwidth
        assert part.launches[0] == sum(cost.launches for cost in passes.forward)
        assert 3 * part.forward < torch_part.forward
    (fused_part,) = OperatorTimes(llama(8, engine="megatron", **values)).scan(scan)
    assert 5 * fused_part.forward < torch_part.forward


def test_a_walk_takes_at_least_the_time_of_its_chunks() -> None:
    times = OperatorTimes(llama(8, engine="nanotrain"))
    cost = ScanCost(flops=0, num_bytes=0, launches=1, steps=100, programs=133)
    assert times._scan_kernel_s(cost) == pytest.approx(2 * 100 * SCAN_STEP_S)
    assert times._scan_kernel_s(replace(cost, programs=132)) == pytest.approx(100 * SCAN_STEP_S)


def test_a_convolution_of_the_package_moves_fewer_bytes() -> None:
    scenario = llama(8, engine="nanotrain", linear_attention_type="mamba2")
    times = OperatorTimes(scenario)
    (conv,) = (each for each in block_operators(times.sizes, 0) if isinstance(each, Convolution))
    seconds = []
    for package in ("none", "causal_conv1d"):
        gpu = replace(scenario.gpu, kernel_packages=frozenset({package}))
        (part,) = OperatorTimes(replace(scenario, gpu=gpu)).convolution(conv)
        seconds.append(part.forward)
    assert seconds[1] < 0.7 * seconds[0]


@pytest.mark.parametrize(("backend", "is_slow"), [("unfused", True), ("flash", False)])
def test_heads_of_odd_widths_are_slow_where_scores_are_written_out(
    backend: str, is_slow: bool
) -> None:
    def seconds(head_dim: int) -> float:
        layers = OperatorTimes(llama(8, kv_channels=head_dim, attention_backend=backend))
        return core_attention(layers).forward

    assert (seconds(108) > 1.5 * seconds(112)) == is_slow


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("engine", ["megatron", "nanotrain"])
def test_layers_with_a_window_have_key_heads_of_their_own(engine: str, cp: int) -> None:
    window = {
        "engine": engine,
        "tp": 2,
        "cp": cp,
        "window_size": 1024,
        "window_attn_skip_freq": "2",
    }
    mixed, wide, narrow = (
        llama(8, **window, num_query_groups=groups, window_query_groups=of_window)
        for groups, of_window in ((4, 8), (8, None), (4, None))
    )
    layers = {mixed.shape.has_window(layer): layer for layer in (0, 1)}
    for has_window, other in ((True, wide), (False, narrow)):
        layer = layers[has_window]
        assert block(OperatorTimes(mixed), layer) == block(OperatorTimes(other), layer)
        assert ProgramBytes(mixed).block(layer) == ProgramBytes(other).block(layer)
    windowed = layers[True]
    assert block(OperatorTimes(wide), windowed) != block(OperatorTimes(narrow), windowed)
    kept = [estimate_memory(each).activations for each in (narrow, mixed, wide)]
    assert kept == sorted(kept) and kept[0] < kept[1] < kept[2]


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("kind", ["allgather", "p2p"])
def test_keys_and_values_of_the_whole_sequence_are_gathered_whatever_the_number_of_ranks(
    cp: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = OperatorTimes(llama(8, cp=cp, cp_comm_type=kind, engine="nanotrain", mbs=2, gbs=16))
    sizes = []

    def collective(name: str, operation: str, *, num_bytes: float) -> float:
        if name == "cp" and operation == "all_gather":
            sizes.append(num_bytes)
        return 0.0

    monkeypatch.setattr(times, "collective", collective)
    block(times)
    tokens, kv_heads, head_dim, itemsize = 2 * 4096, 8, 128, 2
    whole = 2 * tokens * kv_heads * head_dim * itemsize  # keys and values
    assert sizes[0] == pytest.approx(whole), sizes
