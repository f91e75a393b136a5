"""The mixture-of-experts layer gives the same on any number of ranks."""

from dataclasses import replace

import pytest
import torch

from nanotrain.comm.group import Group
from nanotrain.errors import TopologyError
from nanotrain.kernels import grouped
from nanotrain.model.moe import MoELayer
from nanotrain.model.parallel import ModelParallel
from nanotrain.model.router import MoEContext
from nanotrain.model.router_load import collect_router_loads, update_expert_bias
from nanotrain.topology.groups import GroupSpec
from tests.harness import run_ranks
from tests.model.moe_layers import (
    DEEPSEEK,
    DROPLESS,
    IDLE_EXPERTS,
    MODELS,
    B,
    H,
    LayerContext,
    Part,
    S,
    build_whole,
    close,
    give,
    random,
    run,
    whole_weights,
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
        weights = whole_weights(model)
        whole = build_whole(model)
        expected = run(whole, x, grad)
        mine = {name: part.of_weight(name, weight) for name, weight in weights.items()}
        layer = give(MoELayer(model, dtype=torch.float32, parallel=part.parallel), mine)

        outcome = run(layer, part.of_batch(x), part.of_batch(grad), places=part.places)

        close(outcome.output, part.of_batch(expected.output))
        close(outcome.grad_input, part.of_batch(expected.grad_input))
        for name, found in outcome.grads.items():
            close(part.total(name, found), part.of_weight(name, expected.grads[name]), what=name)
        check_loads(ctx, whole, layer)


def check_loads(ctx, whole, layer):
    """Both layers have counted the same, and move their bias alike."""
    (expected,) = collect_router_loads(whole, []).values()
    loads = collect_router_loads(layer, [ctx.group("tp"), ctx.group("dp_cp")])
    load = loads["router"]
    assert load.choices == expected.choices
    assert load.dropped_fraction == expected.dropped_fraction
    numbers = [[one.entropy, one.balance_loss, one.z_loss] for one in (load, expected)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)
    assert layer.router.tally.sums.abs().sum() == 0, "every step counts anew"
    update_expert_bias(layer, loads, rate=0.25)
    update_expert_bias(whole, {"router": expected}, rate=0.25)
    if whole.router.expert_bias is not None:
        assert torch.equal(layer.router.expert_bias, whole.router.expert_bias)


@pytest.mark.parametrize(("num_ranks", "sizes"), LAYOUTS, ids=lambda value: str(value))
def test_every_layout_equals_one_rank(num_ranks, sizes):
    sizes = dict(sizes)
    run_ranks(num_ranks, one_part_of_every_model, sizes.pop("sp", False), **sizes)


def test_an_expert_without_tokens_gets_zero_gradient_and_the_others_do_not():
    outcome = run(build_whole(DEEPSEEK), random(B, S, H, seed=7), random(B, S, H, seed=8))
    for name in ("experts.gate.weight", "experts.up.weight", "experts.down.weight"):
        is_idle = (outcome.grads[name] == 0).all(dim=(1, 2))
        assert is_idle.nonzero().flatten().tolist() == list(IDLE_EXPERTS)


def test_kernels_agree(monkeypatch):
    for model in (MODELS["dropless"], MODELS["capacity"]):
        one = build_whole(model)
        monkeypatch.setattr(grouped, "_grouped_mm", None)
        other = build_whole(model)
        monkeypatch.undo()
        x, grad = random(B, S, H, seed=7), random(B, S, H, seed=8)
        expected, found = run(one, x, grad), run(other, x, grad)
        close(found.output, expected.output)
        close(found.grad_input, expected.grad_input)
        for name in expected.grads:
            close(found.grads[name], expected.grads[name])


def test_a_batch_of_one_token_and_no_gradient_pass():
    layer = build_whole(DEEPSEEK)
    x = random(1, 1, H, seed=3)
    with torch.no_grad():
        alone = layer(x, LayerContext(MoEContext()))
        together = layer(torch.cat([x, random(1, 5, H, seed=4)], dim=1), LayerContext(MoEContext()))
    close(alone[0, 0], together[0, 0])
    assert layer.router.tally.sums.abs().sum() == 0, "only training is counted"


def test_bf16_stays_near_fp32():
    model = MODELS["deepseek"]
    exact = build_whole(model)
    narrow = give(
        MoELayer(model, dtype=torch.bfloat16, parallel=ModelParallel.single_rank()),
        {name: weight.bfloat16() for name, weight in whole_weights(model).items()},
    )
    x = random(1, 4, H, seed=5).bfloat16()
    with torch.no_grad():
        out, expected = (
            layer(x.to(t), LayerContext(MoEContext())) for layer, t in ((narrow, x.dtype), (exact, torch.float32))
        )
    assert out.dtype == torch.bfloat16
    assert (out.float() - expected).norm() < 0.02 * expected.norm()


def test_experts_that_the_ranks_cannot_share_are_refused():
    alone = ModelParallel.single_rank()
    two = Group(GroupSpec("ep", (0, 1), 0), process_group=object())
    with pytest.raises(TopologyError, match="7 experts cannot be shared by 2 ranks"):
        MoELayer(
            replace(DROPLESS, moe=replace(DROPLESS.moe, num_experts=7)),
            dtype=torch.float32,
            parallel=replace(alone, ep=two),
        )
    with pytest.raises(TopologyError, match="23 columns of an expert .* --expert-tensor-parallel-size"):
        MoELayer(
            replace(DROPLESS, moe=replace(DROPLESS.moe, ffn_hidden_size=23)),
            dtype=torch.float32,
            parallel=replace(alone, etp=two),
        )
