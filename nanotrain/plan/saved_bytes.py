"""`SavedBytes`: bytes that autograd saves for one microbatch on one rank, a fold over operators;
`held_by_routers`: the buffers of routers.

Source: Korthikanti et al. 2022, section 4; here neither attention scores nor logits are saved. A
tensor that several operations save counts once; parameters do not count.
`tests/plan/test_saved_bytes.py` compares with torch. Recomputation (docs/recompute.md) saves
less, but during a backward the recomputed part is in memory too.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from nanotrain.attention.backends import AttentionChoice, AttentionDevice, installed_torch
from nanotrain.comm.device import planned_cudnn
from nanotrain.config.config import Config
from nanotrain.kernels.fp8.layer import layers_in_bf16
from nanotrain.memory.block_transforms import recomputed_groups
from nanotrain.parallel.ep.token_dispatcher import DispatchOptions
from nanotrain.parallel.tp.loss import chunk_tokens
from nanotrain.plan.compile import defers_wgrad
from nanotrain.plan.model_plan import ModelPlan
from nanotrain.precision.dtypes import Precision
from nanotrain.precision.fp8 import RECIPES
from nanotrain.spec.kinds import MIXERS, MLPS
from nanotrain.spec.kinds.block import (
    block_operators,
    embedding_operators,
    head_operators,
    mtp_operators,
)
from nanotrain.spec.kinds.mlp import router_bytes
from nanotrain.spec.layer_inputs import input_operators
from nanotrain.spec.layer_sizes import FP32, LayerSizes
from nanotrain.spec.operators import Operator
from nanotrain.spec.residuals import stream_width
from nanotrain.spec.shared_state import SHARED, shared_bytes
from nanotrain.spec.stages import StageSpec


@dataclass(frozen=True)
class StageBytes:
    """Bytes that a stage keeps of one microbatch."""

    kept: int  # from its forward to its backward
    # additionally during its backward: the largest part that is recomputed or copied back at once
    recomputed: int
    complete: int  # without recomputation, as between I and W
    freed: int = 0  # bytes of `kept` freed before the backward of the blocks begins
    working: int = 0  # temporaries of a backward
    loss: int = 0  # temporaries of the loss, in a forward


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of the blocks of a stage, or of its layers of multi-token prediction.

    `StageBytes` describes the fields.
    """

    kept: int
    recomputed: int
    complete: int


def saved_bytes(operators: Iterable[Operator], modules: Collection[str] = ()) -> int:
    """Bytes that operators keep for their backward if some modules are recomputed."""
    return sum(operator.saved_bytes(modules) for operator in operators)


def layer_sizes(plan: ModelPlan, device: str) -> LayerSizes:
    """The sizes of the rank of a plan.

    Args:
        plan: plan of a rank.
        device: "cpu" or "cuda"; the attention backends of the two save different tensors.
    """
    config = plan.config
    axis_sizes = {axis: spec.size for axis, spec in plan.groups.items()}
    sizes = LayerSizes.of(config, plan.shape, sizes=axis_sizes)
    planned = AttentionDevice(device, (9, 0), installed_torch(), planned_cudnn())
    choice = AttentionChoice.of(config, planned)
    in_bf16 = layers_in_bf16(config.precision.fp8, plan.shape.num_layers)
    recipe = ""
    if device == "cuda":
        recipe = cast_recipe(config, axis_sizes)
    backend_names = {window: backend.name for window, (backend, _) in choice.backends.items()}
    return replace(
        sizes,
        cp_index=plan.groups["cp"].index,
        device=device,
        backend=backend_names.get(False, ""),
        window_backend=backend_names.get(True, ""),
        expert_rows=_expert_rows(plan, sizes),
        writes_head=_writes_head(plan, device),
        cast_recipe=recipe,
        layers_in_bf16=in_bf16,
    )


def cast_recipe(config: Config, sizes: Mapping[Any, int]) -> str:
    """The recipe of casts that compute norms and SwiGLU on GPUs (kernels/fp8/norm.py); empty
    where none do.

    Args:
        config: a validated configuration.
        sizes: ranks of tp and cp.
    """
    fp8 = config.precision.fp8
    if fp8 is None or not fp8.wgrad or sizes["tp"] > 1 or defers_wgrad(config.parallel):
        return ""
    recipe = RECIPES[fp8.recipe]
    shares_scales = recipe.is_per_tensor and sizes["cp"] > 1
    return "" if recipe.is_two_level or shares_scales else fp8.recipe


