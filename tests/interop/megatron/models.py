"""Checkpoints of small models with random weights, for the export to Megatron-LM."""

from dataclasses import replace
from pathlib import Path

import torch

from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.comm.group import Group
from nanotrain.config.config import Config, DataConfig
from nanotrain.config.layer_kinds import MambaConfig
from nanotrain.config.model import MLAConfig, ModelConfig, MoEConfig, MTPConfig
from nanotrain.config.schema import to_dict
from nanotrain.interop.hf.names import router_shapes
from nanotrain.spec.boxes import TensorBox
from nanotrain.spec.parameters import declare_model
from nanotrain.spec.shape import ModelShape

SIZES = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "vocab_size": 40,
    "max_position_embeddings": 12,
}
SIZES |= {"make_vocab_size_divisible_by": 1, "ffn_hidden_size": 32}
LLAMA = ModelConfig(
    **SIZES, num_query_groups=2, qk_layernorm=True, untie_embeddings_and_output_weights=True
)
GPT2 = ModelConfig(
    **SIZES,
    normalization="LayerNorm",
    activation="gelu",
    add_bias_linear=True,
    position_embedding_type="learned_absolute",
)
EXPERTS = {
    "num_experts": 4,
    "ffn_hidden_size": 24,
    "shared_expert_intermediate_size": 12,
    "shared_expert_gate": True,
}
ROUTER = {"router_enable_expert_bias": True, "router_score_function": "sigmoid"}
MOE = ModelConfig(
    **{**SIZES, "ffn_hidden_size": None},
    num_query_groups=2,
    untie_embeddings_and_output_weights=True,
    moe=MoEConfig(**EXPERTS, **ROUTER),
)
MIXED = ModelConfig(**SIZES, num_query_groups=2, moe=MoEConfig(**EXPERTS, layer_freq="[0,1]"))
GATED = replace(LLAMA, attention_output_gate=True, softmax_type="learnable")
LATENT = MLAConfig(kv_lora_rank=8, qk_head_dim=6, qk_pos_emb_head_dim=4, v_head_dim=5)
MLA = ModelConfig(**SIZES, multi_latent_attention=True, mla=LATENT)
DEEPSEEK = replace(
    MOE,
    num_query_groups=None,
    multi_latent_attention=True,
    mla=replace(LATENT, q_lora_rank=12),
    mtp=MTPConfig(num_layers=1),
)
HYBRID = ModelConfig(
    **SIZES | {"num_layers": 4},
    num_query_groups=2,
    untie_embeddings_and_output_weights=True,
    position_embedding_type="none",
    activation="squared_relu",
    hybrid_layer_pattern="M*-E",
    mamba=MambaConfig(state_dim=8, head_dim=8, num_groups=2),
    moe=MoEConfig(num_experts=4, ffn_hidden_size=24),
)


def write_checkpoint(
    folder: Path, model_config: ModelConfig, *, step: int = 3
) -> dict[str, torch.Tensor]:
    """Save random weights as a checkpoint of a run; returns them by their names in the model."""
    generator = torch.Generator().manual_seed(7)
    shape = ModelShape.of(model_config)
    sizes = {f"model/{spec.name}": spec.shape for spec in declare_model(shape)}
    for name, size in router_shapes(model_config).items():
        sizes[f"router/{name}"] = size
    values = {name: torch.randn(size, generator=generator) * 0.3 for name, size in sizes.items()}
    boxes = {TensorBox.full(name, value.shape): value for name, value in values.items()}
    config = to_dict(Config(model=model_config, data=DataConfig(data_path=["none"])))
    Checkpointer(folder / "checkpoints", group=Group.single_rank("world")).save(
        step, boxes, objects={}, config=config, topology={}
    )
    return {name.removeprefix("model/"): value for name, value in values.items()}
