"""What routers have chosen: counted during the forward pass, harvested once per step.

    RouterTally           one router's sums since the last harvest, on the device; the host waits for nothing
    collect_router_loads  all routers' sums over all ranks, in one collective per group; starts the count anew
    update_expert_bias    moves every bias against the load

A token that is counted twice because its forward pass is computed twice (recomputed activations) changes no result:
all of them are ratios.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from nanotrain.comm.collectives import all_reduce
from nanotrain.comm.group import Group

_SUMS = ("tokens", "dropped", "entropy", "balance_loss", "z_loss")


class RouterTally:
    """Sums over the tokens that one router has seen.

    Args:
        num_experts: E.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        # Choices per expert, then _SUMS. In fp64, where counts stay exact.
        self.sums = torch.zeros(num_experts + len(_SUMS), dtype=torch.float64)

    @torch.no_grad()
    def add(self, experts: Tensor, *, kept: Tensor, probabilities: Tensor) -> None:
        """Count a batch.

        Args:
            experts: [B, S, K] int64, what was chosen.
            kept: the same, E in place of choices that were dropped.
            probabilities: [B, S, E], summing to one per token.
        """
        self.sums = self.sums.to(experts.device)
        chosen, size = experts.flatten(), self.num_experts
        self.sums.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=self.sums.dtype))
        entropy = torch.special.entr(probabilities).sum()
        self.sums[size] += probabilities.shape[:-1].numel()
        self.sums[size + 1] += (kept == size).sum()
        self.sums[size + 2] += entropy

    def add_balance_loss(self, loss: Tensor) -> None:
        """Count a load-balancing loss: its sum over sequences, times their length."""
        self.sums = self.sums.to(loss.device)
        self.sums[self.num_experts + 3] += loss

    def add_z_loss(self, loss: Tensor) -> None:
        """Count a z-loss: its sum over tokens."""
        self.sums = self.sums.to(loss.device)
        self.sums[self.num_experts + 4] += loss


@dataclass(frozen=True)
class RouterLoad:
    """What one router has chosen in a step, over all ranks.

    Args:
        choices: how often each expert was chosen, dropped choices among them.
        dropped_fraction: of all choices.
        entropy: mean over tokens of the entropy of the scores, in nats; log(E) where all experts are alike.
        balance_loss: mean over sequences, without its coefficient; 1 is perfect balance.
        z_loss: mean over tokens, without its coefficient.
    """

    choices: tuple[float, ...]
    dropped_fraction: float
    entropy: float
    balance_loss: float
    z_loss: float

    @property
    def max_load(self) -> float:
        """Choices of the busiest expert relative to an even share.

        >>> RouterLoad((1.0, 3.0), 0.0, entropy=0.0, balance_loss=0.0, z_loss=0.0).max_load
        1.5
        """
        return max(self.choices) * len(self.choices) / max(1.0, sum(self.choices))


class HasRouterState(Protocol):
    """What a router keeps beside its parameters."""

    tally: RouterTally
    expert_bias: Tensor | None


def routers_of(stage: nn.Module) -> dict[str, HasRouterState]:
    """The routers of a stage by name ("layers.3.mlp.router"), in order."""
    return {name: part for name, part in stage.named_modules() if isinstance(getattr(part, "tally", None), RouterTally)}


def collect_router_loads(stage: nn.Module, groups: Sequence[Group]) -> dict[str, RouterLoad]:
    """Sum what the routers of a stage have counted over all ranks, and start anew.

    Args:
        stage: the same on every rank of the groups.
        groups: that together, one after another, span all ranks with tokens of their own: tp and dp_cp.

    Returns:
        the load of each router by name; the same on every rank.
    """
    routers = routers_of(stage)
    if not routers:
        return {}
    total = torch.cat([router.tally.sums for router in routers.values()])
    for group in groups:
        all_reduce(total, group)
    loads, numbers = {}, total.tolist()
    for name, router in routers.items():
        size = len(router.tally.sums)
        loads[name] = _load(numbers[:size])
        numbers = numbers[size:]
        router.tally.sums.zero_()
    return loads


def update_expert_bias(stage: nn.Module, loads: Mapping[str, RouterLoad], *, rate: float) -> None:
    """Make every expert with more than its share a little less likely to be chosen, and the others more.

    The bias moves by `rate` whatever the distance (DeepSeek-V3, section 2.1.2: balance without a loss).

    Args:
        stage: whose routers have a bias.
        loads: of these routers in this step, over all ranks.
        rate: step of the bias.
    """
    for name, router in routers_of(stage).items():
        if router.expert_bias is not None:
            choices = torch.tensor(loads[name].choices, dtype=torch.float64)
            step = (choices.mean() - choices).sign() * rate
            router.expert_bias += step.to(router.expert_bias)


def _load(numbers: list[float]) -> RouterLoad:
    choices = numbers[: -len(_SUMS)]
    sums = dict(zip(_SUMS, numbers[-len(_SUMS) :], strict=True))
    tokens = max(1.0, sums["tokens"])
    return RouterLoad(
        choices=tuple(choices),
        dropped_fraction=sums["dropped"] / max(1.0, sum(choices)),
        entropy=sums["entropy"] / tokens,
        balance_loss=sums["balance_loss"] / tokens,
        z_loss=sums["z_loss"] / tokens,
    )
