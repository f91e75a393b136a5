"""Planned steps of recipes without and with CUDA graphs, and the memory that graphs take.

    python benchmarks/cuda_graphs.py

For every recipe that may have graphs, as it is and with graphs: seconds per step by the planner,
launches of a forward and a backward of the first stage, and the planned bytes of the rank that needs
the most. Counted on a CPU; no GPU ran the graphs.
"""

from dataclasses import dataclass
from pathlib import Path

from nanotrain.cli.dry_run import complete
from nanotrain.config.config import Config
from nanotrain.config.flags import parse
from nanotrain.config.load import load_line
from nanotrain.config.rules.check import check_rules
from nanotrain.config.schema import with_values
from nanotrain.errors import ErrorCollector
from nanotrain.parallel.pp.actions import ActionKind
from nanotrain.plan.memory_plan import worst_memory
from nanotrain.planner.hardware import gpu_of
from nanotrain.planner.prediction import predict
from nanotrain.planner.scenario import scenario_of
from nanotrain.planner.stage_time import Stages

RECIPES = Path(__file__).parents[1] / "configs" / "config"


@dataclass(frozen=True)
class Plan:
    """What the planner says of a recipe."""

    seconds: float  # of a step
    launches: int  # by the host, of a forward and a backward of the first stage
    num_bytes: int  # of the rank that needs the most


def recipe_config(name: str) -> Config:
    """A recipe as it is."""
    return complete(load_line(parse([f"+config={name}"])))


def with_graphs(config: Config) -> Config:
    """The configuration with graphs, without the overlap that they exclude."""
    return with_values(
        config,
        {
            "train.cuda_graph_impl": "local",
            "parallel.tp_comm_overlap": False,
            "parallel.overlap_moe_expert_parallel_comm": False,
        },
    )


def refusal(config: Config) -> str:
    """Why graphs are refused; empty if they are not."""
    errors = ErrorCollector()
    check_rules(config, "layout", errors=errors)
    return str(errors.errors[0]).partition(":")[0] if errors.errors else ""


def plan_of(config: Config, world_size: int, gpu: str) -> Plan:
    """The plan of a configuration on a number of GPUs."""
    scenario = scenario_of(config, world_size, gpu=gpu_of(gpu), engine="nanotrain")
    stages = Stages(scenario)
    first = scenario.stages[0][0]
    forward = stages.streams(first, ActionKind.forward)
    backward = stages.streams(first, ActionKind.full_backward)
    return Plan(
        predict(scenario).time.total,
        forward.launches + backward.launches + forward.collectives + backward.collectives,
        worst_memory(config, world_size, device="cuda").reserved,
    )


def main() -> None:
    """Print the table."""
    print(
        "| recipe | GPUs | s per step | with graphs | launches | with graphs | GB | with graphs |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for path in sorted(RECIPES.glob("*.yaml")):
        name = path.stem
        recipe = recipe_config(name)
        config = with_graphs(recipe)
        reason = refusal(config)
        if reason:
            print(f"| {name} | | {reason} | | | | | |")
            continue
        world_size = ranks_of(name, config)
        before = plan_of(recipe, world_size, "h100")
        after = plan_of(config, world_size, "h100")
        print(
            f"| {name} | {world_size} | {before.seconds:.4g} | {after.seconds:.4g} "
            f"| {before.launches} | {after.launches} "
            f"| {before.num_bytes / 1e9:.1f} | {after.num_bytes / 1e9:.1f} |"
        )


def ranks_of(name: str, config: Config) -> int:
    """GPUs of a recipe: those in its name, or the fewest of its layout, at least one node."""
    if name.rpartition("_")[2].isdecimal():
        return int(name.rpartition("_")[2])
    parallel = config.parallel
    unit = (
        parallel.tensor_model_parallel_size
        * parallel.context_parallel_size
        * parallel.pipeline_model_parallel_size
    )
    expert_unit = parallel.expert_model_parallel_size * parallel.pipeline_model_parallel_size
    return max(8, unit, expert_unit)


if __name__ == "__main__":
    main()
