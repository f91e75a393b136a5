"""Statistics of routers: counted on the device during forward passes, summed once per step.

`RouterStats` holds one router's sums since the last step, as named buffers. A forward pass that is
recomputed in the backward counts once (`Router`). `train/parts/router_balance.py` reads the sums.
"""

from collections.abc import Callable
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

SCALARS = ("num_tokens", "num_dropped", "entropy", "aux_loss", "z_loss")


class StatefulModule(nn.Module):
    """A module whose buffers keep dtype and values.

    `.to()`, `.bfloat16()` and `.to_empty()` only move them to another device.
    """

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Move the statistics with the module, but keep their dtype and values."""
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
        entropy: entropies of the router probabilities, in nats.
        aux_loss: the first load-balancing loss, times its number of tokens.
        z_loss: z-losses of the tokens.
        microbatch_tokens: [E], tokens per expert on all ranks, for global_aux_loss.
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
        self.register_buffer(
            "tokens_per_expert", torch.zeros(num_experts, dtype=torch.float64), persistent=False
        )
        for name in SCALARS:
            self.register_buffer(name, torch.zeros((), dtype=torch.float64), persistent=False)
        self.register_buffer("microbatch_tokens", torch.zeros(num_experts), persistent=False)

    @torch.no_grad()
    def count(
        self, tokens_per_expert: Tensor, *, num_dropped: Tensor | None, probabilities: Tensor
    ) -> None:
        """Count a batch.

        Args:
            tokens_per_expert: [E] int64, dropped pairs among them.
            num_dropped: number of dropped pairs; None where none can be.
            probabilities: [B, S, E], summing to one per token.
        """
        self.tokens_per_expert += tokens_per_expert
        self.num_tokens += probabilities.shape[:-1].numel()
        if num_dropped is not None:
            self.num_dropped += num_dropped
        # torch.special.entr would be compiled at run time on CUDA.
        self.entropy -= torch.xlogy(probabilities, probabilities).sum()

    def average_tokens(self, tokens_per_expert: Tensor) -> Tensor:
        """Tokens per expert, averaged over the microbatches of the step so far.

        Args:
            tokens_per_expert: [1, E], of a microbatch on all ranks; padding ranks have no tokens.

        Returns:
            [1, E], with the sum of `tokens_per_expert`.
        """
        self.microbatch_tokens += tokens_per_expert[0]
        scale = tokens_per_expert.sum() / self.microbatch_tokens.sum()
        return (self.microbatch_tokens * scale)[None]

    def sums(self) -> Tensor:
        """All sums in one tensor, [E + 5] fp64: the counts per expert and `SCALARS`."""
        scalars = torch.stack([self.get_buffer(name) for name in SCALARS])
        return torch.cat([self.tokens_per_expert, scalars])

    def reset(self) -> None:
        """Set all sums to zero."""
        for buffer in self.buffers():
            buffer.zero_()


class HasRouterState(Protocol):
    """A router with its statistics."""

    stats: RouterStats
    expert_bias: Tensor | None


def routers_of(stage: nn.Module) -> dict[str, HasRouterState]:
    """The routers of a stage by name ("layers.3.mlp.router"), in order."""
    modules: dict[str, Any] = dict(stage.named_modules())
    return {
        name: module
        for name, module in modules.items()
        if isinstance(getattr(module, "stats", None), RouterStats)
    }


def router_tensors(stage: nn.Module) -> dict[str, Tensor]:
    """The expert biases of a stage, and the experts of tokens, by their names in a checkpoint."""
    tensors = {}
    for name, router in routers_of(stage).items():
        for state in ("expert_bias", "token_experts"):
            tensor = getattr(router, state, None)
            if tensor is not None:
                tensors[f"router/{name}.{state}"] = tensor
    return tensors
