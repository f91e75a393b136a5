"""Layers of megatron-core's MambaModel without a GPU, mamba-ssm and transformer-engine.

put_in_place()    before megatron-core is imported: plain torch in place of the kernels of mamba-ssm
build_hybrid()    a model of local layers, with the keys of transformer-engine's

The kernels are written from their definition (Dao and Gu 2024, section 6, and the signature of
mamba-ssm): a convolution over past tokens, one step of the state per token, then the gate.
"""

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad, silu, softplus


class GatedNorm(nn.Module):
    """RMSNorm per group of channels."""

    def __init__(self, size: int, *, eps: float, group_size: int, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.group_size = group_size

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, self.group_size))
        mean = groups.square().mean(-1, keepdim=True)
        return (groups * (mean + self.eps).rsqrt()).flatten(-2) * self.weight


def convolve_and_scan(
    zxBCdt: Tensor, weight: Tensor, bias: Tensor, dt_bias: Tensor, A: Tensor, **options: Any
) -> Tensor:
    """[batch, tokens, channels] -> [batch, tokens, heads * headdim]."""
    D, headdim, ngroups = options["D"], options["headdim"], options["ngroups"]
    num_heads = len(D)
    inner = num_heads * headdim
    z, xBC, dt = zxBCdt.split([inner, len(weight), num_heads], dim=-1)
    past = pad(xBC.transpose(1, 2), (weight.shape[1] - 1, 0))
    xBC = silu(conv1d(past, weight[:, None], bias, groups=len(weight)).transpose(1, 2))
    size = (len(weight) - inner) // 2
    x, B, C = xBC.split([inner, size, size], dim=-1)
    x = x.unflatten(-1, (num_heads, headdim))
    B, C = (
        part.unflatten(-1, (ngroups, -1)).repeat_interleave(num_heads // ngroups, dim=2)
        for part in (B, C)
    )
    dt = softplus(dt + dt_bias)
    state = torch.zeros(*x.shape[::2], headdim, B.shape[-1])
    rows = []
    for token in range(x.shape[1]):
        step = dt[:, token, :, None, None]
        added = x[:, token, ..., None] * B[:, token, :, None]
        state = state * (step * A[:, None, None]).exp() + step * added
        rows.append((state * C[:, token, :, None]).sum(-1))
    y = torch.stack(rows, dim=1) + x * D[:, None]
    return y.flatten(-2) * silu(z)


def put_in_place() -> None:
    """The names that megatron-core imports from mamba-ssm."""
    names = ["", ".ops", ".ops.triton", ".ops.triton.layernorm_gated", ".ops.triton.ssd_combined"]
    modules = {name: ModuleType(f"mamba_ssm{name}") for name in names}
    for name in names[:3]:
        modules[name].__path__ = []
    modules[names[3]].RMSNorm = GatedNorm
    modules[names[4]].mamba_chunk_scan_combined = None
    modules[names[4]].mamba_split_conv1d_scan_combined = convolve_and_scan
    sys.modules |= {module.__name__: module for module in modules.values()}


def local_stack(num_experts: int) -> Any:
    """The spec of the layers M, *, - and E."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.ssm import mamba_block
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    mamba_block.TENorm = WrappedTorchNorm
    linears = {"linear_fc1": ColumnParallelLinear, "linear_fc2": RowParallelLinear}
    projections = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
    mixer = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(**projections))
    mamba = MambaLayerSubmodules(
        norm=WrappedTorchNorm,
        mixer=mixer,
        mamba_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
    )
    attention = TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=ModuleSpec(
            SelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=ColumnParallelLinear,
                core_attention=DotProductAttention,
                linear_proj=RowParallelLinear,
            ),
        ),
        self_attn_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=WrappedTorchNorm,
        mlp=ModuleSpec(MLP, submodules=MLPSubmodules(**linears)),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
    )
    moe = TransformerLayerSubmodules(
        pre_mlp_layernorm=WrappedTorchNorm,
        mlp=get_moe_module_spec(use_te=False, num_experts=num_experts, moe_grouped_gemm=False),
        mlp_bda=get_bias_dropout_add,
    )
    submodules = mamba_block.MambaStackSubmodules(
        mamba_layer=ModuleSpec(MambaLayer, submodules=mamba),
        attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(MLPLayer, submodules=mlp),
        moe_layer=ModuleSpec(TransformerLayer, submodules=moe),
    )
    return ModuleSpec(mamba_block.MambaStack, submodules=submodules)


def build_hybrid(pattern: str, *, vocab_size: int) -> Any:
    """The model of `models.HYBRID`."""
    from megatron.core.activations import squared_relu
    from megatron.core.models.mamba import MambaModel
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=len(pattern),
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=32,
        normalization="RMSNorm",
        add_bias_linear=False,
        activation_func=squared_relu,
        num_moe_experts=4,
        moe_ffn_hidden_size=24,
        is_hybrid_model=True,
        mamba_state_dim=8,
        mamba_head_dim=8,
        mamba_num_groups=2,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return MambaModel(
        config,
        local_stack(num_experts=4),
        vocab_size=vocab_size,
        max_sequence_length=12,
        hybrid_override_pattern=pattern,
    ).eval()
