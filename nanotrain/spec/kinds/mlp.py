"""MLPs, dense and mixtures of experts: parameters and operators.

mlp, dense_operators     up, gate and down projections; model/mlp.py
moe, moe_operators       router, experts, shared expert; model/moe.py
router_bytes             buffers of a router; model/router.py
"""

import math
from dataclasses import replace

from nanotrain.config.model import ModelConfig, MoEConfig
from nanotrain.spec.declaration import Declaration, Specs, grouped, nest, norm, summed
from nanotrain.spec.layer_sizes import FP8, FP32, FP64, INT32, INT64, LayerSizes
from nanotrain.spec.operators import (
    POINTWISE,
    Activation,
    Dispatch,
    ExpertProduct,
    Gate,
    Norm,
    Operators,
    Product,
    Router,
    Saved,
)
from nanotrain.spec.params import Shard
from nanotrain.spec.shape import ModelShape

# initial values of the weights of activations that have some (model/activations.py)
ACTIVATION_WEIGHTS = {
    "xielu": {"alpha_p": math.log(math.expm1(0.8)), "alpha_n": math.log(math.expm1(0.3))}
}
NUM_SUMS = 5  # fp64 statistics of a router that are not per expert
ROUTER_TENSORS = 5  # fp32 [tokens, experts]: logits, scores and the probabilities of the losses


def dense(declare: Declaration) -> Specs:
    """A dense MLP."""
    return mlp(declare, declare.shape.ffn_size)


def mlp(declare: Declaration, inner: int) -> Specs:
    """Up and down projections, with a gate or weights where the activation has them."""
    shape = declare.shape
    hidden = shape.hidden_size
    has_bias = shape.has_mlp_bias
    up = declare.column_linear(inner, hidden, bias=has_bias)
    specs: Specs = ()
    if shape.is_gated:
        specs += nest("gate", up)
    for name, value in ACTIVATION_WEIGHTS.get(shape.activation, {}).items():
        # every tp rank has them, and applies them to its channels
        weight = summed([declare.vector(name, 1, value=value)], ("tp",))
        specs += nest("activation", weight)
    specs += nest("up", up)
    return specs + nest("down", declare.row_linear(hidden, inner, bias=has_bias))


def moe(declare: Declaration) -> Specs:
    """A router, stacked experts, and where the model has them latent projections and a shared
    expert.
    """
    shape = declare.shape
    config = _moe_config(shape)
    has_bias = shape.has_linear_bias
    router = [declare.weight(config.num_choices, shape.hidden_size)]
    router += declare.bias(config.num_choices, exists=has_bias)
    if config.separate_norms:
        router.append(declare.vector("scale", shape.hidden_size, value=1.0))
        router.append(declare.vector("expert_scale", config.num_choices, value=1.0))
    # Each tp rank routes a sequence shard, with or without sequence parallelism.
    specs = nest("router", summed(router, ("tp",)))
    if config.latent_size is not None:
        specs += _latent_projections(declare)
    specs += grouped("experts", _experts(declare, config.num_experts))
    if config.shared_expert_intermediate_size is not None:
        specs += nest("shared", mlp(declare, config.shared_expert_intermediate_size))
        if config.shared_expert_gate:
            gate = [declare.weight(1, shape.hidden_size)]
            specs += nest("shared_gate", summed(gate, declare.sequence_axes))
    if config.separate_norms:
        specs += _separate_norms(declare)
    if config.output_norm:
        specs += nest("post_norm", norm(declare, shape.hidden_size))
    return specs


def _separate_norms(declare: Declaration) -> Specs:
    """Norms of the inputs and outputs of the shared expert and of the routed experts."""
    own = norm(declare, declare.shape.hidden_size)
    specs = nest("shared_norm", own)
    specs += nest("shared_post_norm", own)
    # each tp rank routes a slice of the sequence
    specs += nest("input_norm", summed(own, ("tp",)))
    return specs + nest("output_norm", own)


def _moe_config(shape: ModelShape) -> MoEConfig:
    assert shape.moe is not None, "a dense model has no experts"
    return shape.moe


