"""Routers in a run: statistics collected once per step, expert biases updated and kept in checkpoints."""

from collections.abc import Mapping

import torch

from nanotrain.comm.collectives import all_gather_object
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import ModelConfig
from nanotrain.model.router_stats import RouterMetrics, collect_router_metrics, expert_biases, update_expert_bias
from nanotrain.model.transformer import Stage
from nanotrain.topology.boxes import TensorBox


def balance_routers(
    stages: Mapping[int, Stage], model_config: ModelConfig, *, context: ParallelContext
) -> dict[str, RouterMetrics]:
    """Collect the statistics of all routers in this step, and update the expert biases.

    Args:
        stages: of this rank.
        model_config: of the model.
        context: the groups; tp and dp_cp together span the ranks that route tokens.

    Returns:
        the metrics of every router of the model by name, the same on every rank; empty for a dense model.
    """
    if model_config.moe.num_experts is None:
        return {}
    metrics: dict[str, RouterMetrics] = {}
    for stage in stages.values():
        collected = collect_router_metrics(stage, (context.group("tp"), context.group("dp_cp")))
        update_expert_bias(stage, collected, rate=model_config.moe.router_bias_update_rate)
        metrics |= collected
    gathered = all_gather_object(metrics, context.group("pp"))
    return {name: router for stage_metrics in gathered for name, router in stage_metrics.items()}


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
