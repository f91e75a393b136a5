"""MLPs: dense, and mixtures of experts."""

import math
from dataclasses import replace
from functools import partial

from nanotrain.spec.declaration import Declaration, Specs, grouped, nest, summed
from nanotrain.spec.params import Shard

# initial values of the weights of activations that have some (model/activations.py)
ACTIVATION_WEIGHTS = {
    "xielu": {"alpha_p": math.log(math.expm1(0.8)), "alpha_n": math.log(math.expm1(0.3))}
}


def mlp(declare: Declaration, inner: int) -> Specs:
    """Up and down projections, with a gate or weights where the activation has them."""
    values = ACTIVATION_WEIGHTS.get(declare.shape.activation, {})
    # every tp rank has them, and applies them to its channels
    weights = summed(
        [declare.vector(name, 1, value=value) for name, value in values.items()], ("tp",)
    )
    hidden, bias = declare.shape.hidden_size, declare.shape.has_linear_bias
    up = declare.column_linear(inner, hidden, bias=bias)
    gate = nest("gate", up) if declare.shape.is_gated else ()
    down = nest("down", declare.row_linear(hidden, inner, bias=bias))
    return (*gate, *nest("activation", weights), *nest("up", up), *down)


def moe(declare: Declaration) -> Specs:
    """A router, stacked experts, and where the model has them projections around these and a gated
    shared expert.
    """
    shape, moe_config = declare.shape, declare.shape.moe
    assert moe_config is not None, "a dense model has no experts"
    num_experts, hidden, inner = moe_config.num_experts, shape.hidden_size, shape.moe_ffn_size
    width = shape.expert_input_size
    bias = partial(declare.bias, exists=shape.has_linear_bias)
    # Each tp rank routes a sequence shard, with or without sequence parallelism.
    router = summed(
        [declare.weight(moe_config.num_choices, hidden), *bias(moe_config.num_choices)], ("tp",)
    )
    specs = nest("router", router)
    if moe_config.latent_size is not None:
        fc1 = [declare.linear_weight(width, hidden), *bias(width)]
        fc2 = [declare.linear_weight(hidden, width, std=declare.output_std), *bias(hidden)]
        specs += nest("fc1_latent_proj", summed(fc1, ("tp",))) + nest(
            "fc2_latent_proj", summed(fc2, ("tp",))
        )
    up = [declare.linear_weight(num_experts, inner, width), *bias(num_experts, inner)]
    ups = [replace(spec, shards=(Shard(0, "ep"), Shard(1, "etp")), is_expert=True) for spec in up]
    down = declare.linear_weight(num_experts, width, inner, std=declare.output_std)
    downs = [replace(down, shards=(Shard(0, "ep"), Shard(2, "etp")), is_expert=True)]
    # Every rank of etp has the bias after the experts, and its full gradient.
    downs += [
        replace(spec, shards=(Shard(0, "ep"),), is_expert=True) for spec in bias(num_experts, width)
    ]
    experts = (*nest("experts.up", ups), *nest("experts.down", downs))
    experts = (*nest("experts.gate", ups), *experts) if shape.is_gated else experts
    specs += grouped("experts", experts)
    if moe_config.shared_expert_intermediate_size is None:
        return specs
    specs += nest("shared", mlp(declare, moe_config.shared_expert_intermediate_size))
    if not moe_config.shared_expert_gate:
        return specs
    return specs + nest(
        "shared_gate", summed([declare.weight(1, shape.hidden_size)], declare.sequence_axes)
    )
