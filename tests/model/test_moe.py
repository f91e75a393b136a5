"""The mixture-of-experts layer gives the same on any number of ranks."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from nanotrain.comm.collectives import all_reduce
from nanotrain.kernels.grouped import LoopedMM
from nanotrain.model.context import LayerContext
from nanotrain.parallel.ep import experts
from nanotrain.train.parts.router_balance import router_metrics, update_expert_bias
from tests.harness import run_ranks
from tests.model.moe_layers import (
    DEEPSEEK,
    IDLE_EXPERTS,
    LLAMA4,
    MODELS,
    B,
    H,
    Part,
    S,
    build_full,
    build_layer,
    close,
    full_weights,
    random,
    run,
)

# ranks, then sizes of axes; etp is spelled out, as unset means as many as tp
LAYOUTS = [
    (2, {"ep": 2}),
    (2, {"tp": 2, "etp": 1}),
    (2, {"tp": 2, "etp": 2}),
    (2, {"tp": 2, "etp": 1, "ep": 2, "sp": True}),
    (2, {"cp": 2, "ep": 2}),
    (2, {"etp": 2}),
    (4, {"ep": 4}),
    (4, {"ep": 2}),
    (4, {"ep": 2, "etp": 2}),
    (4, {"tp": 2, "etp": 2, "ep": 2}),
    (4, {"tp": 2, "etp": 1, "ep": 4, "sp": True}),
    (4, {"tp": 2, "cp": 2, "etp": 2, "ep": 2, "sp": True}),
    (4, {"tp": 2, "cp": 2, "etp": 1, "ep": 4}),
    (4, {"cp": 4, "ep": 2}),
]


def one_part_of_every_model(ctx, sequence_parallel):
    part = Part(ctx, sequence_parallel)
    x, grad = random(B, S, H, seed=7), random(B, S, H, seed=8)
    for model in MODELS.values():
        weights = full_weights(model)
        full = build_full(model)
        expected = run(full, x, grad)
        mine = {name: part.of_weight(name, weight) for name, weight in weights.items()}
        layer = build_layer(model, mine, parallel=part.parallel)

        outcome = run(layer, part.of_batch(x), part.of_batch(grad), positions=part.positions)

        close(outcome.output, part.of_batch(expected.output))
        close(outcome.grad_input, part.of_batch(expected.grad_input))
        for name, actual in outcome.grads.items():
            close(part.total(name, actual), part.of_weight(name, expected.grads[name]), what=name)
        check_metrics(ctx, full, layer)


def check_metrics(ctx, full, layer):
    """Both layers count the same and update their bias alike."""
    full_sums, sums = full.router.stats.sums(), layer.router.stats.sums()
    all_reduce(sums, ctx.group("world"))
    expected, metrics = router_metrics(full_sums.tolist()), router_metrics(sums.tolist())
    assert metrics.pop("load") == expected.pop("load") and metrics["dropped"] == expected["dropped"]
    assert metrics == pytest.approx(expected, rel=1e-5)
    for router, total in ((layer.router, sums), (full.router, full_sums)):
        router.stats.reset()
        update_expert_bias(router, total[: router.num_experts], rate=0.25)
    if full.router.expert_bias is not None:
        assert torch.equal(layer.router.expert_bias, full.router.expert_bias)


@pytest.mark.parametrize(("num_ranks", "sizes"), LAYOUTS, ids=lambda value: str(value))
def test_every_layout_equals_one_rank(num_ranks, sizes):
    sizes = dict(sizes)
    run_ranks(num_ranks, one_part_of_every_model, sizes.pop("sp", False), **sizes, shares=True)


def test_an_expert_without_tokens_gets_zero_gradient_and_the_others_do_not():
    outcome = run(build_full(DEEPSEEK), random(B, S, H, seed=7), random(B, S, H, seed=8))
    for name in ("experts.gate.weight", "experts.up.weight", "experts.down.weight"):
        is_idle = (outcome.grads[name] == 0).all(dim=(1, 2))
        assert is_idle.nonzero().flatten().tolist() == list(IDLE_EXPERTS)


def test_the_input_of_an_expert_is_weighted_and_its_output_is_not():
    moe = replace(LLAMA4.moe, expert_capacity_factor=None)
    layer, x = build_full(replace(LLAMA4, moe=moe)), random(B, S, H, seed=7)
    weights = dict(layer.named_parameters())
    probs, ids = (x @ weights["router.weight"].T).sigmoid().max(dim=-1, keepdim=True)
    gate, up, down = (
        weights[f"experts.{name}.weight"][ids[..., 0]] for name in ("gate", "up", "down")
    )
    scaled = (probs * x)[..., None]
    expected = down @ (F.silu(gate @ scaled) * (up @ scaled))
    close(layer(x, LayerContext()), expected[..., 0])


def test_kernels_agree(monkeypatch):
    for model in (MODELS["dropless"], MODELS["capacity"]):
        grouped = build_full(model)
        monkeypatch.setattr(experts, "select_gemm", lambda weight: LoopedMM())
        looped = build_full(model)
        monkeypatch.undo()
        x, grad = random(B, S, H, seed=7), random(B, S, H, seed=8)
        expected, actual = run(grouped, x, grad), run(looped, x, grad)
        close(actual.output, expected.output)
        close(actual.grad_input, expected.grad_input)
        for name in expected.grads:
            close(actual.grads[name], expected.grads[name])


def test_a_batch_of_one_token_and_no_gradient_pass():
    layer = build_full(DEEPSEEK)
    x = random(1, 1, H, seed=3)
    with torch.no_grad():
        single = layer(x, LayerContext())
        together = layer(torch.cat([x, random(1, 5, H, seed=4)], dim=1), LayerContext())
    close(single[0, 0], together[0, 0])
    assert layer.router.stats.sums().abs().sum() == 0, "only training is counted"


def test_bf16_stays_near_fp32():
    model = MODELS["deepseek"]
    exact = build_full(model)
    narrow = build_layer(
        model, {name: weight.bfloat16() for name, weight in full_weights(model).items()}
    )
    x = random(1, 4, H, seed=5).bfloat16()
    with torch.no_grad():
        out, expected = (
            layer(x.to(t), LayerContext())
            for layer, t in ((narrow, x.dtype), (exact, torch.float32))
        )
    assert out.dtype == torch.bfloat16
    assert (out.float() - expected).norm() < 0.02 * expected.norm()


def test_router_state_keeps_its_dtype_and_values_when_the_module_is_moved():
    layer = build_full(DEEPSEEK)
    run(layer, random(B, S, H, seed=7), random(B, S, H, seed=8))
    bias, sums = layer.router.expert_bias.clone(), layer.router.stats.sums()
    layer.to(torch.bfloat16).to_empty(device="cpu")
    assert layer.router.weight.dtype == torch.bfloat16
    assert (
        torch.equal(layer.router.expert_bias, bias)
        and layer.router.expert_bias.dtype == torch.float32
    )
    assert torch.equal(layer.router.stats.sums(), sums) and sums.dtype == torch.float64
    assert {name for name, _ in layer.router.named_buffers()} == {
        "expert_bias",
        *(f"stats.{name}" for name in ("tokens_per_expert", "num_tokens", "num_dropped")),
        *(f"stats.{name}" for name in ("entropy", "aux_loss", "z_loss", "microbatch_tokens")),
    }


def order_of_events(ctx):
    """What a rank does in forward and backward, by the record of its all-to-alls and of the shared
    expert.
    """
    part, events = Part(ctx, sequence_parallel=False), []
    mine = {name: part.of_weight(name, weight) for name, weight in full_weights(DEEPSEEK).items()}
    layer, heartbeat = (
        build_layer(DEEPSEEK, mine, parallel=part.parallel),
        ctx.group("ep").heartbeat,
    )
    started, waits = heartbeat.started, heartbeat.wait_begins
    heartbeat.started = lambda *args, **sent: events.append("send") or started(*args, **sent)
    heartbeat.wait_begins = lambda *args, **sent: events.append("wait") or waits(*args, **sent)
    layer.shared.register_forward_hook(lambda *_: events.append("shared"))
    layer.shared.register_full_backward_hook(lambda *_: events.append("shared backward"))
    x = part.of_batch(random(B, S, H, seed=7)).requires_grad_()
    out = layer(x, LayerContext())
    events.append("backward")
    out.sum().backward()
    return events


def test_tokens_travel_while_the_shared_expert_computes():
    counts, combine, gradients = ["send", "wait", "wait"], ["send", "wait"], ["send", "wait"]
    for events in run_ranks(2, order_of_events, ep=2):
        forward = [*counts, "send", "shared", "wait", *combine]
        assert events == [*forward, "backward", *gradients, "send", "shared backward", "wait"]
