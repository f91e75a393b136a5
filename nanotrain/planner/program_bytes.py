"""Bytes that other programs keep of a microbatch: transforms of the list of operators.

    ProgramBytes       the operators of a stage as Megatron-LM, FSDP2 or nanotron run them
    peak_of_backward   what operators keep, and what their backward needs beyond that

Each operator keeps tensors from its forward to its backward and needs gradients and temporaries
while its backward runs. These programs fuse activations, keep inputs in 8 bits, copy outputs, and
write scores out. Sources: the code of Megatron-LM (d98e8a64) with Transformer Engine and of
nanotron (2411b022), checked with the peaks that runs of both report.
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

from nanotrain.memory.block_transforms import recomputed_groups
from nanotrain.planner.hardware import BLACKWELL, HOPPER, read_data
from nanotrain.planner.rank_clock import scenario_sizes
from nanotrain.planner.scenario import Scenario
from nanotrain.spec.kinds.block import (
    block_operators,
    embedding_operators,
    head_operators,
    mtp_operators,
)
from nanotrain.spec.layer_sizes import FP32
from nanotrain.spec.operators import (
    Activation,
    Attention,
    Dispatch,
    ExpertProduct,
    Lookup,
    Loss,
    Norm,
    Operator,
    Product,
    Residual,
    Rotary,
    Router,
)
from nanotrain.spec.stages import StageSpec


class WeightShape(NamedTuple):
    """Sizes of a weight on one rank."""

    outputs: int
    inputs: int


class OperatorBytes(NamedTuple):
    """Bytes of one operator."""

    saved: int  # kept from its forward to its backward
    working: int = 0  # gradients and temporaries during its backward
    weights: tuple[WeightShape, ...] = ()  # weights whose gradients it computes


class StagePeak(NamedTuple):
    """Bytes of a microbatch on a stage."""

    kept: int  # from its forward to its backward
    further: int  # additionally while the backward is at its peak; the kept bytes count in full
    weights: frozenset[WeightShape]  # weights of its linear layers


class ProgramBytes:
    """The bytes of the operators of one scenario.

    Args:
        scenario: configuration, machine and engine.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.engine = scenario.engine
        self.model = scenario.config.model
        self.sizes = scenario_sizes(scenario)
        self.modules = frozenset(scenario.config.memory.recomputed_modules)
        sizes = self.sizes
        # size of the kept input of a linear layer, relative to the dtype of the activations
        self.input_factor = read_data("dtypes")["saved"].get(scenario.matmul_dtype, 1.0)
        self.hidden = sizes.outside * sizes.width
        self.inside = sizes.tokens * sizes.width
        # a backward gathers its input again
        self.gathered = self.inside if sizes.outside < sizes.tokens else 0
        num_statistics = 2 if sizes.shape.normalization == "LayerNorm" else 1
        self.statistics = sizes.outside * FP32 * num_statistics
        self.is_megatron = self.engine.name == "megatron"
        fusion = scenario.config.parallel.gradient_accumulation_fusion
        # matrix products add the gradients of weights to the buffer of gradients
        self.fuses_wgrads = self.is_megatron and fusion is None
        backend = scenario.config.train.attention_backend
        is_local = "local layers" in scenario.features
        self.writes_scores = is_local or backend in ("unfused", "local")
        self.copies_output = self._copies_output()

    def _copies_output(self) -> bool:
        """Whether attention keeps its output in another layout than the projection after it.

        Flash attention does. Kernels of cuDNN have the layout of Megatron-LM: on Hopper always, on
        Blackwell unless deterministic.
        """
        train = self.scenario.config.train
        gpu = self.scenario.gpu
        is_hopper = gpu.capability is not None and HOPPER <= gpu.capability < BLACKWELL
        lacks_cudnn = gpu.is_before_hopper or (train.deterministic_mode and not is_hopper)
        is_flash = train.attention_backend == "flash" or lacks_cudnn
        return self.is_megatron and is_flash and train.micro_batch_size > 1

    def stage(self, spec: StageSpec) -> StagePeak:
        """A stage with the recomputation of the configuration."""
        listed: list[OperatorBytes] = []
        if spec.has_embedding:
            listed += self.transform(embedding_operators(self.sizes))
        blocks = [self.block(layer) for layer in spec.layers]
        memory = self.scenario.config.memory
        if memory.recompute_granularity == "full":
            blocks = self._recomputed_blocks(blocks)
        for index, block in enumerate(blocks):
            is_offloaded = index < memory.cpu_offloading_num_layers
            listed += _offloaded_block(block) if is_offloaded else block
        if spec.has_head:
            listed += self.transform(head_operators(self.sizes))
            for layer in self.sizes.shape.mtp_predictions:
                listed += self.transform(mtp_operators(self.sizes, layer))
        return self.peak_of_backward(listed)

    def block(self, layer: int) -> list[OperatorBytes]:
        """A transformer block, by its index in the model."""
        listed = self.transform(block_operators(self.sizes, layer))
        factor = self.engine.memory.saved_factor
        return [entry._replace(saved=int(entry.saved * factor)) for entry in listed]

    def _recomputed_blocks(self, blocks: list[list[OperatorBytes]]) -> list[list[OperatorBytes]]:
        """Groups of blocks that keep their input, and the blocks after them."""
        groups = recomputed_groups(self.scenario.config, len(blocks))
        joined = []
        for group in groups:
            joined.append([self.recomputed(entry for index in group for entry in blocks[index])])
        num_grouped = sum(map(len, groups))
        return [*joined, *blocks[num_grouped:]]

    def recomputed(self, listed: Iterable[OperatorBytes]) -> OperatorBytes:
        """Recomputed operators as one entry, which saves only the hidden states they read."""
        peak = self.peak_of_backward(listed)
        return OperatorBytes(self.hidden, peak.kept + peak.further - self.hidden)

    def transform(self, operators: Sequence[Operator]) -> list[OperatorBytes]:
        """The bytes of operators as this program runs them; a recomputed MLP is one entry."""
        listed: list[OperatorBytes] = []
        recomputed: list[OperatorBytes] = []
        previous: Operator | None = None
        for operator in operators:
            entry = self._transform(operator, previous)
            previous = operator
            if self._is_recomputed(operator):
                recomputed.append(entry)
                continue
            if recomputed:
                listed.append(self.recomputed(recomputed))
                recomputed = []
            listed.append(entry)
        return listed

    def _is_recomputed(self, operator: Operator) -> bool:
        """Whether an operator is in an MLP, dense or with experts, that is recomputed."""
        if operator.module == "mlp":
            return "mlp" in self.modules
        return operator.module.startswith("moe") and "moe" in self.modules

    def _transform(self, operator: Operator, previous: Operator | None) -> OperatorBytes:
        """The bytes of one operator."""
        transform = TRANSFORMS.get(type(operator))
        if transform is not None:
            entry = transform(self, operator)
        else:  # as in nanotrain
            entry = OperatorBytes(operator.saved_bytes(self.modules), operator.working)
        if type(previous) is Attention and isinstance(operator, Product):
            # the projection keeps the output of attention, in 8 bits where it multiplies in them
            output = operator.rows * operator.inputs * self.sizes.itemsize
            entry = entry._replace(saved=int(output * self.input_factor))
        return entry

    def norm(self, operator: Norm) -> OperatorBytes:
        """Inputs and statistics, and gradients of input and output."""
        num_bytes = operator.numel * self.sizes.itemsize
        if operator.name in ("layernorm", "final_norm", "mtp_norm") and num_bytes == self.hidden:
            return OperatorBytes(self.hidden + self.statistics, 2 * self.hidden)
        if operator.name == "qk_norm":
            return OperatorBytes(num_bytes if self.is_megatron else 0)
        return OperatorBytes(operator.saved_bytes(self.modules), 2 * num_bytes)

    def rotary(self, operator: Rotary) -> OperatorBytes:
        """Rotary positions keep nothing."""
        return OperatorBytes(0)

    def residual(self, operator: Residual) -> OperatorBytes:
        """The mask of the dropout before the addition."""
        mask = self._dropout_mask(self.model.hidden_dropout, self.hidden)
        return OperatorBytes(mask, 2 * self.hidden)

    def lookup(self, operator: Lookup) -> OperatorBytes:
        """The mask of the dropout of embeddings."""
        mask = self._dropout_mask(self.model.hidden_dropout, self.hidden)
        return OperatorBytes(mask, self.hidden)

    def _dropout_mask(self, p: float, num_bytes: int) -> int:
        """Mask of a dropout, a byte per element."""
        return num_bytes // self.sizes.itemsize if p > 0 else 0

    def product(self, operator: Product) -> OperatorBytes:
        """A linear layer: its input, and gradients of output, input and unfused weight."""
        itemsize = self.sizes.itemsize
        saved = operator.saved_bytes(self.modules)
        if operator.name == "head":
            # the gradient of the weight is a tensor of its own even where it is written to the
            # buffer of gradients
            logits = operator.rows * operator.outputs * itemsize
            weight = operator.outputs * operator.inputs * itemsize
            return OperatorBytes(self.hidden, logits + 2 * self.inside + weight)
        if operator.module == "mla_up_proj":
            return OperatorBytes(saved, 2 * operator.rows * operator.outputs * itemsize)
        width = operator.inputs + operator.outputs
        working = operator.rows * width * itemsize + self.hidden + self.gathered
        weight_shape = WeightShape(operator.outputs, operator.inputs)
        return OperatorBytes(int(saved * self.input_factor), working, (weight_shape,))

    def activation(self, operator: Activation) -> OperatorBytes:
        """Inputs of the activation, and the activated gate where it is not fused."""
        unit = operator.numel * self.sizes.itemsize
        num_inputs = 2 if operator.is_gated else 1
        if operator.module == "moe_act":
            return OperatorBytes(num_inputs * unit, (num_inputs + 1) * unit)
        if operator.is_gated and not self.is_megatron:
            num_inputs += 1
        return OperatorBytes(num_inputs * unit, (num_inputs + 1) * unit + self.hidden)

    def router(self, operator: Router) -> OperatorBytes:
        """Scores in fp32 with a mask, and the input."""
        scores = operator.rows * operator.num_choices * (3 * FP32 + 1)
        layer_input = 0 if "layernorm" in self.modules else self.hidden
        return OperatorBytes(layer_input + scores, 2 * self.hidden)

    def expert_product(self, operator: ExpertProduct) -> OperatorBytes:
        """Permuted tokens, or the inner activations with the probabilities of the router."""
        sizes = self.sizes
        rows = sizes.expert_rows * sizes.etp
        read = rows * operator.inputs * sizes.itemsize
        written = rows * operator.outputs * sizes.itemsize
        weight_shape = WeightShape(operator.outputs, operator.inputs)
        if operator.name != "experts.down":
            saved = int(read * self.input_factor)
            return OperatorBytes(saved, 2 * read + written, (weight_shape,))
        saved = 0 if "moe_act" in self.modules else int(read * self.input_factor)
        if not sizes.shape.is_gated:  # the kernel of SwiGLU multiplies by the probabilities too
            saved += read
        return OperatorBytes(saved, read + written, (weight_shape,))

    def dispatch(self, operator: Dispatch) -> OperatorBytes:
        """Saves nothing; the combination holds two tensors of all rows, such as their gradients."""
        if operator.name == "dispatch":
            return OperatorBytes(0)
        width = self.sizes.shape.expert_input_size * self.sizes.itemsize
        return OperatorBytes(0, 2 * operator.rows * self.sizes.etp * width)

    def attention(self, operator: Attention) -> OperatorBytes:
        """Query, key and value with the log-sum-exp of flash attention, or the scores."""
        sizes = self.sizes
        row = sizes.tokens * sizes.itemsize
        inputs = row * self._input_width(operator)
        output = row * operator.heads * operator.value_head_dim
        statistics = sizes.tokens * operator.heads * FP32
        is_recomputed = "core_attn" in self.modules
        if self.writes_scores:
            scores = row * operator.heads * sizes.seq_length
            kept = self._kept_scores(scores)
            if is_recomputed:
                return OperatorBytes(inputs, inputs + kept + scores)
            return OperatorBytes(inputs + kept, 2 * scores + output)
        if is_recomputed:
            return OperatorBytes(inputs, inputs + 2 * output + statistics)
        saved = inputs + statistics
        if sizes.cp > 1:  # the output in the layout of the kernel too
            saved += output
        if self.copies_output:
            saved += output
        if self.input_factor < 1:  # the projection after it keeps 8 bits
            saved += output
        return OperatorBytes(saved, inputs + 2 * output)

    def _input_width(self, operator: Attention) -> int:
        """Channels of query, key and value that attention keeps of a token."""
        mla = self.sizes.shape.mla
        if mla is not None and "mla_up_proj" in self.modules:
            return 0
        width = operator.heads * operator.head_dim
        width += operator.kv_heads * (operator.head_dim + operator.value_head_dim)
        if mla is not None:  # values are views of what the up-projection returns
            width += operator.heads * mla.qk_head_dim
        return width

    def _kept_scores(self, scores: int) -> int:
        """Saved bytes of softmax scores: twice if unfused, and dropped scores with a mask."""
        kept = scores
        if "unfused softmax" in self.scenario.features:
            kept += scores
        p = self.model.attention_dropout
        if p > 0:
            kept += scores + self._dropout_mask(p, scores)
        return kept

    def loss(self, operator: Loss) -> OperatorBytes:
        """Logits, over which a fused loss writes the gradient, or the softmax in fp32."""
        logits = operator.rows * operator.columns
        features = self.scenario.features
        if "fused loss" in features:
            return OperatorBytes(logits * self.sizes.itemsize)
        per_logit = self.sizes.itemsize
        if self.engine.memory.keeps_low_precision_grads:
            per_logit += 2 * FP32
        if "compiled loss" in features:  # a compiled loss is not in place
            per_logit += FP32
        return OperatorBytes(logits * FP32, logits * per_logit)

    def peak_of_backward(self, listed: Iterable[OperatorBytes]) -> StagePeak:
        """Bytes that operators keep, and the additional bytes at the peak of their backward."""
        entries = list(listed)
        kept = sum(entry.saved for entry in entries)
        weights = frozenset(weight for entry in entries for weight in entry.weights)
        still_saved = kept
        further = 0
        for entry in reversed(entries):
            wgrads = 0
            if not self.fuses_wgrads:
                wgrads = sum(map(prod, entry.weights)) * self.sizes.itemsize
            further = max(further, still_saved - kept + entry.working + wgrads)
            still_saved -= entry.saved
        return StagePeak(kept, further, weights)


def _offloaded_block(block: list[OperatorBytes]) -> list[OperatorBytes]:
    """A block whose saved bytes are in host memory until its backward."""
    return [entry._replace(saved=0, working=entry.working + entry.saved) for entry in block]


TRANSFORMS: dict[type[Operator], Callable[[ProgramBytes, Any], OperatorBytes]] = {
    Norm: ProgramBytes.norm,
    Rotary: ProgramBytes.rotary,
    Residual: ProgramBytes.residual,
    Lookup: ProgramBytes.lookup,
    Product: ProgramBytes.product,
    ExpertProduct: ProgramBytes.expert_product,
    Activation: ProgramBytes.activation,
    Router: ProgramBytes.router,
    Dispatch: ProgramBytes.dispatch,
    Attention: ProgramBytes.attention,
    Loss: ProgramBytes.loss,
}
