"""megatron-core itself loads an exported checkpoint, and its GPT computes our logits (pip install
megatron-core).
"""

import contextlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.inference.checkpoint import load_stage, open_checkpoint
from nanotrain.interop.megatron.export_run import export_megatron
from tests.harness import run_ranks
from tests.interop.megatron.mamba_of_torch import build_hybrid, put_in_place
from tests.interop.megatron.models import (
    DEEPSEEK,
    GATED,
    GPT2,
    HYBRID,
    LLAMA,
    MLA,
    MOE,
    write_checkpoint,
)
from tests.interop.megatron.on_cpu import patch_core_attention

if find_spec("megatron") is None:  # only the rank below imports it, which takes 2 s
    pytest.skip("needs megatron-core", allow_module_level=True)

MODELS = {"llama": LLAMA, "gpt2": GPT2, "moe": MOE, "gated": GATED, "mla": MLA}
MODELS |= {"deepseek": DEEPSEEK, "hybrid": HYBRID}
SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 32}
ROPE = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
LEARNED = {
    "position_embedding_type": "learned_absolute",
    "share_embeddings_and_output_weights": True,
}
SWIGLU = {
    "gated_linear_unit": True,
    "activation_func": silu,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}
SWIGLU |= {"num_query_groups": 2}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 12,
}
EXPERTS |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
EXPERTS |= {"moe_shared_expert_gate": True}
GATES = {"qk_layernorm": True, "attention_output_gate": True, "softmax_type": "learnable"}
LATENT = {"multi_latent_attention": True, "qk_layernorm": True, "num_query_groups": 4}
LATENT |= {"kv_lora_rank": 8, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 5}
LATENT |= {"rope_type": "rope", "rotary_scaling_factor": 1.0, "q_lora_rank": None}
TIED = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": True}
# settings of the transformer, and of the model
THEIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (SWIGLU | {"qk_layernorm": True}, ROPE),
    "gpt2": ({}, LEARNED),
    "moe": (SWIGLU | EXPERTS, ROPE),
    "gated": (SWIGLU | GATES, ROPE),
    "mla": (SWIGLU | LATENT, TIED),
    "deepseek": (SWIGLU | LATENT | EXPERTS | {"q_lora_rank": 12, "mtp_num_layers": 1}, ROPE),
}


def logits_of_megatron(ctx: ParallelContext, root: Path) -> dict[str, torch.Tensor]:
    """In a process of its own: Megatron's model parallelism and its patches of torch are global."""
    put_in_place()
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.moe import moe_utils

    torch.compiler.set_stance("force_eager")  # compiling its fused functions takes longer
    torch.cuda.current_device = lambda: torch.device("cpu")  # Megatron moves its tables there
    # without dropout nothing is drawn
    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    # 0.16.1 leaves it undefined where transformer-engine is not installed
    moe_utils.te_general_gemm = None
    patch_core_attention()
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    tokens, mask = torch.arange(12).reshape(1, 12), torch.ones(1, 1, 12, 12).triu(1).bool()
    logits = {}
    for name, (settings, model_settings) in THEIRS.items():
        settings = (
            SIZES
            | settings
            | {"use_cpu_initialization": True, "hidden_dropout": 0.0, "attention_dropout": 0.0}
        )
        is_latent = "multi_latent_attention" in settings
        config = (MLATransformerConfig if is_latent else TransformerConfig)(**settings)
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        mtp_spec = None
        if config.mtp_num_layers:
            mtp_spec = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
        model = GPTModel(
            config,
            spec,
            vocab_size=40,
            max_sequence_length=12,
            mtp_block_spec=mtp_spec,
            **model_settings,
        ).eval()
        folder = root / name / "megatron" / "iter_0000003"
        model.load_state_dict(
            dist_checkpointing.load({"model": model.sharded_state_dict()}, str(folder))["model"]
        )
        config.mtp_num_layers, model.mtp_process = None, False  # its losses need labels
        with torch.no_grad():
            logits[name] = model(tokens, tokens, mask)
    model = build_hybrid("M*-E", vocab_size=40)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = model.sharded_state_dict(metadata={"dp_cp_group": group})
    folder = root / "hybrid" / "megatron" / "iter_0000003"
    model.load_state_dict(dist_checkpointing.load({"model": state}, str(folder))["model"])
    with torch.no_grad():
        logits["hybrid"] = model(tokens, tokens, mask)
    return logits


def test_megatron_core_computes_our_logits(tmp_path: Path) -> None:
    for name, model_config in MODELS.items():
        write_checkpoint(tmp_path / name, model_config)
        export_megatron(tmp_path / name, tmp_path / name / "megatron")
    for name, logits in run_ranks(1, logits_of_megatron, tmp_path)[0].items():
        expected = load_stage(open_checkpoint(tmp_path / name)).logits(
            torch.arange(12).reshape(1, 12)
        )
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5, msg=name)
