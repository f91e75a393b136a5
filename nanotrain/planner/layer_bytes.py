"""Bytes that other programs save of a microbatch and need beside them, operator by operator.

Each operator of a stage keeps tensors from its forward to its backward (`saved`) and needs
gradients and temporaries while its backward runs (`working`); `peak_of_backward` walks the
operators backwards. Sources: the code of Megatron-LM (d98e8a64) with Transformer Engine and of
nanotron (2411b022), checked with the peaks that runs of both report.

    T tokens of a rank   O tokens outside of tensor-parallel layers: T / tp with sequence parallelism   H hidden size
"""

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from nanotrain.memory.block_transforms import recomputed_groups
from nanotrain.planner.hardware import read_data
from nanotrain.planner.scenario import Scenario
from nanotrain.spec.declaration import Declaration, RankSizes
from nanotrain.spec.kinds import MIXERS
from nanotrain.spec.stages import StageSpec

FP32, INT64 = 4, 8
HOPPER = ("h1", "h2", "h8", "gh")  # beginnings of names of GPUs


class Op(NamedTuple):
    """Bytes of one operator."""

    saved: int  # kept from its forward to its backward
    working: int = 0  # gradients and temporaries during its backward
    # [outputs, inputs] of the weights whose gradients it computes
    weights: tuple[tuple[int, int], ...] = ()


class StagePeak(NamedTuple):
    """Bytes of a microbatch on a stage."""

    kept: int  # from its forward to its backward
    beside: int  # additionally while the backward is at its peak; the kept bytes count in full
    weights: frozenset[tuple[int, int]]  # shapes of the weights of its linear layers


