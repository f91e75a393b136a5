"""Output of `nanotrain plan`: a screen, JSON, a picture of a step, and the table of a search."""

from pathlib import Path
from typing import Any

from nanotrain.config.config import Config
from nanotrain.config.schema import ENTRIES, argument_of
from nanotrain.parallel.pp.draw import save_png
from nanotrain.plan.memory_plan import ROWS
from nanotrain.planner.launch_lines import launch_lines
from nanotrain.planner.prediction import Prediction
from nanotrain.planner.scenario import Scenario
from nanotrain.planner.search import NUM_BEST, TIE, Search, layout_of
from nanotrain.planner.step_time import StepClock, StepTime
from nanotrain.quantities import count_of, describe_bytes, describe_count

SHOWN_S = 5e-5  # parts of a step that take longer have a line
MIN_UNEVEN = 0.1  # share of a bubble from which on uneven stages are its cause


def training_of(prediction: Prediction, tokens: float) -> dict[str, float]:
    """Days and GPU-hours of a training of `tokens` tokens at the predicted speed."""
    world_size = prediction.scenario.world_size
    seconds = tokens / (prediction.time.tokens_per_s_per_gpu * world_size)
    return {"days": seconds / 86_400, "gpu_hours": seconds / 3600 * world_size}


def parts_of(time: StepTime) -> dict[str, float]:
    """Seconds of a step by cause, exposed communication by group; they add up to the step."""
    parts = {"compute": time.compute}
    for group, seconds in time.exposed.items():
        parts[f"exposed {group}"] = seconds
    parts["bubble"] = time.bubble
    parts["optimizer"] = time.optimizer
    parts["host"] = time.host
    parts["data"] = time.data
    return parts


def screen(
    prediction: Prediction, *, tokens: float | None = None, change: Prediction | None = None
) -> str:
    """One screen: layout, memory, step, throughput, bound, and the next best change.

    Args:
        prediction: memory and time of a scenario.
        tokens: tokens of the training; None for a screen without its cost.
        change: the next best change; None if there is none.
    """
    lines = _head_lines(prediction)
    if prediction.headroom < 0:
        return "\n".join([_misfit_line(prediction), *lines, _fitting_line(prediction, change)])
    scenario = prediction.scenario
    lines += _time_lines(prediction)
    if tokens:
        training = training_of(prediction, tokens)
        cost = f"{training['days']:,.1f} days, {training['gpu_hours']:,.0f} GPU-hours"
        lines.append(f"training    {describe_count(tokens)} tokens: {cost}")
    time = prediction.time
    parts = parts_of(time)
    bound = max(parts, key=lambda name: parts[name])
    lines.append(f"bound by    {bound}, {parts[bound] / time.total:.0%} of the step")
    if bound == "compute":
        lines[-1] += f": {_compute_text(time)}"
    better = "none of the single changes is faster"
    if change:
        total = change.time.total
        flags = flags_of(change.scenario.config, scenario.config)
        better = f"{flags}: step {total:.3f} s ({total / time.total - 1:+.1%})"
    return "\n".join([*lines, f"next change {better}"])


def _head_lines(prediction: Prediction) -> list[str]:
    """Machine, layout and memory."""
    scenario = prediction.scenario
    gpus = count_of(scenario.world_size, "GPU")
    return [
        f"{gpus} {scenario.gpu.name}, engine {scenario.engine.name}",
        f"layout      {layout_text(prediction)}",
        *_memory_lines(prediction),
    ]


def _misfit_line(prediction: Prediction) -> str:
    """The first line of a layout that needs more memory than a GPU has."""
    needed = describe_bytes(prediction.memory.reserved)
    capacity = describe_bytes(prediction.scenario.gpu.memory_bytes)
    excess = describe_bytes(-prediction.headroom)
    return f"DOES NOT FIT: a rank needs {needed}, its GPU has {capacity}, {excess} too little"


def _fitting_line(prediction: Prediction, change: Prediction | None) -> str:
    """The line that names a change with which a layout fits, for one that does not fit."""
    if change is None:
        return "fits        no single change of the layout does; --search tries all layouts"
    flags = flags_of(change.scenario.config, prediction.scenario.config)
    needed = describe_bytes(change.memory.reserved)
    return f"fits        with {flags}: {needed}, step {change.time.total:.3f} s"