def _latent_projections(declare: Declaration) -> Specs:
    """Projections into the width of the experts and out of it."""
    shape = declare.shape
    width = shape.expert_input_size
    hidden = shape.hidden_size
    has_bias = shape.has_linear_bias
    fc1 = [declare.linear_weight(width, hidden)]
    fc1 += declare.bias(width, exists=has_bias)
    fc2 = [declare.linear_weight(hidden, width, std=declare.output_std)]
    fc2 += declare.bias(hidden, exists=has_bias)
    projections = nest("fc1_latent_proj", summed(fc1, ("tp",)))
    return projections + nest("fc2_latent_proj", summed(fc2, ("tp",)))


def _experts(declare: Declaration, num_experts: int) -> Specs:
    """Gate, up and down projections of all experts, which ep shards."""
    shape = declare.shape
    inner = shape.moe_ffn_size
    width = shape.expert_input_size
    has_bias = shape.has_linear_bias
    up = [declare.linear_weight(num_experts, inner, width)]
    up += declare.bias(num_experts, inner, exists=has_bias)
    ups = [replace(spec, shards=(Shard(0, "ep"), Shard(1, "etp")), is_expert=True) for spec in up]
    down = declare.linear_weight(num_experts, width, inner, std=declare.output_std)
    downs = [replace(down, shards=(Shard(0, "ep"), Shard(2, "etp")), is_expert=True)]
    # Every rank of etp has the bias after the experts, and its full gradient.
    for bias in declare.bias(num_experts, width, exists=has_bias):
        downs.append(replace(bias, shards=(Shard(0, "ep"),), is_expert=True))
    specs: Specs = ()
    if shape.is_gated:
        specs += nest("experts.gate", ups)
    return specs + nest("experts.up", ups) + nest("experts.down", downs)


def dense_operators(s: LayerSizes) -> Operators:
    """A dense MLP, which `mlp` recomputes from its input."""
    up, *others = _mlp_operators(s, s.shape.ffn_size, module="mlp", saves=(s.projected_input,))
    assert isinstance(up, Product), "it comes first"
    return [replace(up, casts_norm=s.casts_norm), *others]


def _mlp_operators(
    s: LayerSizes, inner_size: int, *, module: str, saves: tuple[Saved, ...], prefix: str = ""
) -> Operators:
    """Up, activation and down.

    Args:
        s: sizes of the layer.
        inner_size: inner width over all tp ranks.
        module: the recompute module that drops what is inside.
        saves: what the up-projection keeps.
        prefix: of the names of the parameters.
    """
    shape = s.shape
    inner = inner_size // s.tp
    unit = s.tokens * inner * s.itemsize
    num_inputs = num_activation_inputs(shape)
    activation_inputs = Saved(num_inputs * unit, dropped_by=(module,))
    # tensors inside of the activation, and its output
    num_recomputed = num_inner_tensors(shape) - num_inputs
    recomputed = Saved((num_recomputed - 1) * unit, dropped_by=(module, POINTWISE))
    down_input = Saved(unit, dropped_by=(module, POINTWISE))
    if s.casts_swiglu:
        down_input = replace(down_input, num_bytes=s.fp8_bytes(s.tokens, inner))
    up_weights = _up_weights(prefix, is_gated=shape.is_gated)
    up = Product(
        name=f"{prefix}up",
        module=module,
        weights=up_weights,
        rows=s.tokens,
        outputs=len(up_weights) * inner,
        inputs=shape.hidden_size,
        shard="column",
        saves=saves,
    )
    activation = Activation(
        name=f"{prefix}activation",
        module=module,
        recomputed_by=(POINTWISE,),
        rows=s.tokens,
        width=inner,
        is_gated=shape.is_gated,
        is_cast=s.casts_swiglu,
        saves=(activation_inputs, recomputed),
        working=_mlp_temporaries(s, inner_bytes=_dense_inner_bytes(s)),
    )
    down = Product(
        name=f"{prefix}down",
        module=module,
        weights=(f"{prefix}down.weight",),
        rows=s.tokens,
        outputs=shape.hidden_size,
        inputs=inner,
        shard="row",
        saves=(down_input,),
    )
    return [up, activation, down]


