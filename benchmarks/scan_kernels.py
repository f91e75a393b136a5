"""Launches and bytes of the scans of three recipes, by the kernels that compute them: counted.

    python benchmarks/scan_kernels.py

One layer and microbatch of one rank. `torch` is the chain of operators in fp32, counted on the meta
device; the rows of kernels are counted from the tensors that they are launched with
(nanotrain/spec/scan_kernels.py). Milliseconds are the planner's for an H100.
"""

from dataclasses import replace

from nanotrain.config.load import load
from nanotrain.planner.hardware import gpu_of
from nanotrain.planner.operator_time import OperatorTimes
from nanotrain.planner.scenario import scenario_of
from nanotrain.spec.kinds.block import block_operators
from nanotrain.spec.operators import Scan, ScanCost, ScanPasses

RECIPES = ("nemotron3_nano_30b_a3b", "qwen3_next_80b_a3b", "kimi_linear_48b_a3b")
GB = 1e9


def rows(recipe: str) -> list[tuple[str, str, ScanPasses, float]]:
    """Rule, row, costs, and milliseconds of forward and backward."""
    loaded = load([f"+config={recipe}", "--mock-data"])
    config = replace(loaded.config, model=replace(loaded.config.model, vocab_size=131072))
    scenario = scenario_of(config, 64, gpu=gpu_of("h100"))
    times = OperatorTimes(scenario)
    layers = range(scenario.shape.num_layers)
    operators = [each for layer in layers for each in block_operators(times.sizes, layer)]
    scan = next(each for each in operators if isinstance(each, Scan))
    table = []
    passes = {"torch": ScanPasses((scan.forward,), (scan.backward,)), **scan.kernels}
    for name, costs in passes.items():
        if name == "torch":
            both = (scan.forward, scan.backward)
            seconds = sum(map(times._torch_scan_s, both))
        else:
            part = times._kernel_scan(scan, costs)
            seconds = part.forward + part.dgrad
        table.append((scan.rule, name, costs, 1e3 * seconds))
    return table


def describe(costs: tuple[ScanCost, ...]) -> str:
    """Launches and bytes of a pass."""
    launches = sum(cost.launches for cost in costs)
    num_bytes = sum(cost.num_bytes for cost in costs)
    return f"{launches:,} | {num_bytes / GB:.2f}"


def main() -> None:
    """Print the table."""
    print("| recipe | rule | kernels | launches | GB | launches back | GB back | ms |")
    print("|---|---|---|---:|---:|---:|---:|---:|")
    for recipe in RECIPES:
        for rule, name, costs, milliseconds in rows(recipe):
            forward, backward = describe(costs.forward), describe(costs.backward)
            print(f"| {recipe} | {rule} | {name} | {forward} | {backward} | {milliseconds:.2f} |")


if __name__ == "__main__":
    main()
