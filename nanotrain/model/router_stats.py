"""Statistics of routers: counted on the device during forward passes, collected once per step.

    RouterStats          one router's sums since the last collection, as named buffers
    collect_router_sums  the sums of all routers over all ranks, one collective per group; resets them
    update_expert_bias   moves every expert bias against the imbalance
    RouterMetrics        the metrics that follow from the sums, on the host

A forward pass that is recomputed in the backward counts once (`Router`). All but the metrics stays on the device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from nanotrain.comm.collectives import all_reduce
from nanotrain.comm.group import Group

NUM_SCALARS = 5
_COPIES = 64
_SCALARS = ("num_tokens", "num_dropped", "entropy", "aux_loss", "z_loss")


class StatefulModule(nn.Module):
    """A module whose buffers keep dtype and values: `.to()`, `.bfloat16()` and `.to_empty()` only move them."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        state = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in state.items():
            self._buffers[name] = buffer.to(self.get_buffer(name).device)
        return self


class RouterStats(StatefulModule):
    """Sums over the tokens that one router has routed; fp64, in which counts are exact.

    Args:
        num_experts: E.

    Attributes:
        tokens_per_expert: [E], dropped pairs among them.
        num_tokens: routed tokens.
        num_dropped: (token, expert) pairs beyond the capacity.
        entropy: of the router probabilities of each token, in nats.
        aux_loss: the first load-balancing loss, times the tokens that it is over.
        z_loss: of each token.
        microbatch_tokens: [E], tokens per expert of all ranks, for global_aux_loss.
    """

    tokens_per_expert: Tensor
    num_tokens: Tensor
    num_dropped: Tensor
    entropy: Tensor
    aux_loss: Tensor
    z_loss: Tensor
    microbatch_tokens: Tensor

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.register_buffer("tokens_per_expert", torch.zeros(num_experts, dtype=torch.float64), persistent=False)
        for name in _SCALARS:
            self.register_buffer(name, torch.zeros((), dtype=torch.float64), persistent=False)
        self.register_buffer("microbatch_tokens", torch.zeros(num_experts), persistent=False)

    @torch.no_grad()
    def count(self, topk_ids: Tensor, *, kept_ids: Tensor, probabilities: Tensor) -> None:
        """Count a batch.

        Args:
            topk_ids: [B, S, K] int64.
            kept_ids: the same, with E for dropped pairs.
            probabilities: [B, S, E], summing to one per token.
        """
        self.tokens_per_expert += count_ids(topk_ids.flatten(), len(self.tokens_per_expert))
        self.num_tokens += probabilities.shape[:-1].numel()
        self.num_dropped += (kept_ids == len(self.tokens_per_expert)).sum()
        # torch.special.entr would be compiled at run time on CUDA.
        self.entropy -= torch.xlogy(probabilities, probabilities).sum()

    def average_tokens(self, tokens_per_expert: Tensor) -> Tensor:
        """Tokens per expert at the mean shares of this microbatch and the earlier ones of the step.

        Args:
            tokens_per_expert: [1, E], of a microbatch of all ranks; with padding on some it has fewer tokens.

        Returns:
            [1, E], with the sum of `tokens_per_expert`.
        """
        self.microbatch_tokens += tokens_per_expert[0]
        return (self.microbatch_tokens * (tokens_per_expert.sum() / self.microbatch_tokens.sum()))[None]

    def sums(self) -> Tensor:
        """All sums in one tensor, [E + 5] fp64; input of `RouterMetrics.of`."""
        return torch.cat([self.tokens_per_expert, torch.stack([self.get_buffer(name) for name in _SCALARS])])

    def reset(self) -> None:
        """Set all sums to zero."""
        for buffer in self.buffers():
            buffer.zero_()


