"""A small network on one rank, and the same network sharded over a tp group.

    x -> query, key, value (key and value also with fewer heads than ranks) -> mixed -> output -> y

B batch   S sequence   H width of x   D width of a head   N query heads   G key/value heads
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.comm.group import Group
from nanotrain.parallel.tp.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    column_parallel,
)

B, S, H, D, N = 2, 8, 6, 3, 4
NAMES = ("query", "key", "value", "output")


def draw(name: str, *shape: int) -> Tensor:
    """The same numbers for the same name everywhere."""
    generator = torch.Generator().manual_seed(sum(name.encode()) * 31 + len(shape))
    return torch.randn(shape, generator=generator)


def mix(query: Tensor, *, key: Tensor, value: Tensor) -> Tensor:
    """[B, S, N, D] and [B, S, G, D] -> [B, S, N * D]: every query head is combined with its key and
    value head.
    """
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
    return (torch.tanh(query * key) * value).flatten(2)


@dataclass
class Passed:
    """Output of a network and its gradients, by name."""

    out: Tensor
    grads: dict[str, Tensor]


def reference_pass(num_groups: int) -> Passed:
    """On one rank, with torch's own layers."""
    width = {"query": N * D, "key": num_groups * D, "value": num_groups * D}
    shapes = {name: (rows, H) for name, rows in width.items()} | {"output": (H, N * D)}
    weights = {name: draw(name, *shape).requires_grad_() for name, shape in shapes.items()}
    biases = {name: draw(name + "b", shape[0]).requires_grad_() for name, shape in shapes.items()}
    x = draw("x", B, S, H).requires_grad_()
    heads = {n: F.linear(x, weights[n], biases[n]).unflatten(-1, (-1, D)) for n in width}
    out = F.linear(
        mix(heads["query"], key=heads["key"], value=heads["value"]),
        weights["output"],
        biases["output"],
    )
    out.backward(draw("upstream", *out.shape))
    grads = {"x": x.grad}
    for name in NAMES:
        grads |= {f"{name}.weight": weights[name].grad, f"{name}.bias": biases[name].grad}
    return Passed(out.detach(), grads)


class ShardedNetwork(nn.Module):
    """The same network, with the heads sharded over the ranks."""

    def __init__(self, tensor_parallel: TensorParallel, num_groups: int) -> None:
        super().__init__()
        self.tensor_parallel, self.num_groups = tensor_parallel, num_groups
        rows = shared_rows(tensor_parallel.group, num_groups)
        self.query = ColumnParallelLinear(
            *self.parameters_of("query"), tensor_parallel=tensor_parallel
        )
        for name in ("key", "value"):
            parameters = self.parameters_of(name)
            if rows is None:
                layer = ColumnParallelLinear(*parameters, tensor_parallel=tensor_parallel)
            else:
                layer = ColumnParallelLinear(
                    *parameters, rows=rows, tensor_parallel=tensor_parallel
                )
            setattr(self, name, layer)
        self.output = RowParallelLinear(
            *self.parameters_of("output"), tensor_parallel=tensor_parallel
        )

    def parameters_of(self, layer: str) -> tuple[nn.Parameter, nn.Parameter]:
        """This rank's weight and bias."""
        outputs = {"query": N * D, "output": H}.get(layer, self.num_groups * D)
        weight = draw(layer, outputs, N * D if layer == "output" else H)
        return tuple(
            nn.Parameter(self.shard(f"{layer}.{kind}", full).clone())
            for kind, full in (("weight", weight), ("bias", draw(layer + "b", outputs)))
        )

    def shard(self, name: str, full: Tensor) -> Tensor:
        """The local shard of a parameter, or of its gradient."""
        group = self.tensor_parallel.group
        is_shared = name.split(".")[0] in ("key", "value") and self.num_groups < group.size
        if is_shared or name == "output.bias":
            return full
        return full.chunk(group.size, dim=1 if name == "output.weight" else 0)[group.index]

    def partial_names(self) -> set[str]:
        """Parameters whose gradients are partial sums over the group."""
        names = {"output.bias"} if self.tensor_parallel.sequence_parallel else set()
        if self.key.rows is not None:
            names |= {
                f"{layer}.{kind}" for layer in ("key", "value") for kind in ("weight", "bias")
            }
        return names

    def forward(self, x: Tensor) -> Tensor:
        projected = column_parallel(x, (self.query, self.key, self.value))
        query, key, value = (p.unflatten(-1, (-1, D)) for p in projected)
        return self.output(mix(query, key=key, value=value))


def shared_rows(group: Group, num_groups: int) -> slice | None:
    """The rows of the key and value head that a rank's query heads use, with fewer heads than
    ranks.
    """
    if num_groups >= group.size:
        return None
    head = group.index * num_groups // group.size
    return slice(head * D, (head + 1) * D)


def sharded_pass(network: ShardedNetwork) -> Passed:
    """Forward and backward with the input and the upstream gradient of `reference_pass`; local
    shards.
    """
    x = network.tensor_parallel.local_slice(draw("x", B, S, H)).clone().requires_grad_()
    out = network(x)
    out.backward(network.tensor_parallel.local_slice(draw("upstream", B, S, H)))
    grads = {name: parameter.grad for name, parameter in network.named_parameters()}
    return Passed(out.detach(), {"x": x.grad} | grads)
