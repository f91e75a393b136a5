"""`Activations`: bytes that autograd saves for one microbatch on one rank, in closed form.

Source: Korthikanti et al. 2022, section 4; here neither attention scores nor logits are saved. A
tensor that several operations save counts once; parameters do not count.
`tests/plan/test_activations.py` compares with torch. Recomputation (docs/recompute.md) saves
less, but during a backward the recomputed part is in memory too.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from nanotrain.attention.backends import AttentionChoice, AttentionDevice, installed_torch
from nanotrain.memory.block_transforms import recomputed_groups
from nanotrain.parallel.ep.token_dispatcher import DispatchOptions
from nanotrain.parallel.tp.loss import chunk_tokens
from nanotrain.plan.plan import Plan
from nanotrain.precision.dtypes import Precision
from nanotrain.spec.declaration import RankSizes
from nanotrain.spec.kinds import MIXERS, MLPS
from nanotrain.spec.stages import StageSpec

FP8, FP32, INT64 = 1, 4, 8
ROUTER_TENSORS = 5  # fp32 [tokens, experts]: logits, scores and the probabilities of the losses


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


class Activations(RankSizes):
    """Bytes that the rank of a plan keeps of a microbatch.

    Args:
        plan: plan of a rank.
        device: "cpu" or "cuda"; the attention backends of the two save different tensors.
    """

    def __init__(self, plan: Plan, device: str) -> None:
        config, self.device = plan.config, device
        super().__init__(
            config, plan.shape, sizes={axis: spec.size for axis, spec in plan.groups.items()}
        )
        attention = AttentionChoice.of(config, AttentionDevice(device, (9, 0), installed_torch()))
        self.attention = attention.backends
        fusion, shards = (
            config.parallel.gradient_accumulation_fusion,
            plan.data_parallel.strategy.shard_grads,
        )
        is_fused, is_shared = (
            device == "cuda" if fusion is None else fusion,
            plan.shape.has_embedding_at_end,
        )
        self.writes_wgrads = is_fused and not shards
        # the forward of the loss adds to the gradient buffer (parallel/tp/loss.py)
        precision = Precision.of(config.precision)
        can_add = precision.grads is torch.float32 and precision.params is not torch.float16
        self.writes_head = is_fused and can_add and not (shards and is_shared)
        self.has_fp8 = config.precision.fp8 is not None
        layers = [
            layer for stage in plan.stages for layer in (*stage.spec.layers, *stage.mtp_layers)
        ]
        self.has_experts = any(map(self.shape.has_experts, layers))
        self.expert_rows = 0  # what a rank sends to experts, those on itself included
        if (moe := self.shape.moe) is not None:
            num_tokens, sizes = (
                self.tokens // self.tp,
                {"num_experts": moe.num_experts, "ep": self.ep},
            )
            self.expert_rows = DispatchOptions.of(config).num_rows(
                num_tokens, moe.router_topk, **sizes
            )

    def stage(self, spec: StageSpec) -> StageBytes:
        """The blocks, the head and the multi-token prediction of a stage, with the recomputation of
        the plan.
        """
        head = self.head() if spec.has_head else 0
        head += (
            self.outside
            * (self.width + FP32)
            * (spec.has_embedding and self.config.model.embedding_l2_norm)
        )
        # Unless it is written, autograd holds the gradient of a weight until all that read the
        # weight have run.
        holds = self.shape.num_mtp_layers > 0 or (self.shape.is_tied and not self.writes_wgrads)
        freed = 0 if holds else head
        further = self._further(range(0) if not spec.has_head else self.shape.mtp_layers)
        head, complete_head = head + further.kept, head + further.complete
        complete = [self.block(layer) for layer in spec.layers]
        if self.config.memory.recompute_granularity == "full":
            block_input = self.outside * self.width
            groups = [
                [complete[i] for i in group]
                for group in recomputed_groups(self.config, len(complete))
            ]
            num_grouped = sum(map(len, groups))
            kept = len(groups) * block_input + sum(complete[num_grouped:])
            recomputed = max(map(sum, groups), default=block_input) - block_input
        elif self.config.memory.cpu_offloading:
            number = min(self.config.memory.cpu_offloading_num_layers, len(complete))
            kept = sum(complete[number:])
            pairs = zip(complete[:number], [0, *complete], strict=False)
            recomputed = max(map(sum, pairs), default=0)  # returning: two blocks
        else:
            selective = [self.block(layer, self.modules) for layer in spec.layers]
            kept = sum(selective)
            recomputed = max((a - b for a, b in zip(complete, selective, strict=True)), default=0)
        recomputed, complete_bytes = (
            max(recomputed, further.recomputed),
            complete_head + sum(complete),
        )
        loss = self.loss_working() * spec.has_head
        return StageBytes(
            head + kept, recomputed, complete_bytes, freed, self.block_working(), loss
        )

    def _further(self, layers: range) -> StageBytes:
        """Layers of multi-token prediction: the inputs of two norms and of the projection, the
        block, and a head.
        """
        # inputs of both norms (embeddings, hidden states), their statistics, and their concatenated
        # outputs
        around = self.outside * (4 * self.width + 2 * FP32) + self.head()
        complete = [self.block(layer) for layer in layers]
        if self.config.memory.recompute_granularity == "full":
            selective = [self.outside * self.width] * len(complete)
        else:
            selective = [self.block(layer, self.modules) for layer in layers]
        recomputed = max((a - b for a, b in zip(complete, selective, strict=True)), default=0)
        return StageBytes(
            len(layers) * around + sum(selective), recomputed, len(layers) * around + sum(complete)
        )

    def block(self, layer: int, modules: Collection[str] = ()) -> int:
        """A transformer layer: the inputs and statistics of both norms, attention, MLP or experts,
        of each block.
        """
        return sum(
            self._block(layer, mixer=mixer, mlp=mlp, modules=modules)
            for mixer, mlp in self.shape.blocks(layer)
        )

    def _block(
        self, layer: int, *, mixer: str | None, mlp: str | None, modules: Collection[str]
    ) -> int:
        num_halves, (has_pre, has_post) = (
            (mixer is not None) + (mlp is not None),
            self.shape.norms_of(layer),
        )
        # which are those of the inputs
        modules = modules if has_pre else {*modules} - {"layernorm"}
        keeps_normed = "layernorm" not in modules
        kept = self.outside * num_halves * (self.width + keeps_normed * 2 * FP32)
        if has_pre and has_post:  # those of the outputs are never recomputed
            kept += self.outside * num_halves * (self.width + FP32)
        if mixer is not None:
            kept += keeps_normed * self.outside * self.width + MIXERS[mixer].saved_bytes(
                self, layer, modules=modules
            )
        return kept if mlp is None else kept + MLPS[mlp].saved_bytes(self, layer, modules=modules)

    def head(self) -> int:
        """The input of the final norm, and the gradients that the loss computes in its forward."""
        weight = self.columns * self.shape.hidden_size * FP32
        return (self.outside + self.tokens) * self.width + weight * (not self.writes_head)

    def block_working(self) -> int:
        """Temporaries of the backward of a block: those of its MLP or of what is in the place of
        attention.
        """
        layers = {self.shape.kinds(layer): layer for layer in range(self.shape.num_layers)}
        return max(self._mlp_working(), *map(self._mixer_working, layers.values()))

    def _mixer_working(self, layer: int) -> int:
        """Temporaries before which what the MLP of the layer kept is freed."""
        mixer, mlp = self.shape.kinds(layer)
        freed = 0 if mlp is None else MLPS[mlp].saved_bytes(self, layer, modules=())
        return -freed if mixer is None else MIXERS[mixer].working_bytes(self) - freed

    def _mlp_working(self) -> int:
        """Gradients of hidden states, inside the MLP and of experts."""
        moe = self.shape.moe if self.has_experts else None
        inner = self.tokens * self.shape.ffn_size // self.tp * self.itemsize
        inner = max(inner, self.expert_rows * self.shape.moe_ffn_size * self.itemsize if moe else 0)
        if self.device == "cpu":
            return 3 * (inner + self.tokens * self.width) + self._fp8_working()
        # Of a gate and up, whose product is freed before. The grouped product returns the gradients
        # of experts.
        num_inner = 1 + self.shape.is_gated + (self.shape.is_gated and self._num_inner() > 3)
        block = num_inner * inner + 2 * self.tokens * self.width + self._fp8_working()
        if moe is None:
            return block
        num_weights = (1 + self.shape.is_gated) * moe.num_experts // self.ep
        return (
            block
            + (self.expert_rows + num_weights * self.shape.moe_ffn_size // self.etp) * self.width
        )

    def loss_working(self, *, is_training: bool = True) -> int:
        """Temporaries of the loss: its inputs, which autograd does not save, and logits of a chunk
        and gradients.
        """
        columns, is_low = self.columns, self.itemsize < FP32
        tokens = min(
            self.tokens, chunk_tokens(columns, device=self.device, is_training=is_training)
        )
        has_softcap = self.config.model.final_logit_softcapping is not None
        # logits are converted for the softmax, wgrads for their sum over chunks
        if self.device == "cpu":
            per_logit, weight = (
                (2 + has_softcap) * FP32 + is_low * self.itemsize,
                is_low * columns * self.width,
            )
        elif is_training:  # the gradient is in the memory of the logits (parallel/tp/loss.py)
            per_logit, weight = self.itemsize + has_softcap * 2 * FP32, 0
        else:
            per_logit, weight = self.itemsize * (1 + has_softcap) + FP32, 0
        return self.tokens * self.width + tokens * (columns * per_logit + 2 * self.width) + weight

    def _fp8_working(self) -> int:
        """The largest operand of a product while it is quantized: two copies in fp32 and the
        result.
        """
        if not self.has_fp8:
            return 0
        widths = [
            self.shape.ffn_size // self.tp,
            self.shape.moe_ffn_size // self.etp if self.shape.moe else 0,
        ]
        return (
            max(self.tokens, self.shape.hidden_size)
            * max(self.shape.hidden_size, *widths)
            * (2 * FP32 + FP8)
        )

    def core_attention(
        self, layer: int, heads: tuple[int, int], *, modules: Collection[str]
    ) -> int:
        """Query, key, value, output and its log-sum-exp; only the backend math saves a mask
        (attention/tiles.py).
        """
        (num_heads, groups), shape, is_ring = heads, self.shape, self.cp_comm_type == "p2p"
        backend = self.attention[shape.has_window(layer)][0].name
        is_sdpa = self.device == "cpu" and backend == "sdpa flash"
        value_dim, keeps_inputs = shape.value_head_dim, "mla_up_proj" not in modules
        # values are views of what kv_up of MLA returns
        beside_values = 0 if shape.mla is None else shape.mla.qk_head_dim
        if "core_attn" in modules:  # its inputs, and its output for the layer that follows
            inputs = num_heads * shape.head_dim + groups * (
                shape.head_dim + value_dim + beside_values
            )
            inputs *= keeps_inputs
            return self.tokens * (inputs + num_heads * value_dim) * self.itemsize
        if backend == "math" and not self.config.model.has_score_options:
            return self._written_out(num_heads)
        is_padded = backend == "sdpa flash" and value_dim < shape.head_dim
        # The next layer keeps the output again where it was sliced, concatenated or sent.
        outputs = value_dim if is_padded or self.cp_comm_type in ("allgather", "a2a") else 0
        outputs += shape.head_dim if is_padded else value_dim
        is_repeated = is_sdpa or backend == "sdpa efficient"
        if is_repeated:  # key/value heads, in 16 bits
            groups = groups if is_sdpa and self.itemsize == FP32 else num_heads
        if is_padded:
            value_dim = shape.head_dim
        elif not is_repeated and self.cp_comm_type in (None, "p2p"):
            value_dim += beside_values
        key_value = (
            groups
            * (shape.head_dim + value_dim)
            * (self.cp if self.cp_comm_type == "allgather" else 1)
        )
        query = num_heads * shape.head_dim
        if not keeps_inputs and self.cp_comm_type != "a2a":  # which keeps copies of all three
            query = 0
            if self.cp_comm_type is None or is_ring:
                # a padded value is a copy
                key_value = num_heads * shape.head_dim if is_padded and not is_ring else 0
        return self.tokens * (
            (query + num_heads * outputs + key_value) * self.itemsize + num_heads * FP32
        )

    def _written_out(self, num_heads: int) -> int:
        """The backend math: query, key, value and the weights of all queries and keys in fp32, and
        the output.
        """
        shape, num_keys, copies = self.shape, self.seq_length * self.cp, 1.0
        # two chunks of queries; together they attend to 2 cp + 1 chunks of keys
        if self.cp_comm_type == "allgather":
            num_keys, copies = num_keys * (2 * self.cp + 1) // (4 * self.cp), self.cp + 0.5
        inputs = shape.head_dim + copies * (shape.head_dim + shape.value_head_dim)
        return (
            self.tokens
            * num_heads
            * int((inputs + num_keys) * FP32 + shape.value_head_dim * self.itemsize)
        )

    def dense(self, modules: Collection[str]) -> int:
        """An MLP and its input."""
        kept = 0 if "mlp" in modules else self._mlp(self.shape.ffn_size)
        return ("layernorm" not in modules) * self.outside * self.width + kept

    def _mlp(self, inner: int) -> int:
        """Up and its activation; with a gate also gate and product. SwiGLU saves no activation."""
        return self.tokens * inner // self.tp * self._num_inner() * self.itemsize

    def _num_inner(self) -> int:
        """Tensors of the inner width that an MLP keeps; clamps keep their inputs."""
        model = self.config.model
        if not self.shape.is_gated:
            return 2
        is_swiglu = model.activation == "swiglu" and not model.glu_linear_offset
        return 4 - is_swiglu + 2 * (model.activation_func_clamp_value is not None)

    def experts(self, modules: Collection[str]) -> int:
        """Router, permuted tokens before, inside and after the experts (padded or evenly routed),
        shared expert.
        """
        moe, keeps_normed = self.shape.moe, "layernorm" not in modules
        assert moe is not None, "callers check it"
        if "moe" in modules:
            return keeps_normed * self.outside * self.width
        routed = self.tokens // self.tp  # each tp rank routes a slice of the sequence
        # a GPU multiplies 16-bit tokens into fp32
        is_low = self.itemsize < FP32 and self.device == "cpu"
        # by the router, which keeps the copy
        is_copied = is_low or (self.tp > 1 and not self.sequence_parallel)
        router_input = (
            (keeps_normed or is_copied)
            * self.shape.hidden_size
            * (FP32 if is_low else self.itemsize)
        )
        router = routed * (ROUTER_TENSORS * moe.num_choices * FP32 + router_input)
        router += is_low * moe.num_choices * self.shape.hidden_size * FP32
        # the mask of the pairs of zero experts, and the sum of their weights
        router += (moe.num_zero_experts > 0) * routed * (moe.router_topk + FP32)
        num_inner = (1 + self.shape.is_gated) if "moe_act" in modules else self._num_inner()
        inner = self.shape.moe_ffn_size // self.etp * num_inner * self.itemsize
        rows, width = self.expert_rows, self.shape.expert_input_size * self.itemsize
        experts = rows * self.etp * (width + inner + 2 * INT64) + rows * (width + 2 * INT64 + FP32)
        experts += (moe.latent_size is not None) * (1 + (moe.num_zero_experts > 0)) * routed * width
        if moe.shared_expert_intermediate_size is None:
            return router + experts
        normed = (keeps_normed and is_copied) * self.outside * self.width
        # the expert's output and the gate
        gate = moe.shared_expert_gate * self.outside * (self.width + self.itemsize)
        return router + experts + normed + self._mlp(moe.shared_expert_intermediate_size) + gate
