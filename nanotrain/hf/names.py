"""Where each parameter lies in a Hugging Face folder: one pure function per naming scheme.

`llama_places` serves Llama, Qwen2 and Qwen3, which differ only in which parameters exist; `mixtral_places` and
`qwen3_moe_places` name their experts one by one, `fused_places` is the newer layout of both, with experts stacked and
gate and up in one tensor; `gpt2_places` serves GPT-2, whose matrices are transposed and whose query, key and value
are one tensor. Import and export both read these tables and nothing else, so what one writes the other finds.

    H hidden   Q query heads x width   K key/value heads x width   F width of the MLP   V vocabulary   E experts
"""

from dataclasses import replace

from nanotrain.config.config import Activation, ModelConfig
from nanotrain.config.derive import ffn_size, head_dim, moe_ffn_size, moe_layers, query_groups
from nanotrain.hf.place import Place


def llama_places(model_config: ModelConfig) -> dict[str, Place]:
    """Places of a Llama, Qwen2 or Qwen3."""
    return _decoder_places(model_config, experts={})


def mixtral_places(model_config: ModelConfig) -> dict[str, Place]:
    """Places of a Mixtral: w1 is the gate, w3 up and w2 down."""
    hidden, ffn, count = model_config.hidden_size, moe_ffn_size(model_config), model_config.moe.num_experts or 0
    folder = "block_sparse_moe"
    experts = {
        "router": Place(f"{folder}.gate.weight", (count, hidden)),
        "experts.gate": Place(f"{folder}.experts.{{expert}}.w1.weight", (count, ffn, hidden)),
        "experts.up": Place(f"{folder}.experts.{{expert}}.w3.weight", (count, ffn, hidden)),
        "experts.down": Place(f"{folder}.experts.{{expert}}.w2.weight", (count, hidden, ffn)),
    }
    return _decoder_places(model_config, experts=experts)


def qwen3_moe_places(model_config: ModelConfig) -> dict[str, Place]:
    """Places of a Qwen3-MoE."""
    hidden, ffn, count = model_config.hidden_size, moe_ffn_size(model_config), model_config.moe.num_experts or 0
    experts = {
        "router": Place("mlp.gate.weight", (count, hidden)),
        "experts.gate": Place("mlp.experts.{expert}.gate_proj.weight", (count, ffn, hidden)),
        "experts.up": Place("mlp.experts.{expert}.up_proj.weight", (count, ffn, hidden)),
        "experts.down": Place("mlp.experts.{expert}.down_proj.weight", (count, hidden, ffn)),
    }
    return _decoder_places(model_config, experts=experts)


def fused_places(model_config: ModelConfig) -> dict[str, Place]:
    """Places of a Mixtral or Qwen3-MoE as transformers 5 holds them in memory; `torch.save` writes these."""
    hidden, ffn, count = model_config.hidden_size, moe_ffn_size(model_config), model_config.moe.num_experts or 0
    experts = {
        "router": Place("mlp.gate.weight", (count, hidden)),
        "experts.gate": Place("mlp.experts.gate_up_proj", (count, ffn, hidden), offset=0, outputs=2 * ffn),
        "experts.up": Place("mlp.experts.gate_up_proj", (count, ffn, hidden), offset=ffn, outputs=2 * ffn),
        "experts.down": Place("mlp.experts.down_proj", (count, hidden, ffn)),
    }
    return _decoder_places(model_config, experts=experts)


def _decoder_places(model_config: ModelConfig, *, experts: dict[str, Place]) -> dict[str, Place]:
    """Places of the Llama layout, with these in place of the MLP in layers that have experts."""
    hidden, vocab = model_config.hidden_size, _vocab_size(model_config)
    attention, mlp = _attention(model_config), _mlp(model_config)
    norms = {"attention_norm": ("input_layernorm", hidden), "mlp_norm": ("post_attention_layernorm", hidden)}
    if model_config.qk_layernorm:
        norms["attention.query_norm"] = ("self_attn.q_norm", head_dim(model_config))
        norms["attention.key_norm"] = ("self_attn.k_norm", head_dim(model_config))

    places = {"embedding.word.weight": Place("model.embed_tokens.weight", (vocab, hidden))}
    for layer, has_experts in enumerate(moe_layers(model_config)):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        for name, (tensor, size) in norms.items():
            places[f"{ours}.{name}.weight"] = Place(f"{theirs}.{tensor}.weight", (size,))
        for name, (tensor, outputs, inputs) in (attention if has_experts else attention | mlp).items():
            places[f"{ours}.{name}.weight"] = Place(f"{theirs}.{tensor}.weight", (outputs, inputs))
            if model_config.add_bias_linear or (model_config.add_qkv_bias and name in QKV):
                places[f"{ours}.{name}.bias"] = Place(f"{theirs}.{tensor}.bias", (outputs,))
        for name, place in experts.items() if has_experts else ():
            places[f"{ours}.mlp.{name}.weight"] = replace(place, tensor=f"{theirs}.{place.tensor}")
    places["final_norm.weight"] = Place("model.norm.weight", (hidden,))
    return places | _head(model_config)


