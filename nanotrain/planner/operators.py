"""`Layers`: the parts of every layer of a scenario, with their times, FLOPs and bytes."""

from collections import Counter
from dataclasses import replace
from functools import partial
from math import comb

from nanotrain.planner.collectives import collective_s
from nanotrain.planner.kernels import (
    BYTES,
    AttentionShape,
    attention_s,
    attention_work,
    grouped_matmul_s,
    matmul_s,
    memory_s,
)
from nanotrain.planner.parts import Part, Parts
from nanotrain.planner.scenario import Scenario
from nanotrain.spec.declaration import ContextRank, Declaration, LayerKind, RankSizes
from nanotrain.spec.kinds import MIXERS
from nanotrain.spec.kinds.dsa import BLOCK_SCORES
from nanotrain.spec.shape import ModelShape

UP_PROJECTIONS = ("query_up.weight", "kv_up.weight")  # of MLA, which are recomputed together
# launches that are left with CUDA graphs, which cannot hold the dispatch to experts
GRAPH_LAUNCHES = 0.1
ROUTER_LAUNCHES = 20  # scores, top k, losses, counts and their sums
ROUTER_BYTES = 40  # per token and expert, forward: scores, probabilities and losses in fp32
# of the peak, with rows of no multiple of 16 bytes: heads of 108 against 216 (bigscience)
UNALIGNED_SHARE = 0.026
# time of the backward of torch's attention in bf16 on a CPU, relative to fp32 (measured)
CPU_LOW_BACKWARD = 1.45
# attention/sparse.py and chunks.py in fp32, of every causal pair: bytes per index head without and
# with the loss, of a selection and its loss, and per head of attention forward and backward
INDEX_BYTES, SELECTION_BYTES, EAGER_BYTES = (16, 46), 160, (65, 81)
# per attention score that is written out, forward and backward: products, mask, softmax, dropout
MATH_BYTES = (13, 22)


