"""Routers in a run: statistics collected once per step on the device, expert biases updated and kept in checkpoints."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nanotrain.comm.collectives import all_gather_object, all_reduce
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import ModelConfig
from nanotrain.model.router_stats import (
    NUM_SCALARS,
    RouterMetrics,
    collect_router_sums,
    expert_biases,
    routers_of,
    update_expert_bias,
)
from nanotrain.model.transformer import Stage
from nanotrain.spec.boxes import TensorBox


class ModelRouters:
    """The routers of all stages of the model; their statistics form one vector.

    Args:
        stages: of this rank.
        model_config: of the model.
        context: the groups; tp and dp_cp together span the ranks that route tokens of a stage.
    """

    def __init__(self, stages: Mapping[int, Stage], model_config: ModelConfig, *, context: ParallelContext) -> None:
        moe = model_config.moe
        self._rate = 0.0 if moe is None else moe.router_bias_update_rate
        self._routers = {name: router for stage in stages.values() for name, router in routers_of(stage).items()}
        self._groups, self._pp = (context.group("tp"), context.group("dp_cp")), context.group("pp")
        self._device, self._length = context.device, NUM_SCALARS + (0 if moe is None else moe.num_experts)
        self._names: tuple[str, ...] = ()  # of the whole model
        if moe is not None:
            self._names = tuple(name for names in all_gather_object([*self._routers], self._pp) for name in names)

    def balance(self) -> Tensor | None:
        """Collect the statistics of this step and update the expert biases, without waiting for the device.

        Returns:
            the sums of every router of the model over all ranks, flat fp64; None for a dense model.
        """
        if not self._names:
            return None
        sums = collect_router_sums(self._routers, self._groups)
        update_expert_bias(self._routers, sums, rate=self._rate)
        none = torch.zeros(self._length, dtype=torch.float64, device=self._device)
        total = torch.cat([sums.get(name, none) for name in self._names])
        all_reduce(total, self._pp)  # every router is on one stage
        return total

    def metrics(self, sums: Sequence[float]) -> dict[str, RouterMetrics]:
        """The metrics of every router of the model by name, from what `balance` returned."""
        if not self._names:
            return {}
        starts = range(0, len(sums), self._length)
        return {
            name: RouterMetrics.of(sums[start : start + self._length])
            for name, start in zip(self._names, starts, strict=True)
        }


def router_biases(stages: Mapping[int, Stage]) -> dict[TensorBox, torch.Tensor]:
    """The expert biases of this rank's routers by their names in a checkpoint; replicated over all ranks of a stage."""
    return {
        TensorBox.full(name, bias.shape): bias
        for stage in stages.values()
        for name, bias in expert_biases(stage).items()
    }


def router_biases_to_save(stages: Mapping[int, Stage], context: ParallelContext) -> dict[TensorBox, torch.Tensor]:
    """The expert biases that this rank saves: all of them on the first rank of a stage, none elsewhere."""
    is_first = context.group("tp").is_first and context.group("dp_cp").is_first
    return router_biases(stages) if is_first else {}