def _up_weights(prefix: str, *, is_gated: bool) -> tuple[str, ...]:
    """The names of the weights that multiply the input of an MLP."""
    up = f"{prefix}up.weight"
    return (up, f"{prefix}gate.weight") if is_gated else (up,)


def num_activation_inputs(shape: ModelShape) -> int:
    """Tensors of the inner width that the activation of an MLP reads."""
    return 2 if shape.is_gated else 1


def num_inner_tensors(shape: ModelShape) -> int:
    """Tensors of the inner width that an MLP keeps, the input of the down-projection included."""
    if not shape.is_gated:
        return 2
    num_tensors = 3  # gate, up and their product
    if shape.activation != "swiglu" or shape.glu_linear_offset:
        num_tensors += 1  # the activated gate
    if shape.activation_func_clamp_value is not None:
        num_tensors += 2  # inputs of both clamps
    return num_tensors


def _mlp_temporaries(s: LayerSizes, *, inner_bytes: int) -> int:
    """Gradients of hidden states and of tensors of the inner width."""
    hidden = s.tokens * s.width
    if s.device == "cpu":
        return 3 * (inner_bytes + hidden) + _fp8_temporaries(s)
    # Gradients of gate and up; with a saved activation also one of the product, which is freed.
    num_inner = 1
    if s.shape.is_gated:
        num_inner = 3 if num_inner_tensors(s.shape) > 3 else 2
    return num_inner * inner_bytes + 2 * hidden + _fp8_temporaries(s)


def _dense_inner_bytes(s: LayerSizes) -> int:
    """Bytes of a tensor of the inner width of a dense MLP."""
    return s.tokens * s.shape.ffn_size // s.tp * s.itemsize