class Layers(RankSizes):
    """The parts of the layers of a scenario.

    Args:
        scenario: configuration, machine and engine.
    """

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario.config, scenario.shape, sizes=scenario.sizes)
        self.scenario, self.engine = scenario, scenario.engine
        self.gpu, self.dtype = scenario.machine, self.config.precision.params_dtype

    def collective(self, name: str, operation: str, *, num_bytes: float) -> float:
        """Seconds of a collective over the group of an axis."""
        ranks = self.scenario.ranks(name)
        seconds = collective_s(self.gpu, operation, num_bytes=num_bytes, ranks=ranks)
        return seconds + len(ranks) * self.engine.network.device_stall_s * (
            name == "tp" and self.tp > self.gpu.gpus_per_node
        )

    def memory(
        self, name: str, forward: float, *, backward: float, launches: tuple[int, int] = (1, 1)
    ) -> Part:
        """An operator that reads and writes so many bytes."""
        wide = BYTES["fp32"] / self.itemsize if self.gpu.is_cpu else 1  # a CPU computes in fp32
        first, second = (
            memory_s(self.gpu, size * wide) if size else 0.0 for size in (forward, backward)
        )
        return Part(name, first, second, launches=(*launches, 0), num_bytes=forward)

    def paced(self, part: Part, *, is_graphed: bool = False) -> Part:
        """A part that takes at least as long as its launches: the host waits for the counts of
        tokens before them.
        """
        launch_s = self.engine.launches.operator_s * (GRAPH_LAUNCHES if is_graphed else 1.0)
        forward, dgrad = (count * launch_s for count in part.launches[:2])
        return replace(part, forward=max(part.forward, forward), dgrad=max(part.dgrad, dgrad))

    def block(self, layer: int) -> Parts:
        """A transformer block, by its index in the model."""
        parts: Parts = []
        for mixer, mlp in self.shape.blocks(layer):
            parts += [] if mixer is None else self.norms(layer)
            for kind in () if mixer is None else MIXERS[mixer].parts or (mixer,):
                parts += self.mixer(kind, layer)
            if mlp is not None:
                inner = self.experts() if mlp == "moe" else self.mlp("mlp", self.shape.ffn_size)
                parts += [*self.norms(layer), *inner]
        return parts

    def mixer(self, kind: str, layer: int) -> Parts:
        """Attention or what is in its place: products by its parameters, joined over a shared
        input.
        """
        widths, shape = Counter[tuple[str, str, int]](), self.shape.of_layer(layer)
        for spec in MIXERS[kind].declare(Declaration(shape, self.dtype)):
            if spec.in_fp8:
                mode = ("column", "row")[spec.shards[0].dim] if spec.shards else ""
                name = (
                    "mla_up_proj"
                    if spec.name in UP_PROJECTIONS
                    else mode or spec.name.removesuffix(".weight")
                )
                widths[name, mode, spec.shape[1]] += spec.shape[0]
        linears: dict[bool, Parts] = {False: [], True: []}
        for (name, mode, inputs), outputs in widths.items():
            split = {"column": (self.tp, 1), "row": (1, self.tp)}.get(mode, (1, 1))
            size = (self.tokens if mode else self.outside, outputs // split[0], inputs // split[1])
            linears[mode == "row"] += self.linear(name, size, mode=mode)
        inside = {"attention": self.attention, "mla": self.mla, "dsa": self.sparse}.get(
            kind, self.recurrence
        )
        *others, core = inside(kind, layer)
        return [
            *linears[False],
            *others,
            self._in_context(core, MIXERS[kind], shape=shape),
            *linears[True],
        ]

    def recurrence(self, kind: str, layer: int) -> Parts:
        """What a kind computes of the sequence, at the peak."""
        seq_length = self.config.data.seq_length
        flops = MIXERS[kind].sequence_flops(self.shape, layer, seq_length=seq_length) / 3
        flops *= self.tokens / seq_length / self.tp
        seconds = flops / self.gpu.peak(self.dtype)
        return [Part("linear_attn", seconds, 2 * seconds, launches=(10, 20, 0), flops=flops)]

    def _in_context(self, part: Part, kind: LayerKind, *, shape: ModelShape) -> Part:
        """What is computed of the sequence with the communication of context parallelism."""
        if self.cp == 1 or kind.cp_bytes is None:
            return part
        rank = ContextRank(
            0, self.cp, self.tp, self.batch_size, self.itemsize, self.tokens, str(self.cp_comm_type)
        )
        # with what a rank sends to itself
        sent, share = kind.cp_bytes(shape, rank), self.cp / (self.cp - 1)
        for name, (forward, backward) in sent.items():
            name = "all_gather" if name == "p2p" else name  # a ring sends as much
            before, last = (
                self.collective("cp", name, num_bytes=share * size) for size in (forward, backward)
            )
            part = replace(part, group="cp", before=part.before + before, last=part.last + last)
        if not kind.has_keys or sent.keys() != {"p2p"}:
            return part
        # a ring, beside the attention to the keys that are there
        return replace(part, hides="tiles", pieces=self.cp, launches=(self.cp, 3 * self.cp, 0))

    def norms(self, layer: int) -> Parts:
        """The norm before attention or the MLP, and the addition to the residual stream after it."""
        norm = self.memory(
            "layernorm", 2 * self.outside * self.width, backward=3 * self.outside * self.width
        )
        passes = (
            1 if self.engine.operators.fused else 3
        )  # a fused addition reads only what the norm does not
        passes += self.config.model.hidden_dropout > 0
        add = self.memory(
            "add", passes * self.outside * self.width, backward=passes * self.outside * self.width
        )
        return [norm] * sum(self.shape.norms_of(layer)) + [add]

    def attention(self, kind: str, layer: int) -> Parts:
        """Rotary positions, norms of queries and keys, core attention."""
        shape = self.shape.of_layer(layer)
        heads, groups = shape.num_heads // self.tp, max(1, shape.query_groups // self.tp)
        rotated, parts = self.tokens * (heads + groups) * shape.head_dim * self.itemsize, Parts()
        passes = 2 if self.engine.operators.fused else 6
        if self.config.model.has_rope:
            parts.append(
                self.memory(
                    "rope", passes * rotated, backward=passes * rotated, launches=(passes, passes)
                )
            )
        if shape.has_qk_norm or shape.has_wide_qk_norm or shape.of_layer(layer).qk_l2_norm:
            parts.append(self.memory("qk_norm", 2 * rotated, backward=3 * rotated, launches=(2, 4)))
        return [*parts, self.core_attention(layer, (heads, groups))]

    def mla(self, kind: str, layer: int) -> Parts:
        """Norms of the compressed vectors, queries and keys put together with rotary positions,
        core attention.
        """
        shape, mla, heads = self.shape, self.shape.mla, self.shape.num_heads // self.tp
        assert mla is not None, "the caller checks it"
        norms = self.outside * ((mla.q_lora_rank or 0) + mla.kv_lora_rank) * self.itemsize
        rotated = self.tokens * heads * (2 * shape.head_dim) * self.itemsize
        passes = 2 if self.engine.operators.fused else 4
        return [
            self.memory("layernorm", 2 * norms, backward=3 * norms, launches=(2, 4)),
            self.memory(
                "mla_up_proj",
                passes * rotated,
                backward=passes * rotated,
                launches=(passes, passes),
            ),
            self.core_attention(layer, (heads, heads)),
        ]

    def sparse(self, kind: str, layer: int) -> Parts:
        """Sparse attention without fused kernels: products and scores of all causal pairs in fp32,
        a block at a time.

        Once per forward the index scores of its heads, the selection and the loss of the index,
        with its gradients.
        """
        shape, dsa, seq = self.shape, self.shape.dsa, self.config.data.seq_length
        assert dsa is not None, "the caller checks it"
        pairs, has_loss = self.tokens * seq / 2, dsa.loss_coeff > 0
        heads, key, value = shape.num_heads // self.tp, shape.head_dim, shape.value_head_dim
        num_blocks = max(1, self.tokens * seq * max(heads, dsa.n_heads) // BLOCK_SCORES)

        def seconds(flops: float, num_bytes: float) -> float:
            peak = self.gpu.peak("fp32") * self.gpu.reachable["fp32"]
            return pairs * flops / peak + memory_s(self.gpu, pairs * num_bytes)

        flops = 2 * dsa.n_heads * dsa.head_dim * (1 + 2 * has_loss) + 2 * heads * key * has_loss
        of_index = seconds(
            flops, dsa.n_heads * INDEX_BYTES[has_loss] + heads * 24 * has_loss + SELECTION_BYTES
        )
        # the target, over all heads
        summed = self.collective("tp", "all_reduce", num_bytes=4 * pairs * has_loss)
        index = Part(
            "indexer", of_index, launches=(50 * num_blocks, 0, 0), group="tp", after=summed
        )
        forward = seconds(2 * heads * (key + value), heads * EAGER_BYTES[0])
        backward = seconds(2 * heads * (3 * key + 2 * value), heads * EAGER_BYTES[1])
        launches, done = (10 * num_blocks, 20 * num_blocks, 0), 2 * heads * (key + value) * pairs
        core = Part("core_attn", forward, backward, launches=launches, flops=done)
        return [*self.mla(kind, layer)[:-1], replace(index, flops=flops * pairs), core]

    def core_attention(self, layer: int, heads: tuple[int, int]) -> Part:
        """Scaled dot-product attention."""
        shape, train, cp = self.shape, self.config.train, self.cp
        is_split = self.cp_comm_type == "a2a"  # heads instead of the sequence
        local = (max(1, heads[0] // cp), max(1, heads[1] // cp)) if is_split else heads
        call = AttentionShape(
            train.micro_batch_size, *local, self.config.data.seq_length, shape.head_dim, shape.value_head_dim,
            window=shape.window_size if shape.has_window(layer) else None,
        )  # fmt: skip
        lengths = shape.attention_lengths(layer, seq_length=call.length)
        calls = [
            call._replace(batch=call.batch * number, length=length) for number, length in lengths
        ]
        share = 1 if is_split else 1 / cp  # every rank has its part of the pairs
        forward, backward = (
            share * sum(seconds) for seconds in zip(*map(self._attention_s, calls), strict=True)
        )
        flops = sum(attention_work(call)[0] for call in calls) * share
        return Part("core_attn", forward, backward, launches=(1, 3, 0), flops=flops)

    def _attention_s(self, call: AttentionShape) -> tuple[float, float]:
        """Seconds of one call; forward and backward."""
        if self.config.train.attention_backend in ("unfused", "local"):
            return self._math_attention(call)
        dtype = self.dtype if self.dtype in ("bf16", "fp16") else "bf16"
        times = (attention_s(self.gpu, call, dtype=dtype, backward=each) for each in (False, True))
        forward, backward = (self.engine.operators.attention_factor * seconds for seconds in times)
        return forward, backward * (
            CPU_LOW_BACKWARD if self.gpu.is_cpu and self.itemsize == 2 else 1.0
        )

    def _math_attention(self, call: AttentionShape) -> tuple[float, float]:
        """Attention that writes its scores out; forward and backward."""
        batch = call.batch * call.heads
        shapes = (
            (call.length, call.length, call.head_dim),
            (call.length, call.head_dim, call.length),
        )
        product = sum(matmul_s(self.gpu, shape, dtype=self.dtype, num=batch) for shape in shapes)
        scores = batch * call.length**2
        if call.head_dim * self.itemsize % 16:
            product = max(
                product,
                4.0 * scores * call.head_dim / (UNALIGNED_SHARE * self.gpu.peak(self.dtype)),
            )
        forward, backward = (memory_s(self.gpu, num_bytes * scores) for num_bytes in MATH_BYTES)
        return product + forward, 2 * product + backward

    def mlp(self, name: str, inner: int) -> Parts:
        """A dense MLP, or a shared expert."""
        local, hidden = inner // self.tp, self.shape.hidden_size
        outputs = local * (1 + self.shape.is_gated)
        return [
            *self.linear(name, (self.tokens, outputs, hidden), mode="column"),
            self.activation(name, self.tokens * local),
            *self.linear(name, (self.tokens, hidden, local), mode="row"),
        ]

    def activation(self, name: str, numel: int) -> Part:
        """The activation function, by what it reads and writes of tensors of the inner width."""
        fused, gated = self.engine.operators.fused, self.shape.is_gated
        forward, backward = (
            ((3, 5) if fused else (5, 11)) if gated else ((2, 3) if fused else (4, 5))
        )
        num_bytes = numel * self.itemsize
        launches = (1, 1) if fused else (2, 4) if gated else (2, 2)
        return self.memory(
            name, forward * num_bytes, backward=backward * num_bytes, launches=launches
        )

    def experts(self) -> Parts:
        """Router, dispatch, experts, combine, and a shared expert."""
        shape, moe = self.shape, self.shape.moe
        assert moe is not None, "a dense model has no experts"
        hidden, inner = shape.expert_input_size, shape.moe_ffn_size // self.etp
        tokens = self.tokens // self.tp
        pairs = int(tokens * moe.mean_topk * self.scenario.imbalance)
        rows = int(pairs * self.scenario.padding)
        router = tokens * moe.num_choices * ROUTER_BYTES + tokens * self.width
        part = self.memory(
            "moe", router, backward=2 * router, launches=(ROUTER_LAUNCHES, ROUTER_LAUNCHES)
        )
        width = moe.shared_expert_intermediate_size
        shared = [] if width is None else self.mlp("moe", width)
        parts = [self.paced(part, is_graphed=self.scenario.cuda_graphs)]
        parts.append(self._beside(self.dispatch(rows, tokens), shared))
        num_local, received = moe.num_experts // self.ep, pairs * self.etp
        if moe.latent_size is not None:  # both projections
            parts += self.linear("moe", (tokens, 2 * hidden, shape.hidden_size))
        parts += self.linear(
            "moe", (received, inner * (1 + shape.is_gated), hidden), num_experts=num_local
        )
        parts.append(self.activation("moe_act", rows * self.etp * inner))
        parts += self.linear("moe", (received, hidden, inner), num_experts=num_local)
        return [*parts, self.dispatch(rows, tokens), *shared]

    def _beside(self, dispatch: Part, shared: Parts) -> Part:
        """A dispatch of tokens, and of their gradients, that the shared expert hides a part of."""
        if not self.engine.overlap.shared_expert:
            return dispatch
        share = self.engine.operators.time_factor * (1 - self.engine.overlap.contention)
        forward, backward = (
            share * sum(times) for times in ((p.forward for p in shared), (p.dgrad for p in shared))
        )
        return replace(
            dispatch,
            before=max(0.0, dispatch.before - forward),
            last=max(0.0, dispatch.last - backward),
        )

    def dispatch(self, pairs: int, tokens: int) -> Part:
        """Tokens to their experts, or back: a permutation, and an all-to-all over ep with a gather
        over etp.
        """
        is_flex, sent = self.scenario.dispatcher in ("flex", "hierarchical"), pairs * self.width
        moved = (pairs + tokens) * self.width * (1 if self.scenario.dispatcher == "flex" else 2)
        part = self.paced(self.memory("moe", moved, backward=moved, launches=(4, 4)))
        num_nodes = self.ep * self.etp // self.gpu.gpus_per_node
        if self.scenario.dispatcher == "allgather":
            time = self.collective("ep", "all_gather", num_bytes=tokens * self.ep * self.width)
        else:
            targets = num_nodes if is_flex and num_nodes > 1 else self.ep
            time = self.collective(
                "ep", "all_to_all", num_bytes=sent * self._distinct(targets) if is_flex else sent
            )
            # a token goes to a node once, and on to its ranks while others arrive
            if is_flex and num_nodes > 1:
                node, num_bytes = range(self.gpu.gpus_per_node), sent * self._distinct(self.ep)
                time = max(
                    time, collective_s(self.gpu, "all_to_all", num_bytes=num_bytes, ranks=node)
                )
        time += self.collective("etp", "all_gather", num_bytes=pairs * self.etp * self.width)
        return replace(part, group="ep", before=time, last=time)

    def _distinct(self, num_targets: int) -> float:
        """Share of the copies of a token that have different targets, of equally likely ones."""
        assert (moe := self.shape.moe) is not None, "a dense model has no experts"
        groups, chosen = moe.router_num_groups or 1, moe.router_group_topk or 1
        reached = float(num_targets)
        if chosen < groups and groups % num_targets == 0:  # whole groups of experts per target
            reached *= 1 - comb(groups - groups // num_targets, chosen) / comb(groups, chosen)
        return reached * (1 - (1 - 1 / reached) ** moe.router_topk) / moe.router_topk

    def linear(
        self, name: str, shape: tuple[int, int, int], *, mode: str = "", num_experts: int = 0
    ) -> Parts:
        """A linear layer, or one of every expert.

        Args:
            name: name of the module.
            shape: tokens, of all experts, local outputs and inputs.
            mode: column or row, its parallelism over tp; empty for neither.
            num_experts: experts of the rank, whose products are one operator; 0 for a dense layer.
        """
        tokens, outputs, inputs = shape
        dtype = self.dtype if name == "head" else self.scenario.matmul_dtype
        fused = self.engine.operators.accumulation == "fused"
        if num_experts:
            product = partial(grouped_matmul_s, self.gpu, num_experts=num_experts, dtype=dtype)
            wgrad = product(shape, accumulate=True)
        else:
            product = partial(matmul_s, self.gpu, dtype=dtype)
            wgrad = product((outputs, inputs, tokens), accumulate=fused)
        if (
            self.engine.operators.accumulation == "separate"
        ):  # an operator of its own adds to an fp32 buffer
            wgrad += memory_s(self.gpu, 10 * max(1, num_experts) * outputs * inputs)
        times = product(shape), product((tokens, inputs, outputs)), wgrad
        part = Part(
            name,
            *times,
            launches=(1, 1, 2 - fused),
            sizes=shape,
            flops=2.0 * tokens * outputs * inputs,
        )
        if mode and self.tp > 1:
            part = self._parallel(
                part, tokens * (inputs if mode == "column" else outputs) * self.itemsize, mode=mode
            )
        if dtype == self.dtype:
            return [part]
        read, written = (
            tokens * size * (self.itemsize + 2 * BYTES[dtype]) for size in (inputs, outputs)
        )
        # operands into fewer bits, in both layouts
        return [self.memory(name, read, backward=written), part]

    def _parallel(self, part: Part, num_bytes: float, *, mode: str) -> Part:
        """A product with the collectives of tensor parallelism."""
        part = replace(
            part,
            group="tp",
            hides=self.scenario.tp_overlap or self.engine.overlap.tp,
            pieces=self.tp,
        )
        if not self.sequence_parallel:
            reduce = self.collective("tp", "all_reduce", num_bytes=num_bytes)
            return replace(part, last=reduce) if mode == "column" else replace(part, after=reduce)
        gather, scatter = (
            self.collective("tp", each, num_bytes=num_bytes)
            for each in ("all_gather", "reduce_scatter")
        )
        if mode == "column":
            return replace(part, before=gather, again=gather, last=scatter)
        return replace(part, after=scatter, first=gather)

    def embedding(self) -> Parts:
        """Look-up of the tokens."""
        summed = (
            12 * self.columns * self.shape.hidden_size
            if self.engine.operators.accumulation == "separate"
            else 0
        )
        part = self.memory(
            "embedding",
            2 * self.tokens * self.width,
            backward=3 * self.tokens * self.width + summed,
        )
        if self.tp == 1:
            return [part]
        operations = ("reduce_scatter", "all_gather") if self.sequence_parallel else ("all_reduce",)
        times = [
            self.collective("tp", each, num_bytes=self.tokens * self.width) for each in operations
        ]
        return [replace(part, group="tp", after=times[0], first=sum(times[1:]))]

    def head(self) -> Parts:
        """The final norm, the output layer and the loss."""
        norm = self.memory(
            "final_norm", 2 * self.outside * self.width, backward=3 * self.outside * self.width
        )
        logits = self.tokens * self.columns
        forward = self.engine.operators.loss_forward_bytes * logits
        backward = self.engine.operators.loss_backward_bytes * logits
        loss = self.memory("loss", forward, backward=backward, launches=(8, 4))
        return [
            norm,
            *self.linear(
                "head", (self.tokens, self.columns, self.shape.hidden_size), mode="column"
            ),
            loss,
        ]

    def multi_token(self, layer: int) -> Parts:
        """A layer of multi-token prediction: norms, the joining projection, a block and the head
        again.
        """
        hidden = self.shape.hidden_size
        return [
            *self.linear("eh_proj", (self.outside, hidden, 2 * hidden)),
            *self.block(layer),
            *self.head(),
        ]
