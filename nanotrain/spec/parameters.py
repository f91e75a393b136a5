"""Every parameter of a GPT, declared once: one function per layer, pure.

    declare_stage                               the parameters of a pipeline stage, in registration order
    block                                       norm, attention or mla, norm, mlp or moe
    mtp_layer                                   one layer of multi-token prediction
    norm, attention, mla, mlp, moe, embedding   the parameters of one layer, named relative to it
    Declaration                                 sizes, dtype and parallelism; declares the kinds of linear layers

Allocation, counting, FLOPs, buffer layouts, checkpoints, initialization and Hugging Face names read these declarations.

Weights are [outputs, inputs]. Over tp, column-parallel layers are sharded along their outputs and row-parallel layers
along their inputs; a bias follows the outputs. Experts are stacked along dim 0, which ep shards.

The gradient of a parameter is summed over tp if each tp rank computes it from its own tokens or heads only.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from nanotrain.spec.params import Constant, Normal, ParamSpec, Shard
from nanotrain.spec.shape import ModelShape
from nanotrain.spec.stages import StageSpec

Specs = tuple[ParamSpec, ...]


@dataclass(frozen=True)
class Declaration:
    """Sizes, dtype and parallelism that the parameters of a layer depend on."""

    shape: ModelShape  # of the model
    dtype: str  # "fp32", "bf16" or "fp16"
    tensor_parallel_size: int = 1  # ranks of tp; key and value heads are replicated where they are fewer
    sequence_parallel: bool = False  # replicated parameters are applied to a sequence shard per tp rank

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        """Axes that sum the gradients of parameters outside the tensor-parallel region."""
        return ("tp",) if self.sequence_parallel else ()

    @property
    def output_std(self) -> float:
        """Standard deviation of projections into the residual stream (Radford et al. 2019, section 2.3)."""
        return self.shape.init_std / math.sqrt(2 * self.shape.num_layers)

    def weight(self, *shape: int, std: float | None = None) -> ParamSpec:
        """A weight with normal initial values, decayed."""
        init = Normal(self.shape.init_std if std is None else std)
        return ParamSpec("weight", shape, dtype=self.dtype, init=init, weight_decay=True, needs_whole_matrix=True)

    def linear_weight(self, *shape: int, std: float | None = None) -> ParamSpec:
        """A weight of linear layers or experts, whose products may be in fp8."""
        return replace(self.weight(*shape, std=std), in_fp8=True)

    def vector(self, name: str, *shape: int, value: float = 0.0) -> ParamSpec:
        """A vector, or one per expert, with a constant initial value, not decayed."""
        return ParamSpec(name, shape, dtype=self.dtype, init=Constant(value), weight_decay=False)

    def bias(self, *shape: int, exists: bool) -> Specs:
        """A bias, if the layer has one."""
        return (self.vector("bias", *shape),) if exists else ()

    def column_linear(self, outputs: int, inputs: int, *, bias: bool = False) -> Specs:
        """A linear layer sharded along its outputs."""
        specs = (self.linear_weight(outputs, inputs), *self.bias(outputs, exists=bias))
        return tuple(replace(spec, shards=(Shard(0, "tp"),)) for spec in specs)

    def row_linear(self, outputs: int, inputs: int, *, bias: bool = False) -> Specs:
        """A projection into the residual stream, sharded along its inputs; its bias is added after the reduction."""
        weight = replace(self.linear_weight(outputs, inputs, std=self.output_std), shards=(Shard(1, "tp"),))
        return (weight, *_summed(self.bias(outputs, exists=bias), self.sequence_axes))

    def replicated_linear(self, outputs: int, inputs: int) -> Specs:
        """A linear layer that every tp rank holds and applies outside the tensor-parallel region."""
        return _summed([self.linear_weight(outputs, inputs)], self.sequence_axes)

    def vocab_parallel(self) -> ParamSpec:
        """A table with one row per token of the padded vocabulary: the word embedding or the head."""
        weight = self.weight(self.shape.padded_vocab_size, self.shape.hidden_size)
        weight = replace(weight, shards=(Shard(0, "tp"),), needs_whole_matrix=False, is_embedding_or_output=True)
        return replace(weight, is_shared=self.shape.num_mtp_layers > 0)


def declare_stage(declare: Declaration, stage: StageSpec) -> Specs:
    """Every parameter of a pipeline stage, in registration order.

    A word embedding that is tied, or read by multi-token prediction, is declared on the first and on the last stage.
    The final norm belongs to the unit of the head, which runs next.
    """
    shape = declare.shape
    units: dict[str, Specs] = {}
    if stage.has_embedding or (stage.has_head and shape.has_embedding_at_end):
        units["embedding"] = embedding(declare, has_positions=stage.has_embedding)
    blocks = {kind: block(declare, has_experts=kind) for kind in {*map(shape.has_experts, stage.layers)}}
    units |= {f"layers.{layer}": blocks[shape.has_experts(layer)] for layer in stage.layers}
    if stage.has_head:
        units["final_norm"] = norm(declare, shape.hidden_size)
    if stage.has_head and not shape.is_tied:
        units["head"] = _grouped("head", [declare.vocab_parallel()])
    if stage.has_head:
        units |= {f"mtp.{depth}": mtp_layer(declare, layer) for depth, layer in enumerate(shape.mtp_layers)}
    return tuple(
        replace(spec, name=f"{unit}.{spec.name}", unit="head" if unit == "final_norm" else unit, stage=stage.index)
        for unit, specs in units.items()
        for spec in specs
    )


def declare_model(shape: ModelShape, *, dtype: str = "fp32") -> Specs:
    """Every parameter of an unsharded model, in registration order."""
    return declare_stage(Declaration(shape, dtype), StageSpec.single(shape.num_layers))


def embedding(declare: Declaration, *, has_positions: bool) -> Specs:
    """The word embedding, and learned positions if the model has them and this is the first stage."""
    shape = declare.shape
    is_at_end = shape.has_embedding_at_end
    word = replace(declare.vocab_parallel(), is_shared=is_at_end)
    specs = _nest("word", [replace(word, grad_sum_axes=("embed",) if is_at_end else ())])
    if has_positions and shape.num_positions is not None:
        table = declare.weight(shape.num_positions, shape.hidden_size)
        table = replace(table, grad_sum_axes=declare.sequence_axes, needs_whole_matrix=False)
        specs += _nest("position", [table])
    return _grouped("embedding", specs)


def block(declare: Declaration, *, has_experts: bool) -> Specs:
    """One transformer block, with a dense MLP or with experts."""
    shape = declare.shape
    before, after = (
        (norm(declare, shape.hidden_size) if has else ()) for has in (shape.has_pre_norm, shape.has_post_norm)
    )
    return (
        *_nest("attention_norm", before),
        *_nest("attention", _grouped("attention", attention(declare) if shape.mla is None else mla(declare))),
        *_nest("attention_post_norm", after),
        *_nest("mlp_norm", before),
        *_nest("mlp", _grouped("mlp", moe(declare) if has_experts else mlp(declare, shape.ffn_size))),
        *_nest("mlp_post_norm", after),
    )


def mtp_layer(declare: Declaration, layer: int) -> Specs:
    """One layer of multi-token prediction, by its index after those of the model; embedding and head are the model's.

    Every tp rank has the projection, outside the tensor-parallel region, like MLA's down-projections.
    """
    size = declare.shape.hidden_size
    return (
        *_nest("enorm", norm(declare, size)),
        *_nest("hnorm", norm(declare, size)),
        *_nest("eh_proj", _grouped("mtp", declare.replicated_linear(size, 2 * size))),
        *_nest("block", block(declare, has_experts=declare.shape.has_experts(layer))),
        *_nest("final_norm", norm(declare, size)),
    )


def norm(declare: Declaration, size: int) -> Specs:
    """LayerNorm (weight and bias) or RMSNorm (weight), outside the tensor-parallel region."""
    weight = declare.vector("weight", size, value=declare.shape.norm_init)
    bias = declare.bias(size, exists=declare.shape.has_norm_bias)
    return _grouped("norms", _summed((weight, *bias), declare.sequence_axes))


def attention(declare: Declaration) -> Specs:
    """Multi-head attention with grouped key/value heads; several tp ranks may share a replicated head."""
    shape = declare.shape
    query_size, key_size = shape.num_heads * shape.head_dim, shape.query_groups * shape.head_dim
    key = declare.column_linear(key_size, shape.hidden_size, bias=shape.has_qkv_bias)
    if shape.replicates_kv_heads(declare.tensor_parallel_size):
        key = tuple(replace(spec, shards=(), grad_sum_axes=("tp",)) for spec in key)
    specs: Specs = ()
    if shape.has_sink:
        sink = declare.vector("softmax_offset", shape.num_heads)
        specs = (replace(sink, init=Normal(shape.init_std), shards=(Shard(0, "tp"),)),)
    specs += _nest("query", declare.column_linear(query_size, shape.hidden_size, bias=shape.has_qkv_bias))
    specs += _nest("key", key) + _nest("value", key)
    if shape.has_qk_norm:
        # of the kind of the other norms, as in Megatron-LM; applied to the heads of each tp rank
        per_head = _summed(norm(declare, shape.head_dim), ("tp",))
        specs += _nest("query_norm", per_head) + _nest("key_norm", per_head)
    if shape.has_wide_qk_norm:  # OLMo 2; each tp rank has all weights and uses those of its heads
        for name, size in (("query_norm", query_size), ("key_norm", key_size)):
            wide = _summed([declare.vector("weight", size, value=shape.norm_init)], ("tp",))
            specs += _grouped("norms", _nest(name, wide))
    return specs + _nest("output", declare.row_linear(shape.hidden_size, query_size, bias=shape.has_linear_bias))


def mla(declare: Declaration) -> Specs:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): replicated down-projections, sharded up-projections."""
    shape = declare.shape
    assert shape.mla is not None, "a model without latent attention declares `attention`"
    hidden, rank, compressed = shape.hidden_size, shape.mla.q_lora_rank, shape.mla.kv_lora_rank
    query_size = shape.num_heads * shape.head_dim
    if rank is None:
        specs = _nest("query", declare.column_linear(query_size, hidden))
    else:
        specs = _nest("query_down", declare.replicated_linear(rank, hidden))
        specs += _nest("query_latent_norm", norm(declare, rank))
        specs += _nest("query_up", declare.column_linear(query_size, rank))
    key_value_size = shape.num_heads * (shape.mla.qk_head_dim + shape.value_head_dim)
    return (
        *specs,
        *_nest("kv_down", declare.replicated_linear(compressed + shape.mla.qk_pos_emb_head_dim, hidden)),
        *_nest("kv_latent_norm", norm(declare, compressed)),
        *_nest("kv_up", declare.column_linear(key_value_size, compressed)),
        *_nest("output", declare.row_linear(hidden, shape.num_heads * shape.value_head_dim)),
    )


