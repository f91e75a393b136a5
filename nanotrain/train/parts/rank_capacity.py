"""Tokens beyond `--moe-expert-rank-capacity-factor`: the step is skipped, and named with the factor
that it needs.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanotrain.comm.collectives import all_reduce
from nanotrain.optim.distributed import Update
from nanotrain.parallel.ep.token_dispatcher import PaddedTokenDispatcher
from nanotrain.train.parts.part import BuiltModel, StepPart
from nanotrain.train.parts.router_balance import router_names


class RankCapacity(StepPart):
    """The most tokens that a rank had for another rank of ep in one microbatch, layer by layer.

    The outputs of a rank with too many are NaN (`PaddedTokenDispatcher`), and so is the gradient
    norm of the step.
    """

    def __init__(self, model: BuiltModel) -> None:
        self._world, self._device = model.context.group("world"), model.context.device
        self._ep = model.config.parallel.expert_model_parallel_size
        self._factor = model.config.parallel.moe_expert_rank_capacity_factor or self._ep
        self._names = [name.removesuffix(".router") for name in router_names(model.plan)]
        modules = {
            name: each for stage in model.stages.values() for name, each in stage.named_modules()
        }
        self.dispatchers = {
            i: dispatcher
            for i, name in enumerate(self._names)
            if isinstance(
                dispatcher := getattr(modules.get(name), "dispatcher", None), PaddedTokenDispatcher
            )
        }

    def after_update(self, update: Update, sums: Tensor, *, is_logged: bool) -> Tensor:
        """[layers + 1] int64: the most tokens of every layer with their rank as one number, and
        pairs of a rank.
        """
        numbers = torch.zeros(len(self._names) + 1, dtype=torch.int64, device=self._device)
        for layer, dispatcher in self.dispatchers.items():
            assert dispatcher.peak is not None, "every layer has seen the microbatches of the step"
            numbers[layer] = dispatcher.peak.long() * self._world.size + self._world.index
            numbers[-1], dispatcher.peak = dispatcher.num_pairs, None
        all_reduce(numbers, self._world, op="max")
        return numbers

    def metrics(self, numbers: Sequence[float]) -> dict[str, Any]:
        """`moe_rank_capacity_factor`, which the step needs, and a `skip_reason` if that is more
        than there is.

        Layers after the first one with too many tokens route what is not finite.
        """
        *peaks, num_pairs = map(int, numbers)
        capacity = int(self._factor * num_pairs / self._ep)
        layers = [
            (*divmod(peak, self._world.size), name)
            for peak, name in zip(peaks, self._names, strict=True)
        ]
        most, rank, name = next((layer for layer in layers if layer[0] > capacity), max(layers))
        needed = math.ceil(100 * most * self._ep / max(num_pairs, 1)) / 100
        over = (
            f"{name} of rank {rank} had {most:,} tokens for a rank of ep that takes {capacity:,}: "
            f"set --moe-expert-rank-capacity-factor {needed} or more"
        )
        return {"moe_rank_capacity_factor": needed} | (
            {"skip_reason": over} if most > capacity else {}
        )