def _compute_text(time: StepTime) -> str:
    """Shares of matrix products and of memory-bound operators in the compute time."""
    share = time.products / time.compute
    rate = time.mfu * time.total / time.products if time.products else 0.0
    return (
        f"{share:.0%} products and attention at {rate:.0%} of the peak, "
        f"{1 - share:.0%} memory-bound operators"
    )


def _bubble_text(time: StepTime) -> str:
    """Why pipeline ranks wait: uneven stages, or the start and the end of a step."""
    share = time.uneven / time.bubble
    if time.busiest == time.pp_rank or share < MIN_UNEVEN:
        return "the pipeline fills and drains"
    return (
        f"{share:.0%} of it since pipeline rank {time.busiest} has more work than rank "
        f"{time.pp_rank}, which ends last"
    )


def _memory_lines(prediction: Prediction) -> list[str]:
    """The reserved memory and its kinds."""
    memory = prediction.memory
    scenario = prediction.scenario
    used = f"{describe_bytes(memory.reserved)} of {describe_bytes(scenario.gpu.memory_bytes)}"
    if scenario.sizes["pp"] > 1:
        used += f" on pipeline rank {memory.pp_rank}"
    headroom = describe_bytes(abs(prediction.headroom))
    rest = f"{headroom} are left" if prediction.headroom >= 0 else f"{headroom} too much"
    lines = [f"memory      {used}; {rest}"]
    lines += [f"  {kind:<22}{size:>12}" for kind, size in memory.rows().items()]
    return lines + memory.host_lines()


def _time_lines(prediction: Prediction) -> list[str]:
    """The step, its parts and the throughput."""
    time = prediction.time
    likely = f"likely {time.likely.low:.3f} to {time.likely.high:.3f} s"
    lines = [f"step        {time.total:.3f} s, {likely}"]
    for name, seconds in parts_of(time).items():
        if seconds > SHOWN_S:
            line = f"  {name:<22}{seconds * 1e3:>9,.1f} ms{seconds / time.total:>7.1%}"
            lines.append(f"{line}  {_bubble_text(time)}" if name == "bubble" else line)
    speed = time.tokens_per_s_per_gpu
    in_all = describe_count(speed * prediction.scenario.world_size)
    lines.append(f"throughput  {speed:,.0f} tokens/s per GPU, {in_all} in all, MFU {time.mfu:.1%}")
    return lines


def layout_text(prediction: Prediction) -> str:
    """The layout in words: "tp 8, pp 4 (interleaved, 2 virtual stages), dp 16, ...\""""
    scenario = prediction.scenario
    train = scenario.config.train
    memory = scenario.config.memory
    num_microbatches = count_of(scenario.pipeline.num_microbatches, "microbatch")
    recompute = " ".join([memory.recompute_granularity or "none", *memory.recomputed_modules])
    parts = [
        *_axes(scenario),
        f"micro-batch {train.micro_batch_size}",
        f"{num_microbatches} of a global batch of {train.global_batch_size:,}",
        f"recompute {recompute}",
    ]
    return ", ".join(parts)


def _axes(scenario: Scenario) -> list[str]:
    """Sizes of the groups, with the schedule and the sharding strategy."""
    sizes = scenario.sizes
    parallel = scenario.config.parallel
    axes = [f"{axis} {sizes[axis]}" for axis in ("tp", "cp") if sizes[axis] > 1]
    if sizes["pp"] > 1:
        schedule = parallel.pipeline_schedule
        virtual = parallel.num_virtual_stages_per_pipeline_rank
        if virtual > 1:
            schedule += f", {virtual} virtual stages"
        axes.append(f"pp {sizes['pp']} ({schedule})")
    data_parallel = f"dp {sizes['dp']} {parallel.data_parallel_sharding_strategy}"
    if parallel.num_distributed_optimizer_instances > 1:
        data_parallel += f" in {parallel.num_distributed_optimizer_instances} instances"
    axes.append(data_parallel)
    if scenario.shape.moe:
        axes += [f"ep {sizes['ep']}", f"etp {sizes['etp']}"]
    return axes