def mlp(declare: Declaration, inner: int) -> Specs:
    """Up and down projections, with a gate where the activation has one."""
    hidden, bias = declare.shape.hidden_size, declare.shape.has_linear_bias
    up = declare.column_linear(inner, hidden, bias=bias)
    gate = _nest("gate", up) if declare.shape.is_gated else ()
    return (*gate, *_nest("up", up), *_nest("down", declare.row_linear(hidden, inner, bias=bias)))


def moe(declare: Declaration) -> Specs:
    """A router, stacked experts, and a shared expert with its gate where the model has them."""
    shape, moe_config = declare.shape, declare.shape.moe
    assert moe_config is not None, "a dense model has no experts"
    num_experts, hidden, inner = moe_config.num_experts, shape.hidden_size, shape.moe_ffn_size
    bias = partial(declare.bias, exists=shape.has_linear_bias)
    # Each tp rank routes a sequence shard, with or without sequence parallelism.
    router = _summed([declare.weight(num_experts, hidden), *bias(num_experts)], ("tp",))
    up = [declare.linear_weight(num_experts, inner, hidden), *bias(num_experts, inner)]
    ups = [replace(spec, shards=(Shard(0, "ep"), Shard(1, "etp")), is_expert=True) for spec in up]
    down = declare.linear_weight(num_experts, hidden, inner, std=declare.output_std)
    downs = [replace(down, shards=(Shard(0, "ep"), Shard(2, "etp")), is_expert=True)]
    # Every rank of etp has the bias after the experts, and its full gradient.
    downs += [replace(spec, shards=(Shard(0, "ep"),), is_expert=True) for spec in bias(num_experts, hidden)]
    experts = (*_nest("experts.up", ups), *_nest("experts.down", downs))
    experts = (*_nest("experts.gate", ups), *experts) if shape.is_gated else experts
    specs = (*_nest("router", router), *_grouped("experts", experts))
    if moe_config.shared_expert_intermediate_size is None:
        return specs
    specs += _nest("shared", mlp(declare, moe_config.shared_expert_intermediate_size))
    if not moe_config.shared_expert_gate:
        return specs
    return specs + _nest("shared_gate", _summed([declare.weight(1, shape.hidden_size)], declare.sequence_axes))


def _nest(layer: str, specs: Iterable[ParamSpec]) -> Specs:
    """Prefix the names of a layer's parameters."""
    return tuple(replace(spec, name=f"{layer}.{spec.name}") for spec in specs)


def _grouped(group: str, specs: Iterable[ParamSpec]) -> Specs:
    """Set the group of those parameters that have none yet."""
    return tuple(replace(spec, group=spec.group or group) for spec in specs)


def _summed(specs: Iterable[ParamSpec], axes: tuple[str, ...]) -> Specs:
    """Sum the gradients over these axes."""
    return tuple(replace(spec, grad_sum_axes=axes) for spec in specs)
