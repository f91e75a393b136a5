"""The mixture-of-experts layer gives what that of transformers gives: Mixtral, Qwen, DeepSeek-V3,
LongCat-Flash.
"""

from dataclasses import replace

import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3MoE
from transformers.models.longcat_flash.modeling_longcat_flash import (
    LongcatFlashConfig,
    LongcatFlashMoE,
)
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeConfig, Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

from tests.model.moe_layers import (
    DEEPSEEK,
    DROPLESS,
    ZERO_EXPERTS,
    B,
    E,
    H,
    S,
    build_full,
    close,
    full_weights,
    random,
    run,
)


def load_experts(block, weights):
    """Our weights in transformers' layout: gate and up stacked."""
    with torch.no_grad():
        gate_up = torch.cat([weights["experts.gate.weight"], weights["experts.up.weight"]], dim=1)
        block.experts.gate_up_proj.copy_(gate_up)
        block.experts.down_proj.copy_(weights["experts.down.weight"])
        block.gate.weight.copy_(weights["router.weight"])
    return block.eval()


def check_against(block, model):
    layer, x, grad = build_full(model), random(B, S, H, seed=7), random(B, S, H, seed=8)
    outcome = run(layer, x, grad)
    theirs = x.clone().requires_grad_()
    output = block(theirs)
    output.backward(grad)
    close(outcome.output, output.detach())
    close(outcome.grad_input, theirs.grad)
    close(outcome.grads["router.weight"], block.gate.weight.grad)
    experts = block.experts
    gate_up = torch.cat(
        [outcome.grads["experts.gate.weight"], outcome.grads["experts.up.weight"]], dim=1
    )
    close(gate_up, experts.gate_up_proj.grad)
    close(outcome.grads["experts.down.weight"], experts.down_proj.grad)
    return outcome.grads


def test_mixtral_block_gives_the_same():
    config = MixtralConfig(
        hidden_size=H, intermediate_size=24, num_local_experts=E, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"
    check_against(load_experts(MixtralSparseMoeBlock(config), full_weights(DROPLESS)), DROPLESS)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_qwen3_moe_block_gives_the_same(norm_topk_prob):
    model = replace(
        DROPLESS, moe=replace(DROPLESS.moe, router_topk=3, router_pre_softmax=not norm_topk_prob)
    )
    config = Qwen3MoeConfig(
        hidden_size=H,
        moe_intermediate_size=24,
        num_experts=E,
        num_experts_per_tok=3,
        norm_topk_prob=norm_topk_prob,
    )
    config._experts_implementation = "eager"
    check_against(load_experts(Qwen3MoeSparseMoeBlock(config), full_weights(model)), model)


def load_shared(shared, weights):
    with torch.no_grad():
        for ours, theirs in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")):
            getattr(shared, theirs).weight.copy_(weights[f"shared.{ours}.weight"])


def test_qwen2_moe_block_with_its_gate_of_the_shared_expert_gives_the_same():
    moe = replace(
        DROPLESS.moe,
        router_pre_softmax=True,
        shared_expert_intermediate_size=40,
        shared_expert_gate=True,
    )
    model = replace(DROPLESS, moe=moe)
    config = Qwen2MoeConfig(
        hidden_size=H,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        num_experts=E,
        num_experts_per_tok=model.moe.router_topk,
    )
    config._experts_implementation = "eager"
    weights = full_weights(model)
    block = load_experts(Qwen2MoeSparseMoeBlock(config), weights)
    load_shared(block.shared_expert, weights)
    with torch.no_grad():
        block.shared_expert_gate.weight.copy_(weights["shared_gate.weight"])
    grads = check_against(block, model)
    close(grads["shared_gate.weight"], block.shared_expert_gate.weight.grad)


def test_deepseek_block_gives_the_same():
    # Theirs counts a group's best two experts, ours topk // group_topk: the same in DeepSeek-V3 (8
    # // 4) and here.
    model = replace(
        DEEPSEEK,
        moe=replace(
            DEEPSEEK.moe, router_topk=4, router_group_topk=2, aux_loss_coeff=[0.0], z_loss_coeff=0.0
        ),
    )
    sizes = {
        "hidden_size": H,
        "moe_intermediate_size": 20,
        "n_routed_experts": E,
        "num_local_experts": E,
    }
    routing = {
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    }
    model = replace(model, moe=replace(model.moe, ffn_hidden_size=20))
    config = DeepseekV3Config(**sizes, **routing, n_shared_experts=2, norm_topk_prob=True)
    config._experts_implementation = "eager"
    weights = full_weights(model)
    block = load_experts(DeepseekV3MoE(config), weights)
    load_shared(block.shared_experts, weights)
    with torch.no_grad():
        block.gate.e_score_correction_bias.copy_(build_full(model).router.expert_bias)
    check_against(block, model)


def test_longcat_flash_block_gives_the_same():
    moe = replace(ZERO_EXPERTS.moe, latent_size=None, aux_loss_coeff=[0.0])
    model = replace(ZERO_EXPERTS, moe=moe)
    config = LongcatFlashConfig(
        hidden_size=H,
        expert_ffn_hidden_size=24,
        n_routed_experts=E,
        zero_expert_num=moe.num_zero_experts,
        moe_topk=moe.router_topk,
        routed_scaling_factor=moe.router_topk_scaling_factor,
    )
    config._experts_implementation = "eager"
    block, weights, layer = LongcatFlashMoE(config), full_weights(model), build_full(model)
    with torch.no_grad():
        gate_up = torch.cat([weights["experts.gate.weight"], weights["experts.up.weight"]], dim=1)
        block.experts.gate_up_proj[:E] = gate_up
        block.experts.down_proj.copy_(weights["experts.down.weight"])
        block.router.classifier.weight.copy_(weights["router.weight"])
        block.router.e_score_correction_bias.copy_(layer.router.expert_bias)
    x, grad = random(B, S, H, seed=7), random(B, S, H, seed=8)
    outcome, theirs = run(layer, x, grad), x.clone().requires_grad_()
    output = block(theirs)
    output.backward(grad)
    close(outcome.output, output.detach())
    close(outcome.grad_input, theirs.grad)
    close(outcome.grads["router.weight"], block.router.classifier.weight.grad)
    close(outcome.grads["experts.down.weight"], block.experts.down_proj.grad)