def _fp8_temporaries(s: LayerSizes) -> int:
    """The largest operand of a product while it is quantized: two fp32 copies and the result."""
    if not s.has_fp8:
        return 0
    shape = s.shape
    widest = max(shape.hidden_size, shape.ffn_size // s.tp)
    if shape.moe is not None:
        widest = max(widest, shape.moe_ffn_size // s.etp)
    return max(s.tokens, shape.hidden_size) * widest * (2 * FP32 + FP8)


def moe_operators(s: LayerSizes) -> Operators:
    """Router, shared expert, dispatch, experts and combine."""
    config = _moe_config(s.shape)
    hidden = s.shape.hidden_size
    width = s.shape.expert_input_size
    has_shared = config.shared_expert_intermediate_size is not None
    is_compressed = config.latent_size is not None
    operators: Operators = []
    if config.separate_norms:
        operators += _norms_of_experts(s)
    operators.append(_router(s, has_shared=has_shared))
    if has_shared:
        operators += _shared_expert(s)
    if is_compressed:
        operators.append(_latent_product(s, "fc1_latent_proj", outputs=width, inputs=hidden))
    # the numbers of the rows of every expert; the rows of every token, their numbers and weights
    row_numbers = s.expert_rows * s.etp * 2 * INT64
    returned = s.expert_rows * (width * s.itemsize + 2 * INT64 + FP32)
    dispatch = _dispatch(s, "dispatch", num_bytes=row_numbers)
    permute_modules = _permute_modules(s)
    if permute_modules and (is_compressed or config.apply_probs_on_input):
        permuted = s.routed_tokens * width * s.itemsize  # of neither a norm nor the layer's input
        tokens = Saved(permuted, dropped_by=("moe",), only_with=POINTWISE)
        dispatch = replace(dispatch, saves=(*dispatch.saves, tokens))
    operators.append(replace(dispatch, recomputed_by=permute_modules))
    operators += _expert_operators(s)
    operators.append(_dispatch(s, "combine", num_bytes=returned))
    if is_compressed:
        kept = s.routed_tokens * width * s.itemsize
        if config.num_zero_experts > 0:  # which return the compressed tokens
            kept *= 2
        product = _latent_product(
            s, "fc2_latent_proj", outputs=hidden, inputs=width, num_bytes=kept
        )
        operators.append(product)
    if config.output_norm:
        operators.append(_output_norm(s))
    return operators


def _output_norm(s: LayerSizes) -> Norm:
    """The norm of the sum of routed experts and shared expert."""
    numel = s.outside * s.shape.hidden_size
    row_bytes = s.width + s.norm_extra(s.shape.hidden_size)
    saves = (Saved(s.outside * row_bytes, dropped_by=("moe",)),)
    return Norm(name="post_norm", module="moe", numel=numel, saves=saves)


def router_bytes(model_config: ModelConfig, layer: int) -> int:
    """Bytes of the buffers of the router of a layer with experts, by its index in the model.

    Statistics, and where the model has them biases, counts for quantile balancing and the experts
    of every token.
    """
    moe = model_config.moe
    assert moe is not None and model_config.vocab_size is not None, "a complete model with experts"
    num_bytes = moe.num_choices * (FP64 + FP32) + NUM_SUMS * FP64
    if model_config.router_kind(layer) == "hash":
        return num_bytes + model_config.vocab_size * moe.router_topk * FP32
    if moe.router_enable_expert_bias:
        num_bytes += moe.num_choices * FP32
    if moe.balances_quantiles:
        num_bytes += moe.num_choices * moe.router_qb_num_bins * INT32
    return num_bytes


def _norms_of_experts(s: LayerSizes) -> Operators:
    """Separate norms of the shared expert and of the routed experts, and the router's own."""
    hidden = s.shape.hidden_size
    stream = s.outside * s.width
    routed = s.routed_tokens * s.width
    inside = stream + 2 * stream  # inputs of the shared expert and of both norms of outputs
    inside += routed  # the input of the router before its vector
    is_converted = s.itemsize < FP32 and s.device == "cpu"
    is_sliced = s.tp > 1 and not s.sequence_parallel
    if is_sliced or not is_converted:  # after its vector, where the router keeps no copy in fp32
        inside += routed
    num_rows = 3 * s.outside + 2 * s.routed_tokens
    saves = (
        Saved(stream),
        Saved(inside + num_rows * FP32, dropped_by=("moe",)),
    )
    numel = num_rows * hidden
    return [Norm(name="expert_norms", module="moe", numel=numel, saves=saves, launches=5)]


def _permute_modules(s: LayerSizes) -> tuple[str, ...]:
    """Recompute modules that permute tokens again, which sends nothing on one rank."""
    return (POINTWISE,) if s.ep * s.etp == 1 else ()


def _router(s: LayerSizes, *, has_shared: bool) -> Router:
    """Scores in fp32 and the input, of which the router keeps a copy in some layouts."""
    config = _moe_config(s.shape)
    rows = s.routed_tokens
    hidden = s.shape.hidden_size
    is_converted = s.itemsize < FP32 and s.device == "cpu"  # a GPU multiplies 16 bits into fp32
    is_sliced = s.tp > 1 and not s.sequence_parallel
    is_separate = config.separate_norms  # the input is counted by its norm
    scores = rows * ROUTER_TENSORS * config.num_choices * FP32
    if is_converted:
        scores += config.num_choices * hidden * FP32
    if config.num_zero_experts > 0:  # the mask of their pairs, and the sum of their weights
        scores += rows * (config.router_topk + FP32)
    saves = [Saved(scores, dropped_by=("moe",))]
    if is_converted or is_sliced:
        copy = rows * hidden * (FP32 if is_converted else s.itemsize)
        saves.append(Saved(copy, dropped_by=("moe",)))
        if not has_shared:  # which keeps the input otherwise
            saves.append(replace(s.layer_input, only_with="moe"))
    elif not is_separate:
        saves.append(s.layer_input)
    return Router(
        name="router",
        module="moe",
        weights=("router.weight",),
        rows=rows,
        inputs=hidden,
        num_choices=config.num_choices,
        saves=tuple(saves),
    )


def _shared_expert(s: LayerSizes) -> Operators:
    """An MLP that all tokens use, and its gate."""
    config = _moe_config(s.shape)
    inner_size = config.shared_expert_intermediate_size
    assert inner_size is not None, "callers check it"
    router = _router(s, has_shared=True)
    is_kept = s.layer_input in router.saves or config.separate_norms
    saves = () if is_kept else (s.layer_input,)
    operators = _mlp_operators(s, inner_size, module="moe", saves=saves, prefix="shared.")
    if config.shared_expert_gate:
        # the output of the expert, and the gate
        gate_inputs = Saved(s.outside * (s.width + s.itemsize), dropped_by=("moe",))
        gate = Gate(
            name="shared_gate",
            module="moe",
            numel=s.outside * s.shape.hidden_size,
            weights=("shared_gate.weight",),
            inputs=s.shape.hidden_size,
            saves=(gate_inputs,),
        )
        operators.append(gate)
    return operators


def _latent_product(
    s: LayerSizes, name: str, *, outputs: int, inputs: int, num_bytes: int = 0
) -> Product:
    """A projection into the width of the experts or out of it, which saves `num_bytes`."""
    return Product(
        name=name,
        module="moe",
        weights=(f"{name}.weight",),
        rows=s.routed_tokens,
        outputs=outputs,
        inputs=inputs,
        saves=(Saved(num_bytes, dropped_by=("moe",)),),
    )


def _dispatch(s: LayerSizes, name: str, *, num_bytes: int) -> Dispatch:
    """Tokens to their experts, or back."""
    return Dispatch(
        name=name,
        module="moe",
        tokens=s.routed_tokens,
        rows=s.expert_rows,
        saves=(Saved(num_bytes, dropped_by=("moe",)),),
    )


def _expert_operators(s: LayerSizes) -> Operators:
    """Up, activation and down of the local experts, of all rows that reach them."""
    shape = s.shape
    width = shape.expert_input_size
    inner = shape.moe_ffn_size // s.etp
    rows = s.expert_rows * s.etp
    unit = rows * inner * s.itemsize
    num_kept = num_activation_inputs(shape)
    num_recomputed = num_inner_tensors(shape) - 1 - num_kept
    activation_inputs = Saved(num_kept * unit, dropped_by=("moe",))
    recomputed = Saved(num_recomputed * unit, dropped_by=("moe", "moe_act", POINTWISE))
    up_input = Saved(rows * width * s.itemsize, dropped_by=("moe", *_permute_modules(s)))
    down_input = Saved(unit, dropped_by=("moe", "moe_act", POINTWISE))
    up_weights = _up_weights("experts.", is_gated=shape.is_gated)
    up_size = len(up_weights) * inner
    up = _expert_product(s, up_weights, outputs=up_size, inputs=width, saves=up_input)
    activation = Activation(
        name="experts.activation",
        module="moe_act",
        recomputed_by=("moe", POINTWISE),
        rows=rows,
        width=inner,
        is_gated=shape.is_gated,
        saves=(activation_inputs, recomputed),
        working=_expert_temporaries(s),
    )
    down_weights = ("experts.down.weight",)
    down = _expert_product(s, down_weights, outputs=width, inputs=inner, saves=down_input)
    return [up, activation, down]


def _expert_product(
    s: LayerSizes, weights: tuple[str, ...], *, outputs: int, inputs: int, saves: Saved
) -> ExpertProduct:
    """One product per local expert."""
    config = _moe_config(s.shape)
    return ExpertProduct(
        name=weights[0].removesuffix(".weight"),
        module="moe",
        weights=weights,
        rows=s.routed_rows * s.etp,
        outputs=outputs,
        inputs=inputs,
        num_experts=config.num_experts // s.ep,
        topk=config.router_topk,
        num_choices=config.num_choices,
        saves=(saves,),
    )


def _expert_temporaries(s: LayerSizes) -> int:
    """Gradients inside an MLP, of expert rows, and of weights of grouped products."""
    shape = s.shape
    expert_bytes = s.expert_rows * shape.moe_ffn_size * s.itemsize
    working = _mlp_temporaries(s, inner_bytes=max(_dense_inner_bytes(s), expert_bytes))
    if s.device == "cpu":
        return working
    num_weights = (2 if shape.is_gated else 1) * _moe_config(shape).num_experts // s.ep
    weight_rows = num_weights * shape.moe_ffn_size // s.etp
    return working + (s.expert_rows + weight_rows) * s.width
