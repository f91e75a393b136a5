"""What a kind of layer declares: its parameters and its operators; pure, without torch.

    Declaration             sizes, dtype and parallelism; declares the kinds of linear layers
    norm                    the parameters of a norm
    LayerKind               one row of the tables in spec/kinds
    nest, grouped, summed   names, groups and gradient axes of parameters

Weights are [outputs, inputs]. Over tp, column-parallel layers are sharded along their outputs and
row-parallel layers along their inputs; a bias follows the outputs. Experts are stacked along dim 0,
which ep shards.

The gradient of a parameter is summed over tp if each tp rank computes it from its own tokens or
heads only.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.operators import Operators
from nanotrain.spec.params import Constant, Normal, ParamSpec, Shard, Uniform
from nanotrain.spec.shape import ModelShape

Specs = tuple[ParamSpec, ...]
COLUMN_SHARDS = (Shard(0, "tp"),)  # shards outputs, heads or channels
ROW_SHARDS = (Shard(1, "tp"),)  # shards inputs


@dataclass(frozen=True)
class Declaration:
    """Sizes, dtype and parallelism that the parameters of a layer depend on."""

    shape: ModelShape  # of the model
    dtype: str  # "fp32", "bf16" or "fp16"
    # ranks of tp; key and value heads are replicated where they are fewer
    tensor_parallel_size: int = 1
    # replicated parameters are applied to a sequence shard per tp rank
    sequence_parallel: bool = False
    decays_qk_norm: bool = False  # weight decay applies to the norms of queries and keys
    decays_vectors: bool = False  # weight decay applies to biases, norms and other vectors

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        """Axes that sum the gradients of parameters outside the tensor-parallel region."""
        return ("tp",) if self.sequence_parallel else ()

    @property
    def output_std(self) -> float:
        """Standard deviation of projections into the residual stream (Radford et al. 2019, 2.3)."""
        num_blocks = 0
        for layer in range(self.shape.num_layers):
            num_blocks += len(self.shape.blocks(layer))
        return self.shape.init_std / math.sqrt(2 * num_blocks)

    def weight(self, *shape: int, std: float | None = None) -> ParamSpec:
        """A weight with normal initial values, decayed."""
        init = Normal(self.shape.init_std if std is None else std)
        return ParamSpec(
            "weight",
            shape,
            dtype=self.dtype,
            init=init,
            weight_decay=True,
            needs_whole_matrix=True,
            width_multiplier=self.shape.width_multiplier,
            follows_width=self.shape.width_multiplier != 1,
        )

    def linear_weight(self, *shape: int, std: float | None = None) -> ParamSpec:
        """A weight of linear layers or experts, whose products may be in fp8."""
        return replace(self.weight(*shape, std=std), in_fp8=True)

    def vector(self, name: str, *shape: int, value: float = 0.0) -> ParamSpec:
        """A vector, or one per expert, with a constant initial value, decayed if all are."""
        init = Constant(value)
        decays = self.decays_vectors
        return ParamSpec(
            name,
            shape,
            dtype=self.dtype,
            init=init,
            weight_decay=decays,
            width_multiplier=self.shape.width_multiplier,
        )

    def head_vector(self, name: str, size: int, *, init: Normal | Uniform | Constant) -> ParamSpec:
        """A vector that tp shards by heads, decayed if all are."""
        return replace(self.vector(name, size), init=init, shards=COLUMN_SHARDS)

    def bias(self, *shape: int, exists: bool) -> Specs:
        """A bias, if the layer has one."""
        return (self.vector("bias", *shape),) if exists else ()

    def column_linear(
        self, outputs: int, inputs: int, *, bias: bool = False, head_rows: tuple[int, ...] = ()
    ) -> Specs:
        """A linear layer sharded along its outputs; `head_rows` are the slices of one head."""
        weight = replace(self.linear_weight(outputs, inputs), head_rows=head_rows)
        specs = (weight, *self.bias(outputs, exists=bias))
        return tuple(replace(spec, shards=COLUMN_SHARDS) for spec in specs)

    def row_linear(self, outputs: int, inputs: int, *, bias: bool = False) -> Specs:
        """A projection into the residual stream, sharded along its inputs.

        Its bias is added after the reduction.
        """
        weight = self.linear_weight(outputs, inputs, std=self.output_std)
        weight = replace(weight, shards=ROW_SHARDS)
        return (weight, *summed(self.bias(outputs, exists=bias), self.sequence_axes))

    def replicated_linear(self, outputs: int, inputs: int) -> Specs:
        """A linear layer that every tp rank applies outside the tensor-parallel region."""
        return summed([self.linear_weight(outputs, inputs)], self.sequence_axes)

    def narrow_linear(self, outputs: int) -> Specs:
        """A projection to one number per head, too few for fp8."""
        weight = self.weight(outputs, self.shape.hidden_size)
        return (replace(weight, shards=COLUMN_SHARDS),)

    def convolution(self, channels: int, kernel: int, *, bias: bool = False) -> Specs:
        """A short convolution of each channel, [channels, kernel], sharded along the channels."""
        bound = kernel**-0.5
        init = Uniform(-bound, bound)
        weight = replace(self.weight(channels, kernel), needs_whole_matrix=False)
        specs = (weight, *self.bias(channels, exists=bias))
        return tuple(replace(spec, init=init, shards=COLUMN_SHARDS) for spec in specs)

    def vocab_parallel(self) -> ParamSpec:
        """The word embedding or the head: one row per token of the padded vocabulary."""
        shape = self.shape
        weight = self.weight(shape.padded_vocab_size, shape.hidden_size, std=shape.embedding_std)
        return replace(
            weight,
            shards=COLUMN_SHARDS,
            needs_whole_matrix=False,
            follows_width=False,
            is_embedding_or_output=True,
            is_shared=shape.num_mtp_layers > 0,
        )

    def vocab_bias(self) -> ParamSpec:
        """The bias of the logits: one per token of the padded vocabulary."""
        bias = self.vector("bias", self.shape.padded_vocab_size)
        return replace(
            bias,
            shards=COLUMN_SHARDS,
            is_embedding_or_output=True,
            is_shared=self.shape.num_mtp_layers > 0,
        )


def norm(declare: Declaration, size: int) -> Specs:
    """The weight and the bias of a LayerNorm or RMSNorm, where it has them.

    It is applied outside the tensor-parallel region.
    """
    if not declare.shape.has_norm_weight:
        return ()
    weight = declare.vector("weight", size, value=declare.shape.norm_init)
    bias = declare.bias(size, exists=declare.shape.has_norm_bias)
    return grouped("norms", summed((weight, *bias), declare.sequence_axes))


def nest(layer: str, specs: Iterable[ParamSpec]) -> Specs:
    """Prefix the names of a layer's parameters."""
    return tuple(replace(spec, name=f"{layer}.{spec.name}") for spec in specs)


def grouped(group: str, specs: Iterable[ParamSpec]) -> Specs:
    """Set the group of all parameters that have no group yet."""
    return tuple(replace(spec, group=spec.group or group) for spec in specs)


def summed(specs: Iterable[ParamSpec], axes: tuple[str, ...]) -> Specs:
    """Sum the gradients over these axes."""
    return tuple(replace(spec, grad_sum_axes=axes) for spec in specs)


@dataclass(frozen=True)
class LayerKind:
    """A kind of attention, of another token mixer, or of MLP."""

    declare: Callable[[Declaration], Specs]  # parameters, named relative to the module
    operators: Callable[[LayerSizes], Operators]  # in forward order
    # queries attend to keys: the layer has a mask, a window and a cache of keys and values
    has_keys: bool = False
    # for QK-clip: (heads, channels) of the rows of a query or key parameter, head by head, by the
    # parameter's name; heads that scale alike are "query", "key", "both" or "none"
    clipped_rows: Callable[[ModelShape], Mapping[str, tuple[tuple[str, int], ...]]] | None = None
