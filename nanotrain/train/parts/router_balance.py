"""Router statistics and expert biases.

The statistics of all routers are summed and reported once per step, and the bias of every expert
moves against the imbalance.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from nanotrain.model.router_stats import SCALARS, HasRouterState, router_tensors, routers_of
from nanotrain.model.transformer import Stage
from nanotrain.optim.distributed import Update
from nanotrain.plan.plan import Plan
from nanotrain.spec.boxes import TensorBox
from nanotrain.train.parts.part import BuiltModel, StepPart


class RouterBalance(StepPart):
    """Sums the statistics of all routers of the model, updates expert biases and logs balance."""

    def __init__(self, model: BuiltModel) -> None:
        moe = model.config.model.moe
        assert moe is not None, "only a mixture of experts has routers"
        self._stages = model.stages
        self._device = model.context.device
        self._rate = moe.router_bias_update_rate
        self._moves_biases = not moe.balances_quantiles
        self._length = moe.num_choices + len(SCALARS)
        self._routers: dict[str, HasRouterState] = {}
        for stage in self._stages.values():
            self._routers.update(routers_of(stage))
        self._names = list(router_names(model.plan))
        # the bias of a router with frozen weights does not move
        self._frozen: set[str] = set()
        for planned in model.plan.stages:
            for param in planned.params:
                if not param.spec.is_trainable:
                    self._frozen.add(param.spec.name.removesuffix(".weight"))
        assert self._routers.keys() <= set(self._names), (
            "a router that the other ranks would not sum"
        )

    @staticmethod
    def is_enabled(model: BuiltModel) -> bool:
        return model.config.model.moe is not None

    def sums(self, *, is_logged: bool) -> Tensor:
        """[routers * (E + 5)], and reset the statistics; a router is on the ranks of one stage."""
        none = torch.zeros(self._length, dtype=torch.float64, device=self._device)
        sums = []
        for name in self._names:
            router = self._routers.get(name)
            sums.append(none if router is None else router.stats.sums())
        for router in self._routers.values():
            router.stats.reset()
        return torch.cat(sums)

    def after_update(self, update: Update, sums: Tensor, *, is_logged: bool) -> Tensor:
        """Update the expert biases, unless the step was skipped."""
        for name, router_sums in zip(self._names, sums.view(-1, self._length), strict=True):
            if self._moves_biases and name in self._routers and name not in self._frozen:
                moved = torch.where(update.skipped, 0.0, router_sums[: -len(SCALARS)])
                update_expert_bias(self._routers[name], moved, rate=self._rate)
        return sums

    def metrics(self, numbers: Sequence[float]) -> dict[str, Any]:
        """`load`: tokens per expert by router; means over routers of the other `router_metrics`.

        The mean of `balance_loss` is over the routers that have this loss.
        """
        starts = range(0, len(numbers), self._length)
        routers = [router_metrics(numbers[start : start + self._length]) for start in starts]
        load = {name: router.pop("load") for name, router in zip(self._names, routers, strict=True)}
        entries: dict[str, Any] = {"load": load}
        for key in routers[0]:
            entries[key] = fmean(router[key] for router in routers)
        # a router without such a loss has 0, which no balance loss is
        balanced = [router["balance_loss"] for router in routers if router["balance_loss"] != 0]
        entries["balance_loss"] = fmean(balanced or [0.0])
        return {"moe": entries}

    def tensors(self) -> dict[TensorBox, Tensor]:
        return tensors_of_routers(self._stages)


def router_names(plan: Plan) -> Iterator[str]:
    """The routers of the whole model by name."""
    shape = plan.shape
    for layer in range(shape.num_layers):
        if shape.has_experts(layer):
            yield f"layers.{layer}.mlp.router"
    for index, layer in enumerate(shape.mtp_layers):
        if shape.has_experts(layer):
            yield f"mtp.{index}.block.mlp.router"


def update_expert_bias(router: HasRouterState, tokens_per_expert: Tensor, *, rate: float) -> None:
    """Lower the bias of experts with more tokens than the mean, and raise all other biases.

    Every bias moves by `rate`, for any distance (DeepSeek-V3, section 2.1.2: balance without
    auxiliary loss).

    Args:
        router: router; without a bias it stays as it is.
        tokens_per_expert: [E] tokens of this step, over all ranks.
        rate: step size.
    """
    if router.expert_bias is not None:
        direction = (tokens_per_expert.mean() - tokens_per_expert).sign()
        router.expert_bias += (direction * rate).to(router.expert_bias.dtype)


def router_metrics(sums: Sequence[float]) -> dict[str, Any]:
    """The metrics of one router from its [E + 5] sums over all ranks.

    Returns:
        load           tokens per expert, dropped pairs among them
        max_load       tokens of the busiest expert relative to an even share
        dropped        dropped share of the (token, expert) pairs
        entropy        mean over tokens, in nats; log(E) where all experts have equal probability
        balance_loss   mean of the first load-balancing loss, without its coefficient; 1 is perfect
                       balance
        z_loss         mean over tokens, without its coefficient
    """
    load = list(sums[: -len(SCALARS)])
    scalars = dict(zip(SCALARS, sums[-len(SCALARS) :], strict=True))
    num_tokens = max(1.0, scalars["num_tokens"])
    num_pairs = max(1.0, sum(load))
    return {
        "load": load,
        "max_load": max(load) * len(load) / num_pairs,
        "dropped": scalars["num_dropped"] / num_pairs,
        "entropy": scalars["entropy"] / num_tokens,
        "balance_loss": scalars["aux_loss"] / num_tokens,
        "z_loss": scalars["z_loss"] / num_tokens,
    }


def tensors_of_routers(stages: Mapping[int, Stage]) -> dict[TensorBox, Tensor]:
    """Expert biases and experts of tokens of this rank's routers, alike on all ranks of a stage."""
    tensors = {}
    for stage in stages.values():
        for name, tensor in router_tensors(stage).items():
            tensors[TensorBox.full(name, tensor.shape)] = tensor
    return tensors
