"""Megatron-core trains small models on the CPU and saves them, for the import of its checkpoints.

train_cases(ctx, root, names)            for run_ranks with processes: its layouts and its patches are global
continue_cases(ctx, folders, cases)      the same from checkpoints

There is no GPU, so tensors for one are put on the CPU; without transformer-engine its layers are the
local ones. Samples are the tokens of `tokens()` in order, two per microbatch.
"""

import contextlib
import random
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import gelu, silu

from tests.interop.megatron.on_cpu import OnCPU, patch_for_cpu, registered_like_te

SEQ_LENGTH, GLOBAL_BATCH, MICRO_BATCH, ROWS, VOCAB_SIZE = 12, 8, 2, 48, 40
SAVED, STEPS = 2, 7
SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 32}
LLAMA = {"normalization": "RMSNorm", "add_bias_linear": False, "num_query_groups": 2}
LLAMA_ARGUMENTS = LLAMA | {
    "swiglu": True,
    "group_query_attention": True,
    "position_embedding_type": "rope",
}
LLAMA_ARGUMENTS |= {"untie_embeddings_and_output_weights": True}
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


@dataclass(frozen=True)
class Case:
    """A run of megatron-core."""

    config: dict[str, Any] = field(default_factory=lambda: LLAMA | SWIGLU)  # of TransformerConfig
    model: dict[str, Any] = field(default_factory=lambda: ROPE)  # of GPTModel
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
    "grouped_mlp": Case(
        config=LLAMA | SWIGLU | MOE | {"moe_grouped_gemm": True},
        arguments=LLAMA_ARGUMENTS | MOE_ARGUMENTS | {"moe_grouped_gemm": True, "bf16": True},
        ep=2,
        is_bf16=True,
    ),
    "bf16": Case(tp=2, is_bf16=True),
    "bf16_buckets": Case(form="dp_reshardable", is_bf16=True),
}


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


