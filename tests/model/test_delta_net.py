"""Gated DeltaNet and KDA are the layers of transformers, in both directions."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from nanotrain.config.layer_kinds import LinearAttentionConfig
from nanotrain.config.model import ModelConfig
from nanotrain.model.context import LayerContext, ModelParallel
from nanotrain.model.parameters import Parameters
from nanotrain.model.sublayers import build_mixer
from nanotrain.spec.declaration import Declaration
from nanotrain.spec.kinds import MIXERS
from nanotrain.spec.shape import ModelShape
from tests.attention.fp64_transformers import modeling_in_fp64
from tests.model.building import LLAMA

HEADS = {"gated_delta_net": (2, 4), "kda": (4, 4)}
KEY_DIM, VALUE_DIM, KERNEL = 8, 8, 4
FAMILIES = {"gated_delta_net": "qwen3_next", "kda": "kimi_linear"}


def model_of(kind: str) -> ModelConfig:
    keys, values = HEADS[kind]
    sizes = LinearAttentionConfig(
        KERNEL, KEY_DIM, VALUE_DIM, num_key_heads=keys, num_value_heads=values
    )
    return replace(LLAMA, linear_attention_type=kind, linear_attention=sizes)


def layer_of(kind: str) -> nn.Module:
    """A layer in fp64, with random parameters."""
    model, draw = model_of(kind), torch.Generator().manual_seed(0)
    specs = MIXERS[kind].declare(Declaration(ModelShape.of(model), "fp32"))
    values = {
        spec.name: torch.randn(spec.shape, generator=draw, dtype=torch.float64) * 0.3
        for spec in specs
    }
    params = Parameters({name: nn.Parameter(value) for name, value in values.items()})
    return build_mixer(model, params, parallel=ModelParallel.single_rank(), layer=0)


def of_transformers(
    kind: str, ours: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Its layer with our parameters, and its parameters by our names, as views through which
    gradients flow.
    """
    p = {name: value.detach().clone().requires_grad_() for name, value in ours.named_parameters()}
    conv = torch.cat([p[f"{name}_conv.weight"] for name in ("query", "key", "value")])[:, None]
    keys, values = HEADS[kind]
    named = {"conv1d.weight": conv, "A_log": p["decay"], "dt_bias": p["step_bias"]}
    if kind == "gated_delta_net":

        def by_group(*names: str) -> Tensor:
            return torch.cat(
                [p[f"{name}.weight"].unflatten(0, (keys, -1)) for name in names], dim=1
            ).flatten(0, 1)

        named |= {"in_proj_qkvz.weight": by_group("query", "key", "value", "gate")}
        named |= {"in_proj_ba.weight": by_group("beta", "step")}
        named |= {"norm.weight": p["norm.weight"], "out_proj.weight": p["output.weight"]}
    else:
        named = {"conv1d.weight": conv} | {
            f"forget_gate.{name}": value for name, value in named.items() if "_" in name
        }
        named["forget_gate.A_log"] = named["forget_gate.A_log"].view(1, 1, -1, 1)
        names = {
            "q_proj": "query",
            "k_proj": "key",
            "v_proj": "value",
            "b_proj": "beta",
            "o_norm": "norm",
        }
        names |= {"o_proj": "output", "g_a_proj": "gate_down", "g_b_proj": "gate_up"}
        names |= {"forget_gate.f_a_proj": "step_down", "forget_gate.f_b_proj": "step_up"}
        named |= {f"{theirs}.weight": p[f"{ours}.weight"] for theirs, ours in names.items()}
    sizes = {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_num_heads": values,
    }
    dims = {
        "linear_key_head_dim": KEY_DIM,
        "linear_value_head_dim": VALUE_DIM,
        "linear_head_dim": KEY_DIM,
    }
    config = SimpleNamespace(
        **sizes, **dims, linear_conv_kernel_dim=KERNEL, hidden_size=LLAMA.hidden_size, hidden_act="silu",
        rms_norm_eps=LLAMA.norm_epsilon, layer_types=["linear_attention"],
    )  # fmt: skip
    modeling = modeling_in_fp64(FAMILIES[kind], monkeypatch)
    layer = {"kda": "KimiLinearDeltaAttention", "gated_delta_net": "Qwen3NextGatedDeltaNet"}[kind]
    theirs = getattr(modeling, layer)(config, 0)
    assert {name for name, _ in theirs.named_parameters()} == set(named)
    return theirs, p | {"": named}


@pytest.mark.parametrize("kind", FAMILIES)
def test_outputs_and_gradients_are_those_of_transformers(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = layer_of(kind)
    theirs, params = of_transformers(kind, ours, monkeypatch)
    named = params.pop("")
    hidden = torch.randn(2, 70, LLAMA.hidden_size, dtype=torch.float64, requires_grad=True)
    expected = torch.func.functional_call(theirs, named, (hidden,))
    computed = ours(hidden, LayerContext())
    grad = torch.randn_like(expected)
    ours_of = torch.autograd.grad(computed, (hidden, *ours.parameters()), grad)
    theirs_of = torch.autograd.grad(expected, (hidden, *params.values()), grad)
    for mine, other in zip((computed, *ours_of), (expected, *theirs_of), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