def flags_of(chosen: Config, config: Config) -> str:
    """Arguments that give `config` the layout of `chosen`, for the same global batch."""
    now = layout_of(config)
    changed = {name: value for name, value in layout_of(chosen).items() if value != now[name]}
    if config.train.global_batch_size is None and not config.train.step_batch_size_schedule:
        changed["global_batch_size"] = chosen.train.global_batch_size
    flags = []
    for name, value in changed.items():
        is_empty_list = value == []
        flags.append(f"{ENTRIES[name].key}=[]" if is_empty_list else argument_of(name, value))
    return " ".join(flags)


def as_values(prediction: Prediction, *, tokens: float | None = None) -> dict[str, Any]:
    """A prediction as plain values: seconds, bytes; arguments as for `screen`."""
    time = prediction.time
    scenario = prediction.scenario
    memory_bytes = {name: getattr(prediction.memory, name) for name in (*ROWS, "pp_rank", "total")}
    memory_bytes["capacity"] = scenario.gpu.memory_bytes
    step_s = {"total": time.total, "low": time.likely.low, "high": time.likely.high}
    values = {
        "gpu": scenario.gpu.name,
        "engine": scenario.engine.name,
        "world_size": scenario.world_size,
        "sizes": dict(scenario.sizes),
        "num_microbatches": scenario.pipeline.num_microbatches,
        "fits": prediction.headroom >= 0,
        "memory_bytes": memory_bytes,
        "step_s": step_s | parts_of(time),
        "tokens_per_s_per_gpu": time.tokens_per_s_per_gpu,
        "mfu": time.mfu,
    }
    if tokens:
        values |= training_of(prediction, tokens)
    return values


def shown_layouts(result: Search) -> list[Prediction]:
    """Layouts to print: the ties for the fastest, the simplest first, then the next best."""
    ties = list(result.ties[:NUM_BEST])
    others = [prediction for prediction in result.best if prediction not in result.ties]
    return [*ties, *others][: max(NUM_BEST, len(ties))]


def search_text(result: Search, config: Config, *, arguments: str) -> str:
    """The fastest layouts, those that need less memory, and the command lines of the first.

    Args:
        result: the search.
        config: configuration whose layouts were searched.
        arguments: arguments that give `config`.
    """
    lines = [f"{result.num_formed:,} layouts, {result.num_timed:,} may fit", "", "fastest"]
    if len(result.ties) > 1:
        lines[-1] += f" (=: within {TIE - 1:.0%} of the fastest, the simplest first)"
    shown = shown_layouts(result)
    for prediction in shown:
        mark = "=" if len(result.ties) > 1 and prediction in result.ties else " "
        lines.append(f"{mark}{_layout_line(prediction)}")
    if len(result.frontier) > 1:
        lines += ["", "less memory, slower"]
        lines += [f" {_layout_line(prediction)}" for prediction in result.frontier[1:]]
    scenario = shown[0].scenario
    chosen = f"{arguments} {flags_of(scenario.config, config)}".strip()
    gpus_per_node = scenario.gpu.gpus_per_node
    commands = launch_lines(chosen, world_size=scenario.world_size, gpus_per_node=gpus_per_node)
    return "\n".join([*lines, "", *commands])


def _layout_line(prediction: Prediction) -> str:
    """Time, throughput, memory and layout of one line of a search."""
    time = prediction.time
    size = describe_bytes(prediction.memory.reserved)
    speed = f"{time.tokens_per_s_per_gpu:>9,.0f} tokens/s per GPU  MFU {time.mfu:>5.1%}"
    return f"{time.total:>9.3f} s {speed}  {size:>9}  {layout_text(prediction)}"


def draw(prediction: Prediction, path: Path) -> None:
    """Draw the schedule of a step with the predicted times of its actions."""
    timeline = StepClock(prediction.scenario).timeline()
    num_drawn = 1 + max(span.action.microbatch for span in timeline.spans[0])
    title = f"{layout_text(prediction)}: {prediction.time.total:.3f} s per step"
    save_png(timeline, path, title=f"{title}; the first {count_of(num_drawn, 'microbatch')} alone")