class Training:
    """One case on this rank: models, optimizer and schedule."""

    def __init__(self, case: Case) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.transformer import MLATransformerConfig, TransformerConfig

        self.case = case
        parallel_state.initialize_model_parallel(
            case.tp,
            case.pp,
            virtual_pipeline_model_parallel_size=case.vpp,
            expert_model_parallel_size=case.ep,
        )
        torch.manual_seed(1 + parallel_state.get_pipeline_model_parallel_rank())
        is_latent = "multi_latent_attention" in case.config
        self.config = (MLATransformerConfig if is_latent else TransformerConfig)(
            **SIZES | case.config,
            tensor_model_parallel_size=case.tp,
            pipeline_model_parallel_size=case.pp,
            virtual_pipeline_model_parallel_size=case.vpp,
            expert_model_parallel_size=case.ep,
            pipeline_dtype=case.dtype,
            params_dtype=case.dtype,
            bf16=case.is_bf16,
            use_cpu_initialization=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            finalize_model_grads_func=finalize_model_grads,
            bias_activation_fusion=False,
            batch_p2p_comm=False,  # gloo would confuse both directions between two ranks
        )
        self.models = [self.build_model(stage) for stage in range(case.vpp or 1)]
        self.build_optimizer()

    def build_model(self, stage: int) -> Any:
        from megatron.core import parallel_state as ps
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_decoder_block_spec,
            get_gpt_mtp_block_spec,
        )
        from megatron.core.transformer.module import Float16Module

        vp_stage = stage if self.case.vpp else None
        spec = get_gpt_decoder_block_spec(
            self.config, use_transformer_engine=False, vp_stage=vp_stage
        )
        mtp_spec = None
        if self.config.mtp_num_layers:
            mtp_spec = get_gpt_mtp_block_spec(
                self.config, spec, use_transformer_engine=False, vp_stage=vp_stage
            )
        model = GPTModel(
            self.config,
            spec,
            mtp_block_spec=mtp_spec,
            vocab_size=ROWS,
            max_sequence_length=SEQ_LENGTH,
            pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            vp_stage=vp_stage,
            **self.case.model,
        )
        if self.case.is_bf16:
            model = Float16Module(self.config, model)
        options = DistributedDataParallelConfig(
            use_distributed_optimizer=self.case.form is not None,
            bucket_size=self.case.bucket_size,
            overlap_grad_reduce=self.case.bucket_size is not None,
        )
        if not self.case.is_like_te:
            return DistributedDataParallel(self.config, options, model)
        with registered_like_te(model):
            return DistributedDataParallel(self.config, options, model)

    def build_optimizer(self) -> None:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        options = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            min_lr=1e-3,
            weight_decay=0.1,
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_eps=1e-8,
            clip_grad=1.0,
            use_distributed_optimizer=self.case.form is not None,
            params_dtype=self.case.dtype,
            bf16=self.case.is_bf16,
        )
        self.optimizer = get_megatron_optimizer(options, self.models)
        samples = GLOBAL_BATCH * 20
        self.schedule = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=1e-2,
            min_lr=1e-3,
            lr_warmup_steps=GLOBAL_BATCH * 2,
            lr_decay_steps=samples,
            lr_decay_style="cosine",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=samples,
            wd_incr_style="constant",
        )

    def microbatches(self, step: int) -> Iterator[torch.Tensor]:
        """Samples of this rank in a step, [MICRO_BATCH, SEQ_LENGTH + 1]."""
        from megatron.core import parallel_state

        size = GLOBAL_BATCH // parallel_state.get_data_parallel_world_size()
        first = step * GLOBAL_BATCH + parallel_state.get_data_parallel_rank() * size
        stream = tokens()
        for start in range(first, first + size, MICRO_BATCH):
            begins = [SEQ_LENGTH * sample for sample in range(start, start + MICRO_BATCH)]
            yield torch.stack([stream[begin : begin + SEQ_LENGTH + 1] for begin in begins])

    def step(self, number: int) -> tuple[float | None, float]:
        """One step: the loss over the global batch, where this rank has it, and the norm."""
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        samples = [self.microbatches(number) for _ in self.models]
        num_ranks = parallel_state.get_data_parallel_world_size()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=samples if self.case.vpp else samples[0],
            model=self.models if self.case.vpp else self.models[0],
            num_microbatches=GLOBAL_BATCH // num_ranks // MICRO_BATCH,
            seq_length=SEQ_LENGTH,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        _, norm, _ = self.optimizer.step()
        self.schedule.step(GLOBAL_BATCH)
        if not losses:
            return None, float(norm)
        loss = torch.stack([row["loss"] for row in losses]).mean()
        torch.distributed.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        return float(loss) / num_ranks, float(norm)

    def save(self, folder: Path, step: int) -> None:
        """Save as the training program does."""
        from megatron.core import dist_checkpointing, parallel_state

        content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        if self.case.form is not None:
            content["distrib_optim_sharding_type"] = self.case.form
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        metadata = content | {"dp_cp_group": group}
        state: dict[str, Any] = {
            "args": arguments_of(self.case, samples=step * GLOBAL_BATCH),
            "checkpoint_version": 3.0,
            "iteration": step,
        }
        for name, bare in self.bare_models.items():
            state[name] = bare.sharded_state_dict(metadata=metadata)
        state["optimizer"] = self.optimizer.sharded_state_dict(state, metadata=metadata)
        state["opt_param_scheduler"] = self.schedule.state_dict()
        target = folder / f"iter_{step:07d}"
        target.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        dist_checkpointing.save(state, str(target), content_metadata=content)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
        if self.case.has_legacy_files:
            self.save_legacy(folder.with_name(f"{folder.name}-legacy"), step)

    def save_legacy(self, folder: Path, step: int) -> None:
        """Save with --ckpt-format torch: a file per model-parallel rank."""
        from megatron.core import parallel_state as ps

        numbers = [f"{ps.get_tensor_model_parallel_rank():02d}"]
        if self.case.pp > 1:
            numbers.append(f"{ps.get_pipeline_model_parallel_rank():03d}")
        if self.case.ep > 1:
            numbers.append(f"{ps.get_expert_model_parallel_rank():03d}")
        target = folder / f"iter_{step:07d}" / f"mp_rank_{'_'.join(numbers)}"
        target.mkdir(parents=True, exist_ok=True)
        if self.case.form is not None:
            self.optimizer.save_parameter_state(str(target / "distrib_optim.pt"))
        if ps.get_expert_data_parallel_rank():
            return
        state = {
            "args": arguments_of(self.case, samples=step * GLOBAL_BATCH),
            "checkpoint_version": 3.0,
            "iteration": step,
            "optimizer": self.optimizer.state_dict(),
            "opt_param_scheduler": self.schedule.state_dict(),
            "rng_state": [{"random_rng_state": random.getstate(), "np": np.random.get_state()}],
        }
        for name, bare in self.bare_models.items():
            state[name] = bare.state_dict_for_save_checkpoint()
        torch.save(state, target / "model_optim_rng.pt")
        (folder / "latest_checkpointed_iteration.txt").write_text(str(step))

    def close(self) -> None:
        """Give its process groups back."""
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()

    def load(self, folder: Path) -> int:
        """Load the newest checkpoint of a folder as the training program does; its step."""
        from megatron.core import dist_checkpointing, parallel_state

        step = int((folder / "latest_checkpointed_iteration.txt").read_text())
        path = str(folder / f"iter_{step:07d}")
        common = dist_checkpointing.load_common_state_dict(path)
        metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
        metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if self.case.form is not None:
            self.step(0)  # without transformer-engine there is no state to fill before a step
        state: dict[str, Any] = {}
        for name, bare in self.bare_models.items():
            state[name] = bare.sharded_state_dict(metadata=metadata)
        optimizer = self.optimizer.sharded_state_dict(state, is_loading=True, metadata=metadata)
        loaded = dist_checkpointing.load(state | {"optimizer": optimizer}, path)
        for name, bare in self.bare_models.items():
            bare.load_state_dict(loaded[name])
        self.optimizer.load_state_dict(loaded["optimizer"])
        self.schedule.num_steps = 0
        self.schedule.load_state_dict(loaded["opt_param_scheduler"])
        assert loaded["args"].consumed_train_samples == step * GLOBAL_BATCH
        return step

    @property
    def bare_models(self) -> dict[str, Any]:
        """The models without their wrappers, by their names in a checkpoint."""
        models = {}
        for index, model in enumerate(self.models):
            name = f"model{index}" if self.case.vpp else "model"
            models[name] = model.module.module if self.case.is_bf16 else model.module
        return models


