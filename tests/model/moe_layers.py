"""Mixture-of-experts layers for tests: the layer on one rank, and the shard of any rank in any
layout.

B sequences   S tokens of a sequence   H hidden
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nanotrain.comm.collectives import all_reduce
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.model import ModelConfig, MoEConfig
from nanotrain.model.context import LayerContext, ModelParallel
from nanotrain.model.mlp import build_mlp
from nanotrain.model.moe import MoELayer
from nanotrain.model.parameters import Parameters
from nanotrain.parallel.tp.layers import TensorParallel
from nanotrain.spec.declaration import Declaration
from nanotrain.spec.kinds.mlp import moe
from nanotrain.spec.shape import ModelShape

B, S, H, E = 4, 32, 16, 8

DROPLESS = ModelConfig(
    hidden_size=H, vocab_size=8, moe=MoEConfig(num_experts=E, router_topk=2, ffn_hidden_size=24)
)
CAPACITY = replace(
    DROPLESS,
    moe=replace(
        DROPLESS.moe,
        router_topk=3,
        router_pre_softmax=True,
        aux_loss_coeff=[0.7],
        expert_capacity_factor=0.8,
    ),
)
DEEPSEEK = replace(
    DROPLESS,
    moe=replace(
        DROPLESS.moe,
        shared_expert_intermediate_size=40,
        router_score_function="sigmoid",
        router_num_groups=4,
        router_group_topk=3,
        router_topk_scaling_factor=2.5,
        router_enable_expert_bias=True,
        aux_loss_coeff=[0.5],
        z_loss_coeff=0.3,
    ),
)
GELU = replace(
    DROPLESS,
    activation="gelu",
    add_bias_linear=True,
    moe=replace(DROPLESS.moe, ffn_hidden_size=22, z_loss_coeff=0.2),  # 22: the looped kernel
)
LLAMA4 = replace(
    DROPLESS,
    moe=replace(
        DROPLESS.moe,
        router_topk=1,
        router_score_function="sigmoid",
        apply_probs_on_input=True,
        aux_loss_coeff=[0.4],
        expert_capacity_factor=1.5,
    ),
)
ZERO_EXPERTS = replace(
    DROPLESS,
    moe=replace(
        DROPLESS.moe,
        num_zero_experts=4,
        router_topk=3,
        router_pre_softmax=True,
        router_enable_expert_bias=True,
        router_topk_scaling_factor=1.5,
        aux_loss_coeff=[0.5],
        latent_size=12,
    ),
)
MODELS = {
    "dropless": DROPLESS,
    "capacity": CAPACITY,
    "deepseek": DEEPSEEK,
    "gelu": GELU,
    "llama4": LLAMA4,
    "zero experts": ZERO_EXPERTS,
}

# No token is routed to these: with ep=4 the second rank gets none.
IDLE_EXPERTS = (2, 3)


@dataclass(frozen=True)
class Outcome:
    """Output and gradients of a layer."""

    output: Tensor
    grad_input: Tensor
    grads: dict[str, Tensor]


def random(*shape: int, seed: int, std: float = 1.0) -> Tensor:
    return torch.empty(shape).normal_(0.0, std, generator=torch.Generator().manual_seed(seed))


def full_weights(model: ModelConfig) -> dict[str, Tensor]:
    """Every parameter of the layer, over all ranks."""
    specs = moe(Declaration(ModelShape.of(model), "fp32"))
    return {spec.name: random(*spec.shape, seed=i, std=0.5) for i, spec in enumerate(specs)}


def build_layer(
    model: ModelConfig, weights: dict[str, Tensor], *, parallel: ModelParallel | None = None
) -> MoELayer:
    """The layer with these weights, and an expert bias that keeps some experts idle."""
    params = Parameters({name: nn.Parameter(weight.clone()) for name, weight in weights.items()})
    layer = build_mlp(model, params, parallel=parallel or ModelParallel.single_rank())
    assert isinstance(layer, MoELayer)
    assert [name for name, _ in layer.named_parameters()] == list(weights)
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.copy_(random(model.moe.num_choices, seed=99, std=0.1))
        layer.router.expert_bias[list(IDLE_EXPERTS)] = -10.0
    return layer


def build_full(model: ModelConfig) -> MoELayer:
    return build_layer(model, full_weights(model))


def run(layer: MoELayer, x: Tensor, grad: Tensor, *, positions: Tensor | None = None) -> Outcome:
    x = x.clone().requires_grad_()
    output = layer(x, LayerContext(sequence_positions=positions, aux_loss_scale=1 / B))
    output.backward(grad)
    return Outcome(
        output.detach(), x.grad, {name: param.grad for name, param in layer.named_parameters()}
    )


@dataclass(frozen=True)
class Part:
    """One rank's shard of the layer and of the batch."""

    ctx: ParallelContext
    sequence_parallel: bool

    @property
    def parallel(self) -> ModelParallel:
        group = self.ctx.group
        tensor_parallel = TensorParallel(group("tp"), sequence_parallel=self.sequence_parallel)
        return replace(
            ModelParallel.single_rank(),
            tp=tensor_parallel,
            ep=group("ep"),
            etp=group("etp"),
            sequence=group("tp_cp"),
            dp=group("dp"),
        )

    @property
    def positions(self) -> Tensor:
        """Of this rank's tokens in their sequence: zigzag over cp, not yet split over tp."""
        cp = self.ctx.group("cp")
        chunks = torch.arange(S).chunk(2 * cp.size)
        return torch.cat([chunks[cp.index], chunks[2 * cp.size - 1 - cp.index]])

    def of_batch(self, full: Tensor) -> Tensor:
        """[B, S, H] of all ranks -> this rank's input of the layer."""
        mine = full.chunk(self.ctx.topology.size("dp"))[self.ctx.coords["dp"]][:, self.positions]
        return self.parallel.tp.local_slice(mine)

    def of_weight(self, name: str, full: Tensor) -> Tensor:
        coords, topology = self.ctx.coords, self.ctx.topology
        for dim, axis in shards_of(name):
            full = full.chunk(topology.size(axis), dim=dim)[coords[axis]]
        return full

    def total(self, name: str, grad: Tensor) -> Tensor:
        """A gradient summed over the ranks that hold the same shard."""
        total = grad.clone()
        if name.startswith("experts."):
            all_reduce(total, self.ctx.group("expert_dp"))
            return total
        all_reduce(total, self.ctx.group("dp_cp"))
        if name.startswith(("router.", "fc")):
            all_reduce(total, self.ctx.group("tp"))
        return total


def shards_of(name: str) -> list[tuple[int, str]]:
    """The sharded dims of a parameter of the layer, and their axes."""
    part, _, rest = name.partition(".")
    if rest == "down.bias":
        return [(0, "ep")]
    if part == "experts":
        return [(0, "ep"), (2 if rest == "down.weight" else 1, "etp")]
    if part == "shared":
        return [(1 if rest == "down.weight" else 0, "tp")]
    return []


def close(actual: Tensor, expected: Tensor, *, what: str = "") -> None:
    """Equal within the rounding of fp32 sums: the largest difference relative to the largest
    number.
    """
    assert actual.shape == expected.shape, f"{what}: {actual.shape} is not {expected.shape}"
    difference, largest = (actual - expected).abs().max().item(), expected.abs().max().item()
    assert difference <= 2e-6 * largest, (
        f"{what}: differs by {difference:.1e} in numbers up to {largest:.1e}"
    )