@dataclass(frozen=True)
class RouterMetrics:
    """Metrics of one router in a step, over all ranks."""

    tokens_per_expert: tuple[float, ...]  # dropped pairs among them
    dropped_fraction: float  # of all (token, expert) pairs
    entropy: float  # mean over tokens, in nats; log(E) where all experts have equal probability
    aux_loss: float  # mean of the first load-balancing loss, without its coefficient; 1 is perfect balance
    z_loss: float  # mean over tokens, without its coefficient

    @classmethod
    def of(cls, sums: Sequence[float]) -> Self:
        """The metrics of one router from its [E + 5] sums."""
        tokens_per_expert = tuple(sums[: -len(_SCALARS)])
        scalars = dict(zip(_SCALARS, sums[-len(_SCALARS) :], strict=True))
        num_tokens = max(1.0, scalars["num_tokens"])
        return cls(
            tokens_per_expert=tokens_per_expert,
            dropped_fraction=scalars["num_dropped"] / max(1.0, sum(tokens_per_expert)),
            entropy=scalars["entropy"] / num_tokens,
            aux_loss=scalars["aux_loss"] / num_tokens,
            z_loss=scalars["z_loss"] / num_tokens,
        )

    @property
    def max_over_mean(self) -> float:
        """Tokens of the busiest expert relative to an even share.

        >>> RouterMetrics((1.0, 3.0), 0.0, entropy=0.0, aux_loss=0.0, z_loss=0.0).max_over_mean
        1.5
        """
        return max(self.tokens_per_expert) * len(self.tokens_per_expert) / max(1.0, sum(self.tokens_per_expert))


class HasRouterState(Protocol):
    """The state of a router besides its weight."""

    stats: RouterStats
    expert_bias: Tensor | None


def routers_of(stage: nn.Module) -> dict[str, HasRouterState]:
    """The routers of a stage by name ("layers.3.mlp.router"), in order."""
    modules: dict[str, Any] = dict(stage.named_modules())
    return {name: module for name, module in modules.items() if isinstance(getattr(module, "stats", None), RouterStats)}


def expert_biases(stage: nn.Module) -> dict[str, Tensor]:
    """The expert biases of a stage by their names in a checkpoint."""
    routers = routers_of(stage).items()
    return {f"router/{name}.expert_bias": r.expert_bias for name, r in routers if r.expert_bias is not None}


def collect_router_sums(routers: Mapping[str, HasRouterState], groups: Sequence[Group]) -> dict[str, Tensor]:
    """Sum the statistics of routers over all ranks, and reset them.

    Args:
        routers: from `routers_of`; the same on every rank of the groups.
        groups: reduced over one after the other; together they span all ranks that route tokens: tp and dp_cp.

    Returns:
        [E + 5] fp64 of each router by name (`RouterMetrics.of`), the same on every rank.
    """
    if not routers:
        return {}
    sums = [router.stats.sums() for router in routers.values()]
    total = torch.cat(sums)
    for group in groups:
        all_reduce(total, group)
    for router in routers.values():
        router.stats.reset()
    return dict(zip(routers, total.split([len(part) for part in sums]), strict=True))


def update_expert_bias(routers: Mapping[str, HasRouterState], sums: Mapping[str, Tensor], *, rate: float) -> None:
    """Lower the bias of experts with more than the mean number of tokens, and raise that of the others.

    Every bias moves by `rate`, for any distance (DeepSeek-V3, section 2.1.2: balance without auxiliary loss).

    Args:
        routers: from `routers_of`.
        sums: of these routers in this step, from `collect_router_sums`.
        rate: step size.
    """
    for name, router in routers.items():
        if router.expert_bias is not None:
            tokens = sums[name][: -len(_SCALARS)]
            router.expert_bias += ((tokens.mean() - tokens).sign() * rate).to(router.expert_bias.dtype)


def count_ids(ids: Tensor, size: int) -> Tensor:
    """[N] int64 below `size` -> [size] int64, how often each occurs.

    On GPUs additions to one address wait for each other, and all pairs of tokens and experts are counted in a few
    addresses; so they are spread over `_COPIES` of them. Unlike `bincount` it needs no host sync.

    >>> count_ids(torch.tensor([2, 0, 2]), 4).tolist()
    [1, 0, 2, 0]
    """
    copies = torch.arange(len(ids), device=ids.device) % _COPIES
    counts = ids.new_zeros(_COPIES * size).scatter_add_(0, copies * size + ids, torch.ones_like(ids))
    return counts.view(_COPIES, size).sum(0)
