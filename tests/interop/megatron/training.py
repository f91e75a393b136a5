"""Megatron-core trains small models on the CPU and saves them, for the import of its checkpoints.

train_cases(ctx, root, names)            for run_ranks with processes: its layouts and its patches are global
continue_cases(ctx, folders, cases)      the same from checkpoints

Versions of megatron-core from 0.12 on: `pytest -o pythonpath=FOLDER` with another one in FOLDER.
What a version lacks is left out of the model.
There is no GPU, so tensors for one are put on the CPU; without transformer-engine its layers are the
local ones. Samples are the tokens of `tokens()` in order, MICRO_BATCH per microbatch.
"""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.interop.megatron.cases import (
    CASES,
    GLOBAL_BATCH,
    MICRO_BATCH,
    ROWS,
    SAVED,
    SEQ_LENGTH,
    SIZES,
    STEPS,
    Case,
    arguments_of,
    known_case,
    tokens,
)
from tests.interop.megatron.mamba_of_torch import local_stack, put_in_place
from tests.interop.megatron.on_cpu import (
    OnCPU,
    core_version,
    patch_for_cpu,
    registered_like_te,
)


class Training:
    """One case on this rank: models, optimizer and schedule."""

    def __init__(self, case: Case) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.transformer import MLATransformerConfig, TransformerConfig

        self.has_legacy_files = case.has_legacy_files
        case = known_case(case)
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
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_decoder_block_spec,
            get_gpt_mtp_block_spec,
        )

        if self.case.pattern is not None:
            return self.wrapped(self.build_hybrid_model(self.case.pattern))
        options: dict[str, Any] = {"vp_stage": stage if self.case.vpp else None}
        if core_version() < (0, 13):
            options = {}
            ps.set_virtual_pipeline_model_parallel_rank(stage if self.case.vpp else None)
        spec = get_gpt_decoder_block_spec(self.config, use_transformer_engine=False, **options)
        mtp_spec = None
        if self.config.mtp_num_layers:
            mtp_spec = get_gpt_mtp_block_spec(
                self.config, spec, use_transformer_engine=False, **options
            )
        model = GPTModel(
            self.config,
            spec,
            mtp_block_spec=mtp_spec,
            vocab_size=ROWS,
            max_sequence_length=SEQ_LENGTH,
            pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, **options),
            post_process=ps.is_pipeline_last_stage(ignore_virtual=False, **options),
            **options,
            **self.case.model,
        )
        return self.wrapped(model)

    def build_hybrid_model(self, pattern: str) -> Any:
        """Layers by the letters of a pattern."""
        from megatron.core import parallel_state as ps
        from megatron.core.models.mamba import MambaModel

        return MambaModel(
            self.config,
            local_stack(num_experts=self.config.num_moe_experts or 1),
            vocab_size=ROWS,
            max_sequence_length=SEQ_LENGTH,
            hybrid_override_pattern=pattern,
            pre_process=ps.is_pipeline_first_stage(),
            post_process=ps.is_pipeline_last_stage(),
        )

    def wrapped(self, model: Any) -> Any:
        """A model that reduces its gradients."""
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.transformer.module import Float16Module

        if self.case.is_bf16:
            model = Float16Module(self.config, model)
        wrapper = DistributedDataParallelConfig(
            use_distributed_optimizer=self.case.form is not None,
            bucket_size=self.case.bucket_size,
            overlap_grad_reduce=self.case.bucket_size is not None,
        )
        if not self.case.is_like_te:
            return DistributedDataParallel(self.config, wrapper, model)
        with registered_like_te(model):
            return DistributedDataParallel(self.config, wrapper, model)

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
        from megatron.core import dist_checkpointing

        content = self.content()
        metadata = self.metadata(content)
        state: dict[str, Any] = {
            "args": arguments_of(self.case, samples=step * GLOBAL_BATCH),
            "checkpoint_version": 3.0,
            "iteration": step,
        }
        for name, bare in self.bare_models.items():
            state[name] = bare.sharded_state_dict(metadata=metadata)
        state["optimizer"] = self.optimizer.sharded_state_dict(state, **self.form_options(metadata))
        state["opt_param_scheduler"] = self.schedule.state_dict()
        target = folder / f"iter_{step:07d}"
        target.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        if core_version() < (0, 13):
            dist_checkpointing.save(state, str(target))
        else:
            dist_checkpointing.save(state, str(target), content_metadata=content)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
        if self.has_legacy_files:
            self.save_legacy(folder.with_name(f"{folder.name}-legacy"), step)

    def content(self) -> dict[str, Any]:
        """What the training program stores of the form of a checkpoint."""
        content: dict[str, Any] = {"singleton_local_shards": False}
        content["chained_optim_avoid_prefix"] = True
        if self.case.form is not None:
            content["distrib_optim_sharding_type"] = self.case.form
        return content

    def metadata(self, content: dict[str, Any]) -> dict[str, Any]:
        """What modules and optimizer are given to make their state."""
        from megatron.core import parallel_state

        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return content | {"dp_cp_group": group}

    def form_options(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the optimizer for the form of its state."""
        if core_version() >= (0, 13):
            return {"metadata": metadata}
        return {} if self.case.form is None else {"sharding_type": self.case.form}

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
        from megatron.core import dist_checkpointing

        step = int((folder / "latest_checkpointed_iteration.txt").read_text())
        path = str(folder / f"iter_{step:07d}")
        common = dist_checkpointing.load_common_state_dict(path)
        content = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
        metadata = self.metadata(content)
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
    put_in_place()
    patch_for_cpu()
    with OnCPU():
        yield
