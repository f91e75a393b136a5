"""megatron-core itself loads an exported checkpoint, and its GPT computes our logits (pip install megatron-core)."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from nanotrain.inference.checkpoint import load_stage, open_checkpoint
from nanotrain.interop.megatron import export_megatron
from tests.harness import HANG_S
from tests.interop.megatron_models import GPT2, LLAMA, MOE, write_checkpoint

if find_spec("megatron") is None:  # only the program below imports it, which takes 2 s
    pytest.skip("needs megatron-core", allow_module_level=True)

# Megatron's model parallelism and its patches of torch are global, so it gets a process of its own.
PROGRAM = """
import contextlib, sys, torch
from torch.nn.functional import silu
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils

torch.cuda.current_device = lambda: torch.device("cpu")  # Megatron moves its tables there
random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()  # without dropout nothing is drawn
moe_utils.te_general_gemm = None  # 0.16.1 leaves it undefined where transformer-engine is not installed
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
sizes = dict(num_layers=2, hidden_size=16, num_attention_heads=4, ffn_hidden_size=32)
tokens, mask = torch.arange(12).reshape(1, 12), torch.ones(1, 1, 12, 12).triu(1).bool()
rope = dict(position_embedding_type="rope", share_embeddings_and_output_weights=False)
swiglu = dict(gated_linear_unit=True, activation_func=silu, normalization="RMSNorm", add_bias_linear=False)
swiglu |= dict(num_query_groups=2)
experts = dict(
    num_moe_experts=4, moe_ffn_hidden_size=24, moe_shared_expert_intermediate_size=12, moe_shared_expert_gate=True,
    moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
)
cases = {
    "llama": (dict(**swiglu, qk_layernorm=True), rope),
    "gpt2": (dict(), dict(position_embedding_type="learned_absolute", share_embeddings_and_output_weights=True)),
    "moe": (dict(**swiglu, **experts), rope),
}
for name, (settings, model_settings) in cases.items():
    config = TransformerConfig(
        **sizes, **settings, use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    model = GPTModel(config, spec, vocab_size=40, max_sequence_length=12, **model_settings).eval()
    folder = f"{sys.argv[1]}/{name}"
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, f"{folder}/megatron/iter_0000003")
    model.load_state_dict(loaded["model"])
    with torch.no_grad():
        torch.save(model(tokens, tokens, mask), f"{folder}/logits.pt")
"""
MODELS = {"llama": LLAMA, "gpt2": GPT2, "moe": MOE}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per model, with our checkpoint, its export and Megatron's logits."""
    root = tmp_path_factory.mktemp("megatron")
    for name, model_config in MODELS.items():
        write_checkpoint(root / name, model_config)
        export_megatron(root / name, root / name / "megatron")
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(root)], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return root


@pytest.mark.parametrize("name", MODELS)
def test_megatron_core_computes_our_logits(folder: Path, name: str) -> None:
    expected = load_stage(open_checkpoint(folder / name)).logits(torch.arange(12).reshape(1, 12))
    torch.testing.assert_close(torch.load(folder / name / "logits.pt"), expected, rtol=1e-5, atol=1e-5)