def _attention(model_config: ModelConfig) -> dict[str, tuple[str, int, int]]:
    """Our name -> their name, outputs, inputs."""
    hidden = model_config.hidden_size
    query, key = (
        model_config.num_attention_heads * head_dim(model_config),
        query_groups(model_config) * head_dim(model_config),
    )
    return {
        "attention.query": ("self_attn.q_proj", query, hidden),
        "attention.key": ("self_attn.k_proj", key, hidden),
        "attention.value": ("self_attn.v_proj", key, hidden),
        "attention.output": ("self_attn.o_proj", hidden, query),
    }


def _mlp(model_config: ModelConfig) -> dict[str, tuple[str, int, int]]:
    hidden, ffn = model_config.hidden_size, ffn_size(model_config)
    projections = {
        "mlp.gate": ("mlp.gate_proj", ffn, hidden),
        "mlp.up": ("mlp.up_proj", ffn, hidden),
        "mlp.down": ("mlp.down_proj", hidden, ffn),
    }
    if model_config.activation is not Activation.swiglu:
        del projections["mlp.gate"]
    return projections


def gpt2_places(model_config: ModelConfig) -> dict[str, Place]:
    """Places of a GPT-2."""
    hidden, ffn, vocab = model_config.hidden_size, ffn_size(model_config), _vocab_size(model_config)
    projections = {
        "attention.query": Place("attn.c_attn", (hidden, hidden), offset=0, outputs=3 * hidden),
        "attention.key": Place("attn.c_attn", (hidden, hidden), offset=hidden, outputs=3 * hidden),
        "attention.value": Place("attn.c_attn", (hidden, hidden), offset=2 * hidden, outputs=3 * hidden),
        "attention.output": Place("attn.c_proj", (hidden, hidden)),
        "mlp.up": Place("mlp.c_fc", (ffn, hidden)),
        "mlp.down": Place("mlp.c_proj", (hidden, ffn)),
    }
    places = {
        "embedding.word.weight": Place("transformer.wte.weight", (vocab, hidden)),
        "embedding.position.weight": Place("transformer.wpe.weight", (model_config.max_position_embeddings, hidden)),
    }
    for layer in range(model_config.num_layers):
        ours, theirs = f"layers.{layer}", f"transformer.h.{layer}"
        places |= _layer_norm(f"{ours}.attention_norm", f"{theirs}.ln_1", size=hidden)
        places |= _layer_norm(f"{ours}.mlp_norm", f"{theirs}.ln_2", size=hidden)
        for name, place in projections.items():
            tensor, offset, outputs = f"{theirs}.{place.tensor}", place.offset, place.outputs
            places[f"{ours}.{name}.weight"] = Place(f"{tensor}.weight", place.shape, True, offset, outputs)
            places[f"{ours}.{name}.bias"] = Place(f"{tensor}.bias", place.shape[:1], False, offset, outputs)
    return places | _layer_norm("final_norm", "transformer.ln_f", size=hidden) | _head(model_config)


QKV = ("attention.query", "attention.key", "attention.value")


def _layer_norm(name: str, tensor: str, *, size: int) -> dict[str, Place]:
    return {f"{name}.{part}": Place(f"{tensor}.{part}", (size,)) for part in ("weight", "bias")}


def _head(model_config: ModelConfig) -> dict[str, Place]:
    if not model_config.untie_embeddings_and_output_weights:
        return {}
    return {"head.weight": Place("lm_head.weight", (_vocab_size(model_config), model_config.hidden_size))}


def _vocab_size(model_config: ModelConfig) -> int:
    assert model_config.vocab_size is not None, "a Hugging Face config always names its vocabulary size"
    return model_config.vocab_size
