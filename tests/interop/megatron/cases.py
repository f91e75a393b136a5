"""Runs of megatron-core: sizes, models and layouts, and the arguments that describe them.

CASES           the runs by name
known_case      a run without what this version of megatron-core lacks
arguments_of    the arguments that its training program stores
tokens          the tokens that all runs train on
"""

from argparse import Namespace
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from tests.interop.megatron.on_cpu import core_version

SEQ_LENGTH, GLOBAL_BATCH, MICRO_BATCH, ROWS, VOCAB_SIZE = 12, 8, 4, 48, 40
SAVED, STEPS = 2, 7
SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 32}
LLAMA = {"normalization": "RMSNorm", "add_bias_linear": False, "num_query_groups": 2}
LLAMA_ARGUMENTS = LLAMA | {
    "swiglu": True,
    "group_query_attention": True,
    "position_embedding_type": "rope",
}
LLAMA_ARGUMENTS |= {"untie_embeddings_and_output_weights": True}


def squared_relu(x: Tensor) -> Tensor:
    """As megatron.core.activations has it, which may not be installed."""
    return relu(x).square()


SWIGLU = {"gated_linear_unit": True, "activation_func": silu}
ROPE = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
LEARNED = {
    "position_embedding_type": "learned_absolute",
    "share_embeddings_and_output_weights": True,
}
GPT2_ARGUMENTS = {"position_embedding_type": "learned_absolute", "bias_gelu_fusion": False}
MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
MOE |= {"moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "alltoall"}
MOE_ARGUMENTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
MOE_ARGUMENTS |= {"moe_router_load_balancing_type": "none"}
# a router as DeepSeek-V3 has it, and a shared expert with Qwen's gate: the same names in both
ROUTER = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
ROUTER |= {"moe_router_bias_update_rate": 1e-2, "moe_router_topk_scaling_factor": 1.5}
ROUTER |= {"moe_shared_expert_intermediate_size": 12, "moe_shared_expert_gate": True}
GATES = {"qk_layernorm": True, "attention_output_gate": True, "softmax_type": "learnable"}
LATENT = {"multi_latent_attention": True, "qk_layernorm": True, "rope_type": "rope"}
LATENT |= {"kv_lora_rank": 8, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 5}
LATENT |= {"rotary_scaling_factor": 1.0, "q_lora_rank": None, "num_query_groups": 4}
DEEPSEEK = LATENT | ROUTER | {"q_lora_rank": 12, "mtp_num_layers": 1}
DEEPSEEK |= {"rope_type": "yarn", "rotary_scaling_factor": 4.0, "mtp_loss_scaling_factor": 0.3}
MAMBA = {"mamba_state_dim": 8, "mamba_head_dim": 8, "mamba_num_groups": 2, "num_layers": 4}
HYBRID = LLAMA | MAMBA | {"is_hybrid_model": True, "activation_func": squared_relu}
HYBRID_ARGUMENTS = LLAMA_ARGUMENTS | MAMBA | {"is_hybrid_model": True, "swiglu": False}
HYBRID_ARGUMENTS |= {"squared_relu": True, "position_embedding_type": "none"}


@dataclass(frozen=True)
class Case:
    """A run of megatron-core."""

    config: dict[str, Any] = field(default_factory=lambda: LLAMA | SWIGLU)  # of TransformerConfig
    model: dict[str, Any] = field(default_factory=lambda: ROPE)  # of GPTModel
    pattern: str | None = None  # layers of MambaModel, in place of a GPTModel
    # arguments of the training program that describe the same model
    arguments: dict[str, Any] = field(default_factory=lambda: LLAMA_ARGUMENTS)
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    form: str | None = None  # of the state of the distributed optimizer; None: without one
    bucket_size: int | None = None
    is_bf16: bool = False
    is_like_te: bool = False  # parameters in the order in which transformer-engine makes them

    @property
    def has_legacy_files(self) -> bool:
        """Whether it is saved with --ckpt-format torch too; the order of its parameters there is
        that of the modules.
        """
        is_transposed = self.is_bf16 and "moe_grouped_gemm" in self.config  # GroupedMLP
        is_ordered = not self.is_like_te
        return self.form in (None, "dp_reshardable") and is_ordered and not is_transposed

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.is_bf16 else torch.float32


MOE_CASE = {"config": LLAMA | SWIGLU | MOE, "arguments": LLAMA_ARGUMENTS | MOE_ARGUMENTS}
LATENT_ARGUMENTS = LLAMA_ARGUMENTS | {"group_query_attention": False}
CASES = {
    "tp2": Case(tp=2),
    "pp2": Case(pp=2),
    "vpp2": Case(
        config=LLAMA | SWIGLU | {"num_layers": 4},
        arguments=LLAMA_ARGUMENTS | {"num_layers": 4},
        pp=2,
        vpp=2,
    ),
    "gpt2": Case(config={"activation_func": gelu}, model=LEARNED, arguments=GPT2_ARGUMENTS, tp=2),
    "fully_reshardable": Case(form="fully_reshardable"),
    "dp_reshardable": Case(form="dp_reshardable", bucket_size=2000),
    "dp_reshardable_pp2": Case(
        config={"activation_func": gelu},
        model=LEARNED,
        arguments=GPT2_ARGUMENTS,
        pp=2,
        form="dp_reshardable",
    ),
    "moe_buckets": Case(**MOE_CASE, ep=2, form="dp_reshardable"),
    "moe": Case(**MOE_CASE, ep=2),
    "gated": Case(config=LLAMA | SWIGLU | GATES, arguments=LLAMA_ARGUMENTS | GATES, pp=2),
    "mla": Case(config=LLAMA | SWIGLU | LATENT, arguments=LATENT_ARGUMENTS | LATENT),
    "mla_tp2": Case(config=LLAMA | SWIGLU | LATENT, arguments=LATENT_ARGUMENTS | LATENT, tp=2),
    "deepseek": Case(
        config=LLAMA | SWIGLU | MOE | DEEPSEEK,
        arguments=LATENT_ARGUMENTS | MOE_ARGUMENTS | DEEPSEEK,
        pp=2,
        form="dp_reshardable",
    ),
    "te_moe": Case(
        config=LLAMA | SWIGLU | MOE | ROUTER,
        arguments=LLAMA_ARGUMENTS
        | MOE_ARGUMENTS
        | ROUTER
        | {"moe_grouped_gemm": True, "transformer_impl": "transformer_engine"},
        ep=2,
        form="dp_reshardable",
        is_like_te=True,
    ),
    "hybrid": Case(
        config=HYBRID | MOE,
        arguments=HYBRID_ARGUMENTS | MOE_ARGUMENTS | {"hybrid_override_pattern": "M*-E"},
        pattern="M*-E",
        pp=2,
    ),
    "hybrid_buckets": Case(
        config=HYBRID,
        arguments=HYBRID_ARGUMENTS | {"hybrid_override_pattern": "M-*M"},
        pattern="M-*M",
        tp=2,
        form="dp_reshardable",
    ),
    "grouped_mlp": Case(
        config=LLAMA | SWIGLU | MOE | {"moe_grouped_gemm": True},
        arguments=LLAMA_ARGUMENTS | MOE_ARGUMENTS | {"moe_grouped_gemm": True, "bf16": True},
        ep=2,
        is_bf16=True,
    ),
    "bf16": Case(tp=2, is_bf16=True),
    "bf16_buckets": Case(form="dp_reshardable", is_bf16=True),
}


# what the training program saves before 0.15
EARLIER_FORM = "fully_sharded_model_space"


def known_case(case: Case) -> Case:
    """The case without the settings that this version of megatron-core lacks."""
    from megatron.core.transformer import MLATransformerConfig

    lacking = case.config.keys() - MLATransformerConfig.__dataclass_fields__.keys()
    config = {name: value for name, value in case.config.items() if name not in lacking}
    arguments = {name: value for name, value in case.arguments.items() if name not in lacking}
    form = case.form
    if form is not None and core_version() < (0, 15):
        form = EARLIER_FORM
    return replace(case, config=config, arguments=arguments, form=form)


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (2000,), generator=torch.Generator().manual_seed(3))