def _expert_rows(plan: ModelPlan, sizes: LayerSizes) -> int:
    """Rows that a rank sends to experts, its own experts included."""
    moe = plan.shape.moe
    if moe is None:
        return 0
    options = DispatchOptions.of(plan.config)
    return options.num_rows(
        sizes.routed_tokens, moe.router_topk, num_experts=moe.num_experts, ep=sizes.ep
    )


def held_by_routers(plan: ModelPlan) -> int:
    """Bytes of the buffers of this rank's routers."""
    layers = [layer for layer in plan.layers if plan.shape.has_experts(layer)]
    return sum(router_bytes(plan.config.model, layer) for layer in layers)


def _is_fused(plan: ModelPlan, device: str) -> bool:
    """Whether matrix products may add the gradients of weights to the gradient buffer."""
    fusion = plan.config.parallel.gradient_accumulation_fusion
    return device == "cuda" if fusion is None else fusion


def _writes_head(plan: ModelPlan, device: str) -> bool:
    """Whether the forward of the loss adds to the gradient buffer (parallel/tp/loss.py)."""
    precision = Precision.of(plan.config.precision)
    can_add = precision.grads is torch.float32 and precision.params is not torch.float16
    is_transient = plan.data_parallel.strategy.shard_grads and plan.shape.has_embedding_at_end
    return _is_fused(plan, device) and can_add and not is_transient


