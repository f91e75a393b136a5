"""With a cache the logits are those without one, for every kind of attention and for prompts of
different lengths.
"""

from dataclasses import replace

import pytest
import torch

from nanotrain.config.layer_kinds import (
    CompressedAttentionConfig,
    DSAConfig,
    LinearAttentionConfig,
    MambaConfig,
)
from nanotrain.config.model import MLAConfig, MoEConfig, YarnConfig
from nanotrain.inference.cache import KVCache
from nanotrain.model.transformer import Stage
from tests.model.building import GPT2, LLAMA, QWEN3, VOCAB, build, randomize

LINEAR = {
    "linear_attention_type": "short_conv",
    "linear_attention": LinearAttentionConfig(conv_kernel_dim=3),
}
SIZES = LinearAttentionConfig(
    4, key_head_dim=8, value_head_dim=6, num_key_heads=4, num_value_heads=4
)
DELTA = replace(LLAMA, linear_attention=SIZES, linear_attention_freq="2")
MLA_SIZES = MLAConfig(
    q_lora_rank=24, kv_lora_rank=16, qk_head_dim=12, qk_pos_emb_head_dim=8, v_head_dim=10
)
MODELS = {
    "short convolutions": replace(LLAMA, **LINEAR, linear_attention_freq="2"),
    "attention beside Mamba-2": replace(
        LLAMA, linear_attention_type="attention_mamba2", mamba=MambaConfig(6, 8, 2)
    ),
    "Mamba-2": replace(LLAMA, num_layers=3, hybrid_layer_pattern="M*M", mamba=MambaConfig(6, 8, 2)),
    "half layers": replace(
        LLAMA, **LINEAR, num_layers=4, hybrid_layer_pattern="G-*-", attention_output_gate=True
    ),
    "learned positions": GPT2,
    "grouped queries, windows": replace(LLAMA, window_size=3, window_attn_skip_freq="2"),
    "more heads, sinks and narrow values in windows": replace(
        LLAMA,
        window_size=3,
        window_attn_skip_freq="2",
        window_query_groups=1,
        value_channels=5,
        softmax_type="learnable",
        sinks_in_windows_only=True,
    ),
    "shared keys": replace(
        QWEN3,
        num_layers=5,
        window_size=3,
        window_attn_skip_freq="2",
        num_kv_shared_layers=3,
        attention_k_eq_v=True,
        layer_input_size=6,
    ),
    "experts": replace(QWEN3, moe=MoEConfig(num_experts=4, ffn_hidden_size=16)),
    "shortcuts": replace(
        QWEN3,
        moe=MoEConfig(
            4,
            num_zero_experts=2,
            ffn_hidden_size=16,
            shortcut=True,
            shared_expert_intermediate_size=24,
        ),
    ),
    "factors by position, norms after rotation": replace(
        QWEN3,
        qk_layernorm_after_rope=True,
        position_embedding_type="yarn",
        yarn=YarnConfig(2.0, original_max_position_embeddings=4, query_scaling_beta=0.7),
    ),
    "chunks, factors of queries": replace(
        LLAMA,
        attention_chunk_size=4,
        window_attn_skip_freq="2",
        no_rope_freq="2",
        attn_scale=0.8,
        floor_scale=3,
    ),
    "side by side, one norm": replace(
        LLAMA, residual_type="parallel", parallel_shared_norm=True, add_head_bias=True
    ),
    "gated residuals": replace(LLAMA, residual_type="gated"),
    "blocks by attention": replace(LLAMA, residual_type="attention", residual_streams=2),
    "doubly stochastic streams": replace(LLAMA, residual_type="mhc", residual_streams=3),
    "streams of half layers": replace(
        LLAMA, num_layers=4, hybrid_layer_pattern="*-*-", residual_type="hyper_connections"
    ),
    "learned activation": replace(LLAMA, activation="xielu"),
    "norms without weights": replace(
        QWEN3, normalization="L2Norm", embedding_l2_norm=True, qk_layernorm_after_rope=True
    ),
    "mla": replace(LLAMA, num_query_groups=None, multi_latent_attention=True, mla=MLA_SIZES),
    "dsa": replace(
        LLAMA,
        num_query_groups=None,
        multi_latent_attention=True,
        mla=MLA_SIZES,
        sparse_attention_type="dsa",
        dsa=DSAConfig(n_heads=8, head_dim=12, topk=4),
    ),
    "selected blocks": replace(
        LLAMA,
        sparse_attention_type="blocks",
        dsa=DSAConfig(n_heads=2, head_dim=8, topk=4, block_size=2, layer_freq="2"),
    ),
    # windows of two and three tokens; the token chooses the experts of one layer
    "compressed keys": replace(
        LLAMA,
        num_layers=4,
        num_query_groups=1,
        kv_channels=12,
        rotary_percent=0.5,
        window_size=3,
        softmax_type="learnable",
        sparse_attention_type="compressed",
        compressed=CompressedAttentionConfig("CHWC", 2, 3, 16, 2, 8),
        dsa=DSAConfig(n_heads=8, head_dim=8, topk=2),
        moe=MoEConfig(4, ffn_hidden_size=16, hash_layers="[1]+[0]*3"),
    ),
    "shared selection": replace(
        LLAMA,
        num_layers=3,
        num_query_groups=None,
        multi_latent_attention=True,
        mla=MLA_SIZES,
        sparse_attention_type="dsa",
        dsa=DSAConfig(n_heads=8, head_dim=12, topk=4, share_freq="[0,1,1]"),
    ),
    "gated delta net": replace(DELTA, linear_attention_type="gated_delta_net"),
    "kda": replace(DELTA, linear_attention_type="kda"),
}


def functions_of(model: Stage) -> list[object]:
    """The functions that a cache replaces."""
    named = (
        (module, name)
        for module in model.modules()
        for name in ("core_attention", "window", "scan")
    )
    return [getattr(module, name) for module, name in named if hasattr(module, name)]


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_without_a_cache(name: str) -> None:
    model = randomize(build(MODELS[name]))
    draw = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, VOCAB, (length,), generator=draw).tolist() for length in (9, 13, 12)]
    lengths = [len(text) - 6 for text in texts]  # prompts of 3, 7 and 6 tokens
    cores = functions_of(model)
    longest = max(lengths)
    cache = KVCache(model, lengths, capacity=13)
    prompts = [text[:-6] for text in texts]
    parts = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    for num_new in (1, 3, 1, 0):
        with cache:
            logits = cache.logits(torch.tensor(parts))
        for row, prompt in enumerate(prompts):
            expected = model.logits(torch.tensor([prompt]))[0, -1].detach()
            torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-5)
        parts = [text[len(prompt) :][:num_new] for text, prompt in zip(texts, prompts, strict=True)]
        prompts = [prompt + part for prompt, part in zip(prompts, parts, strict=True)]
    assert functions_of(model) == cores
