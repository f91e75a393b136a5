"""Tokens beyond `--moe-expert-rank-capacity-factor`: the step is repeated with exact sizes.

The metrics name the factor that the step needs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nanotrain.comm.collectives import all_reduce
from nanotrain.log import get_logger
from nanotrain.optim.distributed import Update
from nanotrain.parallel.ep.token_dispatcher import PaddedTokenDispatcher
from nanotrain.train.parts.part import BuiltModel, StepPart
from nanotrain.train.parts.router_balance import router_names

log = get_logger(__name__)

# indices of the numbers that follow the layers' numbers
NUM_PAIRS, IS_EXACT = -2, -1


class RankCapacity(StepPart):
    """Repeats a step in which a rank had too many tokens for another rank of ep.

    The outputs of a rank with too many are NaN (`PaddedTokenDispatcher`), and so is the gradient
    norm of the step. It changes nothing, and is taken again with exact sizes.
    """

    may_repeat = True

    def __init__(self, model: BuiltModel) -> None:
        self._world = model.context.group("world")
        self._device = model.context.device
        self._ep = model.config.parallel.expert_model_parallel_size
        self._factor = model.config.parallel.moe_expert_rank_capacity_factor or self._ep
        self._names = [name.removesuffix(".router") for name in router_names(model.plan)]
        self.dispatchers: dict[int, PaddedTokenDispatcher] = {}  # by index in `_names`
        for stage in model.stages.values():
            for name, module in stage.named_modules():
                dispatcher = getattr(module, "dispatcher", None)
                if name in self._names and isinstance(dispatcher, PaddedTokenDispatcher):
                    self.dispatchers[self._names.index(name)] = dispatcher

    @staticmethod
    def is_enabled(model: BuiltModel) -> bool:
        factor = model.config.parallel.moe_expert_rank_capacity_factor
        return model.context.group("ep").size > 1 and bool(factor)

    def after_update(self, update: Update, sums: Tensor, *, is_logged: bool) -> Tensor:
        """[layers + 2] int64, the maxima over all ranks.

        Of each layer, the most tokens and the index of their rank as one number; then the pairs of
        a token and an expert, and 1 if sizes were exact.
        """
        numbers = torch.zeros(len(self._names) + 2, dtype=torch.int64, device=self._device)
        for layer, dispatcher in self.dispatchers.items():
            assert dispatcher.peak is not None, "every layer has seen the microbatches of the step"
            numbers[layer] = dispatcher.peak.long() * self._world.size + self._world.index
            numbers[NUM_PAIRS] = dispatcher.num_pairs
            numbers[IS_EXACT] = dispatcher.is_exact
            dispatcher.peak = None
        all_reduce(numbers, self._world, op="max")
        return numbers

    def metrics(self, numbers: Sequence[float]) -> dict[str, Any]:
        """The capacity factor that the step needs; a `skip_reason` if it exceeds the setting."""
        peaks = [int(number) for number in numbers[:NUM_PAIRS]]
        num_pairs, is_exact = int(numbers[NUM_PAIRS]), bool(numbers[IS_EXACT])
        capacity = int(self._factor * num_pairs / self._ep)
        # the first layer with too many tokens: later ones route numbers that are not finite
        peak = next((peak for peak in peaks if peak // self._world.size > capacity), max(peaks))
        most, rank = divmod(peak, self._world.size)
        needed = math.ceil(100 * most * self._ep / max(num_pairs, 1)) / 100
        entries: dict[str, Any] = {"moe_rank_capacity_factor": needed}
        if is_exact:
            entries["moe_exact_sizes"] = 1
        elif most > capacity:
            entries["moe_over_rank_capacity"] = 1
            name = self._names[peaks.index(peak)]
            entries["skip_reason"] = (
                f"{name} of rank {rank} had {most:,} tokens for a rank of ep that takes "
                f"{capacity:,}: set --moe-expert-rank-capacity-factor {needed} or more"
            )
        return entries

    def wants_repeat(self, metrics: Mapping[str, Any]) -> bool:
        """Whether a rank had too many tokens for another one."""
        is_over = "moe_over_rank_capacity" in metrics
        if is_over:
            log.info("taken again with exact sizes: %s", metrics["skip_reason"])
        return is_over

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Send exact numbers of tokens."""
        for dispatcher in self.dispatchers.values():
            dispatcher.is_exact = True
        try:
            yield
        finally:
            for dispatcher in self.dispatchers.values():
                dispatcher.is_exact = False
