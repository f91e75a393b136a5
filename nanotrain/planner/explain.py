"""`--explain`: operators of a step with sizes, times and rates, and the formulas of the totals."""

from collections.abc import Iterator

from nanotrain.planner.parts import Part
from nanotrain.planner.prediction import Prediction
from nanotrain.planner.scenario import Scenario
from nanotrain.planner.stage_time import Stages, Unit
from nanotrain.planner.step_time import COMPUTE_RANGE, NETWORK_RANGE, StepTime
from nanotrain.quantities import describe_bytes
from nanotrain.spec.counts import flops_per_token


def explain(prediction: Prediction) -> str:
    """The operators of every different module, and the formulas of the totals."""
    scenario = prediction.scenario
    lines: list[str] = []
    for unit, module in _different_units(scenario).items():
        lines += _unit_lines(unit, _module_name(module, scenario), scenario=scenario)
    return "\n".join([*lines, *_totals(prediction.time)])


def _different_units(scenario: Scenario) -> dict[Unit, str | int]:
    """The first module of every unit that several modules may share."""
    stages = Stages(scenario)
    modules: dict[Unit, str | int] = {}
    for specs in scenario.stages:
        for spec in specs:
            for unit, module in zip(stages.units(spec), stages.modules(spec), strict=True):
                modules.setdefault(unit, module)
    return modules


def _module_name(module: str | int, scenario: Scenario) -> str:
    if isinstance(module, str):
        return module
    return f"layer {module}" if module < scenario.shape.num_layers else f"mtp {module}"


def _unit_lines(unit: Unit, name: str, *, scenario: Scenario) -> Iterator[str]:
    """A title and the operators of a module."""
    title = f"{name} and those like it, a microbatch{_recomputed_text(unit)}"
    yield f"{title:<50}{'forward':>10}{'backward':>10}  ms"
    for part in unit.parts:
        backward = part.dgrad + part.wgrad
        times = f"{part.forward * 1e3:>10.3f}{backward * 1e3:>10.3f}"
        yield f"  {part.name:<48}{times}  {_describe_work(part, scenario)}".rstrip()
        waits = _collective_times(part)
        if waits:
            yield f"    {part.group} collectives: {', '.join(waits)} ms; overlap {part.hides}"
    yield ""


def _recomputed_text(unit: Unit) -> str:
    """Text on the operators of a module that run again in the backward; empty for none."""
    if not unit.recomputed:
        return ""
    if len(unit.recomputed) == len(unit.parts):
        return ", recomputed"
    return f", {len(unit.recomputed)} of {len(unit.parts)} recomputed"


def _collective_times(part: Part) -> list[str]:
    """Milliseconds of the collectives of an operator that take any time."""
    times = {
        "input": part.before,
        "output": part.after,
        "output gradient": part.first,
        "input for the weight gradient": part.again,
        "input gradient": part.last,
    }
    return [f"{name} {seconds * 1e3:.3f}" for name, seconds in times.items() if seconds]


def _describe_work(part: Part, scenario: Scenario) -> str:
    """Work of an operator's forward, its rate, and the share of the GPU's peak."""
    gpu = scenario.gpu
    seconds = max(part.forward, 1e-12)
    if part.flops:
        dtype = _product_dtype(part, scenario)
        peak = gpu.peak(dtype)
        rate = part.flops / seconds
        sizes = " x ".join(f"{size:,}" for size in part.sizes)
        operator = f"product {sizes}" if part.sizes else "attention"
        work = f"{operator}: {part.flops / 1e9:,.1f} GFLOP, {rate / 1e12:,.0f} TFLOP/s"
        return f"{work}, {rate / peak:.0%} of {peak / 1e12:,.0f} in {dtype}"
    if part.num_bytes:
        rate = part.num_bytes / seconds
        bandwidth = gpu.memory_bandwidth
        share = f"{rate / bandwidth:.0%} of {bandwidth / 1e12:.2f} TB/s"
        return f"{describe_bytes(int(part.num_bytes))}: {rate / 1e12:.2f} TB/s, {share}"
    return ""


def _product_dtype(part: Part, scenario: Scenario) -> str:
    """The dtype in which an operator computes its products."""
    is_linear = part.sizes and part.name != "head"
    return scenario.matmul_dtype if is_linear else scenario.config.precision.params_dtype


def _totals(time: StepTime) -> Iterator[str]:
    """The formula of every total of the screen."""
    scenario = time.scenario
    gpu = scenario.gpu
    yield (
        "compute     sum of these operators over the stages and microbatches of a rank; "
        "host: what is launched later than that"
    )
    yield (
        "exposed     collectives without the operators beside them; "
        "a collective takes steps x latency + bytes / bandwidth"
    )
    yield (
        "bubble      end of the schedule without compute, host and exposed seconds "
        "of the rank that ends last"
    )
    update_bytes = scenario.engine.optimizer.update_bytes
    shards = len(scenario.ranks("dp_shard"))
    bandwidth = f"{gpu.memory_efficiency:.0%} of {gpu.memory_bandwidth / 1e12:.2f} TB/s"
    yield f"optimizer   {update_bytes:g} bytes per parameter / {shards:,} ranks at {bandwidth}"

    seq_length = scenario.config.data.seq_length
    samples = f"{scenario.config.train.global_batch_size:,} samples x {seq_length:,} tokens"
    speed = f"{time.tokens_per_s_per_gpu:,.0f}"
    yield f"tokens/s    {samples} / {time.total:.3f} s / {scenario.world_size:,} GPUs = {speed}"
    gigaflops = flops_per_token(scenario.shape, seq_length) / 1e9
    peak = f"{time.peak_flops / 1e12:,.0f} TFLOP/s"
    work = f"{speed} tokens/s x {gigaflops:,.2f} GFLOP per token"
    yield f"MFU         {work} / {peak} = {time.mfu:.1%}"
    yield (
        f"range       {COMPUTE_RANGE:.0%} of what computes and {NETWORK_RANGE:.0%} of what waits "
        "for other GPUs"
    )
