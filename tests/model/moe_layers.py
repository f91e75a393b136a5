"""Mixture-of-experts layers for tests: the whole layer on one rank, and any rank's part of it in any layout.

B sequences   S tokens of a sequence   H hidden
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanotrain.comm.collectives import all_reduce
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Activation, ModelConfig, MoEConfig, RouterScore
from nanotrain.model.moe import MoELayer
from nanotrain.model.parallel import ModelParallel
from nanotrain.model.router import MoEContext
from nanotrain.parallel.tp.tensor_parallel import TensorParallel

B, S, H, E = 4, 32, 16, 8

DROPLESS = ModelConfig(hidden_size=H, moe=MoEConfig(num_experts=E, router_topk=2, ffn_hidden_size=24))
CAPACITY = replace(
    DROPLESS,
    moe=replace(DROPLESS.moe, router_topk=3, router_pre_softmax=True, aux_loss_coeff=0.7, expert_capacity_factor=0.8),
)
DEEPSEEK = replace(
    DROPLESS,
    moe=replace(
        DROPLESS.moe,
        shared_expert_intermediate_size=40,
        router_score_function=RouterScore.sigmoid,
        router_num_groups=4,
        router_group_topk=3,
        router_topk_scaling_factor=2.5,
        router_enable_expert_bias=True,
        aux_loss_coeff=0.5,
        z_loss_coeff=0.3,
    ),
)
GELU = replace(
    DROPLESS, activation=Activation.gelu, moe=replace(DROPLESS.moe, ffn_hidden_size=22, z_loss_coeff=0.2)
)  # 22: the looped form
MODELS = {"dropless": DROPLESS, "capacity": CAPACITY, "deepseek": DEEPSEEK, "gelu": GELU}

# Nobody chooses these: with four ranks of experts the second one gets no token at all.
IDLE_EXPERTS = (2, 3)


@dataclass(frozen=True)
class LayerContext:
    moe: MoEContext


@dataclass(frozen=True)
class Outcome:
    """What a layer makes of an input and of a gradient."""

    output: Tensor
    grad_input: Tensor
    grads: dict[str, Tensor]


def random(*shape: int, seed: int, std: float = 1.0) -> Tensor:
    return torch.empty(shape).normal_(0.0, std, generator=torch.Generator().manual_seed(seed))


def whole_weights(model: ModelConfig) -> dict[str, Tensor]:
    """Every parameter of the layer, over all ranks."""
    layer = MoELayer(model, dtype=torch.float32, parallel=ModelParallel.single_rank())
    named = list(layer.named_parameters())
    return {name: random(*param.shape, seed=i, std=0.5) for i, (name, param) in enumerate(named)}


def give(layer: MoELayer, weights: dict[str, Tensor]) -> MoELayer:
    """Put weights in place of the layer's meta parameters, and a bias that keeps some experts idle."""
    for name, parameter in list(layer.named_parameters()):
        assert weights[name].shape == parameter.shape, name
        owner, _, leaf = name.rpartition(".")
        layer.get_submodule(owner)._parameters[leaf] = torch.nn.Parameter(weights[name].clone())
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.copy_(random(E, seed=99, std=0.1))
        layer.router.expert_bias[list(IDLE_EXPERTS)] = -10.0
    return layer


def build_whole(model: ModelConfig) -> MoELayer:
    return give(MoELayer(model, dtype=torch.float32, parallel=ModelParallel.single_rank()), whole_weights(model))


def run(layer: MoELayer, x: Tensor, grad: Tensor, *, places: Tensor | None = None) -> Outcome:
    x = x.clone().requires_grad_()
    output = layer(x, LayerContext(MoEContext(aux_scale=1 / B, places=places)))
    output.backward(grad)
    return Outcome(output.detach(), x.grad, {name: param.grad for name, param in layer.named_parameters()})


@dataclass(frozen=True)
class Part:
    """What one rank has of the layer and of the batch."""

    ctx: ParallelContext
    sequence_parallel: bool

    @property
    def parallel(self) -> ModelParallel:
        group = self.ctx.group
        tensor_parallel = TensorParallel(group("tp"), sequence_parallel=self.sequence_parallel)
        return replace(
            ModelParallel.single_rank(), tp=tensor_parallel, ep=group("ep"), etp=group("etp"), sequence=group("tp_cp")
        )

    @property
    def places(self) -> Tensor:
        """Of this rank's tokens in their sequence: zigzag over cp, not yet cut over tp."""
        cp = self.ctx.group("cp")
        chunks = torch.arange(S).chunk(2 * cp.size)
        return torch.cat([chunks[cp.index], chunks[2 * cp.size - 1 - cp.index]])

    def of_batch(self, whole: Tensor) -> Tensor:
        """[B, S, H] of all ranks -> what this rank holds as the layer gets it."""
        mine = whole.chunk(self.ctx.topology.size("dp"))[self.ctx.coords["dp"]][:, self.places]
        return self.parallel.tp.local_slice(mine)

    def of_weight(self, name: str, whole: Tensor) -> Tensor:
        coords, topology = self.ctx.coords, self.ctx.topology
        for dim, axis in cuts_of(name):
            whole = whole.chunk(topology.size(axis), dim=dim)[coords[axis]]
        return whole

    def total(self, name: str, grad: Tensor) -> Tensor:
        """A gradient summed over the ranks that hold the same part of the parameter."""
        total = grad.clone()
        if name.startswith("experts."):
            all_reduce(total, self.ctx.group("expert_dp"))
            return total
        all_reduce(total, self.ctx.group("dp_cp"))
        if name == "router.weight":
            all_reduce(total, self.ctx.group("tp"))
        return total


def cuts_of(name: str) -> list[tuple[int, str]]:
    """Which axis cuts which dim of a parameter of the layer."""
    part, _, rest = name.partition(".")
    if part == "experts":
        return [(0, "ep"), (2 if rest == "down.weight" else 1, "etp")]
    if part == "shared":
        return [(1 if rest == "down.weight" else 0, "tp")]
    return []


def close(found: Tensor, expected: Tensor, *, what: str = "") -> None:
    """Equal within the rounding of fp32 sums: the largest difference relative to the largest number."""
    assert found.shape == expected.shape, f"{what}: {found.shape} is not {expected.shape}"
    difference, largest = (found - expected).abs().max().item(), expected.abs().max().item()
    assert difference <= 2e-6 * largest, f"{what}: differs by {difference:.1e} in numbers up to {largest:.1e}"
