"""Where the weights of a GPT lie in a `torch_dist` checkpoint of Megatron-LM; pure.

    MegatronChunk   one chunk of a Megatron-LM tensor and the boxes of ours that it consists of
    check_model     the error for a model that cannot be written
    plan_chunks     the chunks of all tensors

Megatron-LM stacks the layers of a model along a new first dim, and the experts of a layer along a second one; where
only some layers have experts, every layer has tensors of its own name. The rows of `linear_qkv` are grouped by query
group (its query heads, its key head, its value head); those of `linear_fc1` are the gate's, then the others. The
norms before attention and MLP have the names of transformer-engine's fused layers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nanotrain.config.model import ModelConfig
from nanotrain.errors import CheckpointError
from nanotrain.spec.boxes import Box, TensorBox
from nanotrain.spec.parameters import declare_model
from nanotrain.spec.shape import ModelShape

Shape = tuple[int, ...]


@dataclass(frozen=True)
class MegatronChunk:
    """One chunk of a tensor of Megatron-LM."""

    key: str  # name of the tensor
    shape: Shape  # of the whole tensor
    box: Box  # the chunk
    sources: tuple[TensorBox, ...]  # boxes of our tensors, by their names in the model
    num_groups: int = 1  # number of row groups of each source; the groups of the sources alternate


# Modules of a layer, in the names of Megatron-LM, and the modules of ours that each consists of.
ATTENTION: Mapping[str, tuple[str, ...]] = {
    "self_attention.linear_qkv.layer_norm_": ("attention_norm.",),
    "self_attention.linear_qkv.": ("attention.query.", "attention.key.", "attention.value."),
    "self_attention.q_layernorm.": ("attention.query_norm.",),
    "self_attention.k_layernorm.": ("attention.key_norm.",),
    "self_attention.linear_proj.": ("attention.output.",),
}
MLP: Mapping[str, tuple[str, ...]] = {
    "mlp.linear_fc1.layer_norm_": ("mlp_norm.",),
    "mlp.linear_fc1.": ("mlp.gate.", "mlp.up."),
    "mlp.linear_fc2.": ("mlp.down.",),
}
# transformer-engine does not fuse the norm before experts; the local modules use the name of a dense layer for it.
MOE: Mapping[str, tuple[str, ...]] = {
    "pre_mlp_layernorm.": ("mlp_norm.",),
    "mlp.linear_fc1.layer_norm_": ("mlp_norm.",),
    "mlp.router.": ("mlp.router.",),
    "mlp.experts.experts.linear_fc1.": ("mlp.experts.gate.", "mlp.experts.up."),
    "mlp.experts.experts.linear_fc2.": ("mlp.experts.down.",),
    "mlp.shared_experts.linear_fc1.": ("mlp.shared.gate.", "mlp.shared.up."),
    "mlp.shared_experts.linear_fc2.": ("mlp.shared.down.",),
    "mlp.shared_experts.gate_": ("mlp.shared_gate.",),
}
ENDS: Mapping[str, str] = {
    "embedding.word_embeddings.": "embedding.word.",
    "embedding.position_embeddings.": "embedding.position.",
    "decoder.final_layernorm.": "final_norm.",
    "output_layer.": "head.",
}


def check_model(model_config: ModelConfig) -> None:
    """Check that Megatron-LM has a place for every weight and a setting for what the model computes.

    Raises:
        CheckpointError: all that it has not, in one message.
    """
    shape = ModelShape.of(model_config)
    reasons = {
        "multi_latent_attention": shape.mla is not None,
        "mtp_num_layers": shape.num_mtp_layers > 0,
        "norm_placement other than pre": shape.has_post_norm or not shape.has_pre_norm,
        "qk_layernorm_across_heads": shape.has_wide_qk_norm,
        "softmax_type learnable": shape.has_sink,
        "add_bias_linear with experts": shape.has_linear_bias and shape.moe is not None,
        "scale_embeddings": model_config.scale_embeddings,
        "attn_logit_softcapping": model_config.attn_logit_softcapping is not None,
        "final_logit_softcapping": model_config.final_logit_softcapping is not None,
        "rotary_base_local": model_config.rotary_base_local is not None,
    }
    if found := [name for name, is_set in reasons.items() if is_set]:
        raise CheckpointError(
            f"this model cannot be written for Megatron-LM: {', '.join(found)}",
            why="its checkpoints have no place, or no known one, for these weights or settings",
            fix="use `export-hf` or `export-dcp`",
        )


def is_uniform(shape: ModelShape) -> bool:
    """Whether all layers have the same tensors, so that Megatron-LM stacks them."""
    return len({shape.has_experts(layer) for layer in range(shape.num_layers)}) == 1


def plan_chunks(model_config: ModelConfig) -> Iterator[MegatronChunk]:
    """The chunks of all tensors: one per layer, and one per expert of a layer.

    Args:
        model_config: a model that `check_model` accepts.
    """
    shape = ModelShape.of(model_config)
    sizes = {spec.name: spec.shape for spec in declare_model(shape)}
    for key, module in ENDS.items():
        for leaf in ("weight", "bias"):
            if (size := sizes.get(module + leaf)) is not None:
                yield MegatronChunk(key + leaf, size, Box.full(size), (TensorBox.full(module + leaf, size),))
    for layer in range(shape.num_layers):
        yield from _layer(layer, sizes, shape=shape)
        if (moe := model_config.moe) is not None and moe.router_enable_expert_bias and shape.has_experts(layer):
            name, size = f"layers.{layer}.mlp.router.expert_bias", (moe.num_experts,)
            source = (TensorBox.full(f"router/{name}", size),)
            yield _chunk("mlp.router.expert_bias", size, sources=source, layer=layer, shape=shape)


def _layer(layer: int, sizes: Mapping[str, Shape], *, shape: ModelShape) -> Iterator[MegatronChunk]:
    modules = {**ATTENTION, **(MOE if shape.has_experts(layer) else MLP)}
    for key, parts in modules.items():
        for leaf in ("weight", "bias"):
            names = [name for part in parts if (name := f"layers.{layer}.{part}{leaf}") in sizes]
            if not names:
                continue
            if key.startswith("mlp.experts."):
                yield from _experts(key + leaf, {name: sizes[name] for name in names}, layer=layer, shape=shape)
                continue
            size = (sum(sizes[name][0] for name in names), *sizes[names[0]][1:])
            sources = tuple(TensorBox.full(name, sizes[name]) for name in names)
            num_groups = shape.num_query_groups if len(parts) == 3 else 1
            yield _chunk(key + leaf, size, sources=sources, layer=layer, shape=shape, num_groups=num_groups)


def _experts(key: str, sizes: Mapping[str, Shape], *, layer: int, shape: ModelShape) -> Iterator[MegatronChunk]:
    """One chunk per expert, [1, 1, rows, columns] of [layers, experts, rows, columns]."""
    (num_experts, _, columns), rows = next(iter(sizes.values())), sum(size[1] for size in sizes.values())
    for expert in range(num_experts):
        sources = tuple(
            TensorBox(name, size, Box((expert, 0, 0), (expert + 1, *size[1:]))) for name, size in sizes.items()
        )
        stacked = _chunk(key, (num_experts, rows, columns), sources=sources, layer=layer, shape=shape)
        start, stop = list(stacked.box.start), list(stacked.box.stop)
        start[-3], stop[-3] = expert, expert + 1
        yield MegatronChunk(stacked.key, stacked.shape, Box(tuple(start), tuple(stop)), sources)


def _chunk(
    key: str, size: Shape, *, sources: tuple[TensorBox, ...], layer: int, shape: ModelShape, num_groups: int = 1
) -> MegatronChunk:
    """The part of a layer in the tensor of all layers, or a tensor of its own where layers differ."""
    if not is_uniform(shape):
        return MegatronChunk(f"decoder.layers.{layer}.{key}", size, Box.full(size), sources, num_groups)
    box = Box((layer, *[0] * len(size)), (layer + 1, *size))
    return MegatronChunk(f"decoder.layers.{key}", (shape.num_layers, *size), box, sources, num_groups)