def forward_step(samples: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(samples)
    positions = torch.arange(SEQ_LENGTH)[None].expand(len(batch), -1)
    mask = torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH).triu(1).bool()
    inputs, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    output = model(inputs, positions, mask, labels=labels)

    def loss_func(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = losses.float().mean()
        return loss, {"loss": loss.detach().clone()}  # the schedule divides the first in place

    return output, loss_func


def train_cases(ctx: Any, root: Path, names: list[str]) -> dict[str, list[Any]]:
    """Train every case for STEPS steps, saved after SAVED and after all; loss and norm by step."""
    rows = {}
    with megatron_on_cpu():
        for name in names:
            training = Training(CASES[name])
            rows[name] = []
            for number in range(STEPS):
                rows[name].append(training.step(number))
                if number + 1 == SAVED:
                    training.save(root / name, SAVED)
            training.save(root / f"{name}-end", STEPS)
            training.close()
    return rows


def continue_cases(
    ctx: Any, folders: dict[str, Path], cases: dict[str, Case]
) -> dict[str, list[Any]]:
    """Load every folder and train to STEPS, saved in FOLDER-end; loss and norm by step."""
    rows = {}
    with megatron_on_cpu():
        for name, case in cases.items():
            training = Training(case)
            first = training.load(folders[name])
            rows[name] = [training.step(number) for number in range(first, STEPS)]
            training.save(folders[name].with_name(f"{name}-end"), STEPS)
            training.close()
    return rows


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Megatron-core in this process, of one rank where there are no others."""
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    patch_for_cpu()
    with OnCPU():
        yield
