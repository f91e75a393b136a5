"""The mixture-of-experts layer gives the same on any number of ranks."""

import pytest
import torch

from nanotrain.kernels import grouped
from nanotrain.model.context import LayerContext
from nanotrain.model.router_stats import RouterMetrics, collect_router_sums, routers_of, update_expert_bias
from tests.harness import run_ranks
from tests.model.moe_layers import (
    DEEPSEEK,
    IDLE_EXPERTS,
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
        for name, found in outcome.grads.items():
            close(part.total(name, found), part.of_weight(name, expected.grads[name]), what=name)
        check_metrics(ctx, full, layer)


def check_metrics(ctx, full, layer):
    """Both layers count the same and update their bias alike."""
    routers, full_routers = routers_of(layer), routers_of(full)
    full_sums = collect_router_sums(full_routers, [])
    sums = collect_router_sums(routers, [ctx.group("tp"), ctx.group("dp_cp")])
    expected, found = (RouterMetrics.of(each["router"].tolist()) for each in (full_sums, sums))
    assert found.tokens_per_expert == expected.tokens_per_expert
    assert found.dropped_fraction == expected.dropped_fraction
    numbers = [[one.entropy, one.aux_loss, one.z_loss] for one in (found, expected)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)
    assert layer.router.stats.sums().abs().sum() == 0, "every step counts anew"
    update_expert_bias(routers, sums, rate=0.25)
    update_expert_bias(full_routers, full_sums, rate=0.25)
    if full.router.expert_bias is not None:
        assert torch.equal(layer.router.expert_bias, full.router.expert_bias)


@pytest.mark.parametrize(("num_ranks", "sizes"), LAYOUTS, ids=lambda value: str(value))
def test_every_layout_equals_one_rank(num_ranks, sizes):
    sizes = dict(sizes)
    run_ranks(num_ranks, one_part_of_every_model, sizes.pop("sp", False), **sizes)


def test_an_expert_without_tokens_gets_zero_gradient_and_the_others_do_not():
    outcome = run(build_full(DEEPSEEK), random(B, S, H, seed=7), random(B, S, H, seed=8))
    for name in ("experts.gate.weight", "experts.up.weight", "experts.down.weight"):
        is_idle = (outcome.grads[name] == 0).all(dim=(1, 2))
        assert is_idle.nonzero().flatten().tolist() == list(IDLE_EXPERTS)


def test_kernels_agree(monkeypatch):
    for model in (MODELS["dropless"], MODELS["capacity"]):
        one = build_full(model)
        monkeypatch.setattr(grouped, "_grouped_mm", None)
        other = build_full(model)
        monkeypatch.undo()
        x, grad = random(B, S, H, seed=7), random(B, S, H, seed=8)
        expected, found = run(one, x, grad), run(other, x, grad)
        close(found.output, expected.output)
        close(found.grad_input, expected.grad_input)
        for name in expected.grads:
            close(found.grads[name], expected.grads[name])


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
    narrow = build_layer(model, {name: weight.bfloat16() for name, weight in full_weights(model).items()})
    x = random(1, 4, H, seed=5).bfloat16()
    with torch.no_grad():
        out, expected = (layer(x.to(t), LayerContext()) for layer, t in ((narrow, x.dtype), (exact, torch.float32)))
    assert out.dtype == torch.bfloat16
    assert (out.float() - expected).norm() < 0.02 * expected.norm()


def test_router_state_keeps_its_dtype_and_values_when_the_module_is_moved():
    layer = build_full(DEEPSEEK)
    run(layer, random(B, S, H, seed=7), random(B, S, H, seed=8))
    bias, sums = layer.router.expert_bias.clone(), layer.router.stats.sums()
    layer.to(torch.bfloat16).to_empty(device="cpu")
    assert layer.router.weight.dtype == torch.bfloat16
    assert torch.equal(layer.router.expert_bias, bias) and layer.router.expert_bias.dtype == torch.float32
    assert torch.equal(layer.router.stats.sums(), sums) and sums.dtype == torch.float64
    assert {name for name, _ in layer.router.named_buffers()} == {
        "expert_bias",
        *(f"stats.{name}" for name in ("tokens_per_expert", "num_tokens", "num_dropped")),
        *(f"stats.{name}" for name in ("entropy", "aux_loss", "z_loss", "microbatch_tokens")),
    }
