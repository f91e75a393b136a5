"""`--explain`: the operators of a step, each with its sizes, time and efficiency, and the formula
of every total.
"""

from collections.abc import Iterator

from nanotrain.planner.hardware import read_data
from nanotrain.planner.parts import Part
from nanotrain.planner.prediction import Prediction
from nanotrain.planner.scenario import Scenario
from nanotrain.planner.stage_time import Stages, Unit
from nanotrain.planner.step_time import COMPUTE_RANGE, NETWORK_RANGE, StepTime
from nanotrain.quantities import describe_bytes
from nanotrain.spec.counts import flops_per_token

COLLECTIVES, TOTALS = (read_data("explain")[name] for name in ("collectives", "totals"))


def explain(prediction: Prediction) -> str:
    """The operators of every different module, and the formulas of the totals."""
    scenario, stages = prediction.scenario, Stages(prediction.scenario)
    names: dict[Unit, str | int] = {}
    for spec in (spec for rank in scenario.stages for spec in rank):
        for unit, name in zip(stages.units(spec), stages.modules(spec), strict=True):
            names.setdefault(unit, name)
    lines = [
        line for unit, name in names.items() for line in _unit_lines(unit, name, scenario=scenario)
    ]
    return "\n".join([*lines, _totals(prediction.time)])


def _unit_lines(unit: Unit, name: str | int, *, scenario: Scenario) -> Iterator[str]:
    if isinstance(name, int):
        name = f"{'layer' if name < scenario.shape.num_layers else 'mtp'} {name}"
    title = f"{name} and those like it, a microbatch{', recomputed' if unit.is_recomputed else ''}"
    yield f"{title:<50}{'forward':>10}{'backward':>10}  ms"
    for part in unit.parts:
        backward = part.dgrad + part.wgrad
        times = f"{part.forward * 1e3:>10.3f}{backward * 1e3:>10.3f}"
        yield f"  {part.name:<48}{times}  {_work(part, scenario)}".rstrip()
        waits = [
            f"{what} {getattr(part, name) * 1e3:.3f}"
            for name, what in COLLECTIVES.items()
            if getattr(part, name)
        ]
        if waits:
            yield f"    {part.group} collectives: {', '.join(waits)} ms; overlap {part.hides}"
    yield ""


def _work(part: Part, scenario: Scenario) -> str:
    """What an operator's forward does, at which rate, and the share of the GPU's peak."""
    gpu, seconds = scenario.gpu, max(part.forward, 1e-12)
    if part.flops:
        dtype = (
            scenario.matmul_dtype
            if part.sizes and part.name != "head"
            else scenario.config.precision.params_dtype
        )
        shape = (
            f"product {' x '.join(f'{size:,}' for size in part.sizes)}"
            if part.sizes
            else "attention"
        )
        rate = part.flops / seconds
        of_peak = f"{rate / gpu.peak(dtype):.0%} of {gpu.peak(dtype) / 1e12:,.0f} in {dtype}"
        return f"{shape}: {part.flops / 1e9:,.1f} GFLOP, {rate / 1e12:,.0f} TFLOP/s, {of_peak}"
    rate = part.num_bytes / seconds
    share = f"{rate / gpu.memory_bandwidth:.0%} of {gpu.memory_bandwidth / 1e12:.2f} TB/s"
    return (
        f"{describe_bytes(int(part.num_bytes))}: {rate / 1e12:.2f} TB/s, {share}"
        if part.num_bytes
        else ""
    )


def _totals(time: StepTime) -> str:
    scenario, ranges = (
        time.scenario,
        {"compute_range": COMPUTE_RANGE, "network_range": NETWORK_RANGE},
    )
    numbers = {
        "terabytes": scenario.gpu.memory_bandwidth / 1e12,
        "shards": len(scenario.ranks("dp_shard")),
        "gigaflops": flops_per_token(scenario.shape, scenario.config.data.seq_length) / 1e9,
        "peak_tflops": time.peak_flops / 1e12,
    }
    return str(TOTALS).rstrip().format(time=time, scenario=scenario, **numbers, **ranges)
