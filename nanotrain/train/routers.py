"""Routers in a run: their loads harvested once per step, their biases moved and kept in checkpoints."""

from collections.abc import Mapping

import torch

from nanotrain.comm.collectives import all_gather_object
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import ModelConfig
from nanotrain.model.router_load import RouterLoad, collect_router_loads, routers_of, update_expert_bias
from nanotrain.model.stage import Stage
from nanotrain.topology.boxes import TensorBox

PREFIX = "router/"  # of the names of biases in a checkpoint


def balance_routers(
    stages: Mapping[int, Stage], model: ModelConfig, *, context: ParallelContext
) -> dict[str, RouterLoad]:
    """Harvest what all routers have chosen in this step, and move their biases against it.

    Args:
        stages: of this rank.
        model: the whole model's shape.
        context: the groups; tp and dp_cp together span the ranks with tokens of their own.

    Returns:
        the load of every router of the whole model by name, the same on every rank; empty for a dense model.
    """
    if model.moe.num_experts is None:
        return {}
    loads: dict[str, RouterLoad] = {}
    for stage in stages.values():
        own = collect_router_loads(stage, (context.group("tp"), context.group("dp_cp")))
        update_expert_bias(stage, own, rate=model.moe.router_bias_update_rate)
        loads |= own
    everyone = all_gather_object(loads, context.group("pp"))
    return {name: load for held in everyone for name, load in held.items()}


def router_biases(stages: Mapping[int, Stage]) -> dict[TensorBox, torch.Tensor]:
    """The biases of this rank's routers, as a checkpoint keeps them; the same on every rank with these stages."""
    return {
        TensorBox.full(f"{PREFIX}{name}.expert_bias", router.expert_bias.shape): router.expert_bias
        for stage in stages.values()
        for name, router in routers_of(stage).items()
        if router.expert_bias is not None
    }


def router_biases_to_save(stages: Mapping[int, Stage], context: ParallelContext) -> dict[TensorBox, torch.Tensor]:
    """Those that this rank writes: of the ranks that hold a stage, the first."""
    is_first = context.group("tp").is_first and context.group("dp_cp").is_first
    return router_biases(stages) if is_first else {}