def arguments_of(case: Case, *, samples: int) -> Namespace:
    """What the training program of Megatron-LM stores, as far as it matters here."""
    stored = SIZES | {
        "max_position_embeddings": SEQ_LENGTH,
        "seq_length": SEQ_LENGTH,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "make_vocab_size_divisible_by": 16,
        "vocab_size": VOCAB_SIZE,
        "padded_vocab_size": ROWS,
        "micro_batch_size": MICRO_BATCH,
        "global_batch_size": GLOBAL_BATCH,
        "train_iters": 20,
        "lr": 1e-2,
        "min_lr": 1e-3,
        "lr_decay_style": "cosine",
        "lr_warmup_iters": 2,
        "lr_warmup_samples": 0,
        "weight_decay": 0.1,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "params_dtype": case.dtype,
        "bf16": case.is_bf16,
        "num_query_groups": 1,  # its default
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.vpp,
        "expert_model_parallel_size": case.ep,
        "overlap_grad_reduce": case.bucket_size is not None,
        "ddp_bucket_size": case.bucket_size,
        "transformer_impl": "local",
        "consumed_train_samples": samples,
        "data_path": None,
        "rotary_interleaved": False,
        "spec": None,
        "ckpt_format": "torch_dist",
    }
    return Namespace(**stored | case.arguments)