class SavedBytes:
    """Bytes that the rank of a plan keeps of a microbatch.

    Args:
        plan: plan of a rank.
        device: "cpu" or "cuda".
    """

    def __init__(self, plan: ModelPlan, device: str) -> None:
        self.sizes = layer_sizes(plan, device)
        self.shape = plan.shape
        self.stream_bytes = stream_width(plan.shape) * self.sizes.itemsize  # of a token
        self.memory = plan.config.memory
        self.config = plan.config
        self.modules = frozenset(self.memory.recomputed_modules)
        is_sharded = plan.data_parallel.strategy.shard_grads
        writes_wgrads = _is_fused(plan, device) and not is_sharded
        # Unless it is written, autograd holds the gradient of a weight until all that read the
        # weight have run.
        is_held = self.shape.is_tied and not writes_wgrads
        self.holds_head_grads = self.shape.num_mtp_layers > 0 or is_held
        self.has_experts = False
        for stage in plan.stages:
            for layer in (*stage.spec.layers, *stage.mtp_layers):
                self.has_experts |= self.shape.has_experts(layer)

    def stage(self, spec: StageSpec) -> StageBytes:
        """Bytes of a stage, with the recomputation of the plan."""
        ends = saved_bytes(embedding_operators(self.sizes)) if spec.has_embedding else 0
        ends += self.head() if spec.has_head else 0
        received = shared_bytes(self.sizes, self.shape.carried(spec.first_layer))
        if spec.has_embedding:
            received += saved_bytes(input_operators(self.sizes))
        blocks = self.blocks(spec.layers)
        further = self._mtp_layers() if spec.has_head else BlockBytes(0, 0, 0)
        return StageBytes(
            kept=ends + received + further.kept + blocks.kept,
            recomputed=max(blocks.recomputed, further.recomputed),
            complete=ends + received + further.complete + blocks.complete,
            freed=0 if self.holds_head_grads else ends,
            working=self.block_temporaries(),
            loss=self.loss_temporaries() if spec.has_head else 0,
        )

    def blocks(self, layers: Sequence[int]) -> BlockBytes:
        """Bytes of blocks with the recomputation or the offloading of the configuration."""
        complete = [self.block(layer) for layer in layers]
        if self.memory.recompute_granularity == "full":
            # state of layers that later layers read is never recomputed
            without_shared = []
            num_shared = 0
            for layer, block in zip(layers, complete, strict=True):
                sources = self.shape.kept(layer)
                saved = [source for source in sources if SHARED[source.kind].is_saved]
                without_shared.append(block - shared_bytes(self.sizes, saved))
                num_shared += shared_bytes(self.sizes, sources)
            blocks = self._recomputed_blocks(without_shared)
            return replace(
                blocks, kept=blocks.kept + num_shared, complete=blocks.complete + num_shared
            )
        if self.memory.cpu_offloading:
            return self._offloaded_blocks(complete)
        return self._selected_blocks(layers, complete)

    def _recomputed_blocks(self, complete: list[int]) -> BlockBytes:
        """Bytes of groups of blocks that keep only their input, and of the blocks after them."""
        block_input = self.sizes.outside * self.stream_bytes
        groups = recomputed_groups(self.config, len(complete))
        group_bytes = []
        num_grouped = 0
        for group in groups:
            group_bytes.append(sum(complete[index] for index in group))
            num_grouped += len(group)
        return BlockBytes(
            kept=len(groups) * block_input + sum(complete[num_grouped:]),
            recomputed=max(group_bytes, default=block_input) - block_input,
            complete=sum(complete),
        )

    def _offloaded_blocks(self, complete: list[int]) -> BlockBytes:
        """Bytes of blocks of which the first ones are offloaded to host memory.

        Their backward needs two blocks at once on the device.
        """
        num_offloaded = min(self.memory.cpu_offloading_num_layers, len(complete))
        pairs = zip(complete[:num_offloaded], [0, *complete], strict=False)
        return BlockBytes(
            kept=sum(complete[num_offloaded:]),
            recomputed=max(map(sum, pairs), default=0),
            complete=sum(complete),
        )

    def _selected_blocks(self, layers: Sequence[int], complete: list[int]) -> BlockBytes:
        """Bytes of blocks without the tensors that recomputed modules drop."""
        selected = [self.block(layer, self.modules) for layer in layers]
        dropped = [a - b for a, b in zip(complete, selected, strict=True)]
        return BlockBytes(
            kept=sum(selected), recomputed=max(dropped, default=0), complete=sum(complete)
        )

    def _mtp_layers(self) -> BlockBytes:
        """Layers of multi-token prediction; full recomputation keeps the input of their block."""
        layers = self.shape.mtp_predictions
        complete = [self.block(layer) for layer in layers]
        around = 0  # norms, projection and head
        for layer in layers:
            around += saved_bytes(mtp_operators(self.sizes, layer)) - self.block(layer)
        if self.memory.recompute_granularity == "full":
            selected = [self.sizes.outside * self.stream_bytes] * len(complete)
        else:
            selected = [self.block(layer, self.modules) for layer in layers]
        dropped = [a - b for a, b in zip(complete, selected, strict=True)]
        return BlockBytes(
            kept=around + sum(selected),
            recomputed=max(dropped, default=0),
            complete=around + sum(complete),
        )

    def block(self, layer: int, modules: Collection[str] = ()) -> int:
        """Bytes of a layer, by its index in the model, if some modules are recomputed."""
        return saved_bytes(block_operators(self.sizes, layer), modules)

    def head(self) -> int:
        """The input of the final norm, and the gradients that the loss computes in its forward."""
        return saved_bytes(head_operators(self.sizes))

    def block_temporaries(self) -> int:
        """Temporaries of the backward of a block."""
        largest = self._mlp_temporaries("dense", self.sizes)
        if self.has_experts:
            largest = max(largest, self._mlp_temporaries("moe", self.sizes))
        layer_of_kind = {self.shape.kinds(layer): layer for layer in range(self.shape.num_layers)}
        for (mixer, mlp), layer in layer_of_kind.items():
            if mixer is None:
                continue
            sizes = self.sizes.at(layer)
            operators = MIXERS[mixer].operators(sizes)
            working = max(operator.working for operator in operators)
            if mlp == "dense":
                largest = max(largest, self._mlp_temporaries(mlp, sizes))
            if mlp is not None:  # the tensors saved by the MLP are freed before
                working -= saved_bytes(MLPS[mlp].operators(sizes))
            largest = max(largest, working)
        return largest

    def _mlp_temporaries(self, kind: str, sizes: LayerSizes) -> int:
        """Temporaries of the backward of an MLP."""
        return max(operator.working for operator in MLPS[kind].operators(sizes))

    def loss_temporaries(self, *, is_training: bool = True) -> int:
        """Temporaries of the loss: its unsaved inputs, and the logits and gradients of a chunk."""
        sizes = self.sizes
        chunk = chunk_tokens(sizes.columns, device=sizes.device, is_training=is_training)
        logits = min(sizes.tokens, chunk) * sizes.columns
        chunk_hidden = 2 * min(sizes.tokens, chunk) * sizes.width
        inputs = sizes.tokens * sizes.width + chunk_hidden
        has_softcap = self.config.model.final_logit_softcapping is not None
        if sizes.device == "cpu":
            num_fp32 = 3 if has_softcap else 2
            is_low = sizes.itemsize < FP32
            if not is_low:
                return inputs + logits * num_fp32 * FP32
            # logits are converted for the softmax, wgrads for their sum over chunks
            per_logit = num_fp32 * FP32 + sizes.itemsize
            return inputs + logits * per_logit + sizes.columns * sizes.width
        if is_training:  # the gradient is in the memory of the logits (parallel/tp/loss.py)
            per_logit = sizes.itemsize
            per_logit += 2 * FP32 if has_softcap else 0
        else:
            per_logit = FP32 + sizes.itemsize
            per_logit += sizes.itemsize if has_softcap else 0
        return inputs + logits * per_logit