class LayerBytes(RankSizes):
    """The operators of the stages of one scenario.

    Args:
        scenario: configuration, machine and engine.
    """

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario.config, scenario.shape, sizes=scenario.sizes)
        self.scenario, self.engine = scenario, scenario.engine
        config, self.model = scenario.config, scenario.config.model
        # of the kept input of a linear layer, relative to the data type of the activations
        self.share_in_fp8 = read_data("dtypes")["saved"].get(scenario.matmul_dtype, 1.0)
        self.hidden, self.inside = self.outside * self.width, self.tokens * self.width
        # a backward gathers its input again
        self.gathered = self.inside if self.outside < self.tokens else 0
        # of a norm
        self.statistics = self.outside * FP32 * (1 + (self.shape.normalization == "LayerNorm"))
        self.is_megatron = self.engine.name == "megatron"
        # whether matrix products add the gradients of weights to the buffer of gradients
        self.fuses_wgrads = (
            self.is_megatron and config.parallel.gradient_accumulation_fusion is None
        )
        backend, deterministic = config.train.attention_backend, config.train.deterministic_mode
        self.writes_scores = "local layers" in scenario.features or backend in ("unfused", "local")
        # Flash attention keeps its output in another layout than the projection that follows.
        # Kernels of cuDNN have the layout of Megatron-LM: on Hopper always, on Blackwell unless
        # deterministic.
        is_hopper, is_ampere = (
            scenario.gpu.name.startswith(HOPPER),
            scenario.gpu.name.startswith("a100"),
        )
        is_flash = backend == "flash" or not (is_hopper or not (deterministic or is_ampere))
        self.copies_output = self.is_megatron and is_flash and config.train.micro_batch_size > 1

    def dropout(self, p: float, num_bytes: int) -> int:
        """Mask of a dropout, a byte per element."""
        return num_bytes // self.itemsize if p > 0 else 0

    def linear(self, inputs: int, outputs: int, *, saved: int) -> Op:
        """A tensor-parallel linear layer: its input, gradients of output and input, and of the
        weight if not fused.

        Args:
            inputs: width of the input per rank.
            outputs: width of the output per rank.
            saved: bytes that it keeps, in the data type of the activations.
        """
        gradients = self.tokens * (inputs + outputs) * self.itemsize + self.hidden + self.gathered
        return Op(int(saved * self.share_in_fp8), gradients, ((outputs, inputs),))

    def block(self, layer: int) -> list[Op]:
        """The operators of a transformer block in forward order."""
        shape, normed = self.shape, 0 if "layernorm" in self.modules else self.hidden
        mask = self.dropout(self.model.hidden_dropout, self.hidden)
        norm = Op(self.hidden + self.statistics, 2 * self.hidden)
        add, known = Op(mask, 2 * self.hidden), {"attention": self.attention, "mla": self.mla}
        ops: list[Op] = []
        for mixer, mlp in shape.blocks(layer):
            if mixer is not None:
                ops.append(norm)
                for kind in MIXERS[mixer].parts or (mixer,):
                    ops += (
                        known[kind](layer, normed)
                        if kind in known
                        else self.declared(kind, layer, normed=normed)
                    )
                ops.append(add)
            if mlp is not None:
                inner = self.experts(normed) if mlp == "moe" else self.mlp(shape.ffn_size, normed)
                ops += [norm, *inner, add]
        factor = self.engine.memory.saved_factor
        return [op._replace(saved=int(op.saved * factor)) for op in ops] if factor != 1.0 else ops

    def declared(self, name: str, layer: int, *, normed: int) -> list[Op]:
        """What a kind keeps and its temporaries in nanotrain, and its linear layers."""
        kind = MIXERS[name]
        weights = [
            spec for spec in kind.declare(Declaration(self.shape, "bf16", self.tp)) if spec.in_fp8
        ]
        local = [(spec.shape[0] // self.tp, spec.shape[1]) for spec in weights[:-1]]
        outputs = sum(rows for rows, _ in local)
        kept = normed + kind.saved_bytes(self, layer, modules=self.modules)
        gradients = self.tokens * 2 * outputs * self.itemsize + self.hidden
        return [Op(kept, max(gradients, kind.working_bytes(self)), tuple(local))]

    def attention(self, layer: int, normed: int) -> list[Op]:
        """Projection of queries, keys and values, core attention, output projection."""
        shape = self.shape.of_layer(layer)
        query = shape.num_heads * shape.head_dim // self.tp
        key = max(1, shape.query_groups // self.tp) * shape.head_dim
        hidden, tokens = shape.hidden_size, self.tokens * self.itemsize
        # before and after the norms
        copies = 1 + ((shape.has_qk_norm or shape.qk_l2_norm) and self.is_megatron)
        inputs = tokens * ((query + key) * copies + key)
        return [
            self.linear(hidden, query + 2 * key, saved=normed),
            *self.core_attention(inputs, tokens * query, heads=shape.num_heads // self.tp),
            self.linear(query, hidden, saved=tokens * query),
        ]

    def mla(self, layer: int, normed: int) -> list[Op]:
        """Down-projections, norms of the compressed vectors, up-projections, core attention, output
        projection.
        """
        shape, mla = self.shape, self.shape.mla
        assert mla is not None, "callers check it"
        heads, tokens, rank = (
            shape.num_heads // self.tp,
            self.tokens * self.itemsize,
            mla.q_lora_rank or 0,
        )
        outside = self.outside * self.itemsize
        query, value = heads * shape.head_dim, heads * shape.value_head_dim
        up = 0 if "mla_up_proj" in self.modules else 1
        compressed = rank + mla.kv_lora_rank + mla.qk_pos_emb_head_dim
        key_value = heads * (mla.qk_head_dim + shape.value_head_dim)
        return [
            self.linear(shape.hidden_size, compressed, saved=normed),
            Op(outside * (compressed + rank + mla.kv_lora_rank), 2 * tokens * (query + key_value)),
            *self.core_attention(
                up * tokens * (2 * query + key_value), tokens * value, heads=heads
            ),
            self.linear(value, shape.hidden_size, saved=tokens * value),
        ]

    def core_attention(self, inputs: int, output: int, *, heads: int) -> list[Op]:
        """Attention of queries to keys; `inputs` are bytes of query, key and value."""
        statistics = self.tokens * heads * FP32
        if not self.writes_scores:
            if "core_attn" in self.modules:
                return [Op(inputs, inputs + 2 * output + statistics)]
            # of the output: over cp in the layout of the kernel too, and the projection's input in
            # 8 bits
            copies = (self.cp > 1) + self.copies_output + (self.share_in_fp8 < 1)
            return [Op(inputs + statistics + copies * output, inputs + 2 * output)]
        scores = self.tokens * heads * self.config.data.seq_length // self.cp * self.itemsize
        p = self.model.attention_dropout
        kept = scores * (2 if "unfused softmax" in self.scenario.features else 1)
        kept += scores + self.dropout(p, scores) if p > 0 else 0
        if "core_attn" in self.modules:
            return [Op(inputs, inputs + kept + scores)]
        return [Op(inputs + kept, 2 * scores + output)]

    def mlp(self, inner: int, normed: int) -> list[Op]:
        """Up, activation and down."""
        shape, inner = self.shape, inner // self.tp
        if "mlp" in self.modules:
            normed = max(normed, self.hidden)
            return [Op(normed, (3 + 2 * shape.is_gated) * self.tokens * inner * self.itemsize)]
        width, unit = (1 + shape.is_gated) * inner, self.tokens * inner * self.itemsize
        unfused = shape.is_gated and not self.is_megatron  # the activated gate
        return [
            self.linear(shape.hidden_size, width, saved=normed),
            Op(
                (1 + shape.is_gated + unfused) * unit,
                (2 + shape.is_gated + unfused) * unit + self.hidden,
            ),
            self.linear(inner, shape.hidden_size, saved=unit),
        ]

    def experts(self, normed: int) -> list[Op]:
        """Router, dispatch, experts of evenly routed tokens, combination, shared expert."""
        shape, moe = self.shape, self.shape.moe
        assert moe is not None, "callers check it"
        etp, inner = self.etp, shape.moe_ffn_size // self.etp
        pairs = int(
            self.tokens
            // self.tp
            * moe.mean_topk
            * etp
            * self.scenario.imbalance
            * self.scenario.padding
        )
        unit, permuted = (
            pairs * inner * self.itemsize,
            pairs * shape.expert_input_size * self.itemsize,
        )
        router = self.tokens // self.tp * moe.num_choices * (3 * FP32 + 1)
        kept = 0 if "moe_act" in self.modules else 1
        up, down = ((1 + shape.is_gated) * inner, shape.hidden_size), (shape.hidden_size, inner)
        ops = [Op(normed + router, 2 * self.hidden)]
        if moe.shared_expert_intermediate_size:
            ops += self.mlp(moe.shared_expert_intermediate_size, 0)
        ops += [
            Op(
                int(permuted * self.share_in_fp8), 2 * permuted + (1 + shape.is_gated) * unit, (up,)
            ),
            Op((1 + shape.is_gated) * unit, (2 + shape.is_gated) * unit),
            # the kernel of SwiGLU multiplies by the probabilities too
            Op(
                int(kept * unit * self.share_in_fp8) + (0 if shape.is_gated else unit),
                permuted + unit,
                (down,),
            ),
            Op(0, 2 * permuted),
        ]
        if "moe" not in self.modules:
            return ops
        peak = self.peak_of_backward(ops)
        return [Op(normed or self.hidden, peak.kept + peak.beside, (up, down))]

    def head(self) -> list[Op]:
        """Final norm, logits and loss."""
        logits = self.tokens * self.columns
        if "fused loss" in self.scenario.features:  # the gradient is written over the logits
            loss = Op(logits * self.itemsize, 0)
        else:  # the softmax in fp32 is kept; beside it are the logits
            further = 2 * FP32 if self.engine.memory.low_grads else 0
            # which is not in place
            further += FP32 if "compiled loss" in self.scenario.features else 0
            loss = Op(logits * FP32, logits * (self.itemsize + further))
        # the gradient of the weight is a tensor of its own even where it is written to the buffer
        # of gradients
        gradients = logits * self.itemsize + 2 * self.inside + self.columns * self.width
        return [
            Op(self.hidden + self.statistics, 2 * self.hidden),
            Op(self.hidden, gradients),
            loss,
        ]

    def stage(self, spec: StageSpec) -> StagePeak:
        """A stage with the recomputation of the configuration."""
        ops: list[Op] = []
        if spec.has_embedding:
            ops.append(Op(self.dropout(self.model.hidden_dropout, self.hidden), self.hidden))
        blocks = [self.block(layer) for layer in spec.layers]
        if self.config.memory.recompute_granularity == "full":
            groups = recomputed_groups(self.config, len(blocks))
            peaks = [
                self.peak_of_backward(op for index in group for op in blocks[index])
                for group in groups
            ]
            recomputed = [
                [Op(self.hidden, peak.kept + peak.beside - self.hidden)] for peak in peaks
            ]
            blocks = [*recomputed, *blocks[sum(map(len, groups)) :]]
        # in host memory until their backward
        offloaded = self.config.memory.cpu_offloading_num_layers
        for index, block in enumerate(blocks):
            ops += (
                [op._replace(saved=0, working=op.working + op.saved) for op in block]
                if index < offloaded
                else block
            )
        if spec.has_head:
            ops += self.head()
            for layer in self.shape.mtp_layers:
                ops += [*self.block(layer), *self.head()]
        return self.peak_of_backward(ops)

    def peak_of_backward(self, ops: Iterable[Op]) -> StagePeak:
        """What operators keep, and what their backward needs beside all that is kept."""
        ops = list(ops)
        kept = left = sum(op.saved for op in ops)
        beside, weights = 0, frozenset(weight for op in ops for weight in op.weights)
        for op in reversed(ops):
            weight = 0 if self.fuses_wgrads else sum(map(prod, op.weights)) * self.itemsize
            beside = max(beside, left - kept + op.working + weight)
            left -= op.saved
        return StagePeak(kept, beside, weights)
