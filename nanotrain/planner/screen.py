"""What `nanotrain plan` prints: one screen, JSON, the picture of a step, and the table of a search."""

from pathlib import Path
from typing import Any

from nanotrain.config.config import Config
from nanotrain.config.schema import ENTRIES, argument_of
from nanotrain.parallel.pp.draw import save_png
from nanotrain.plan.memory_plan import ROWS
from nanotrain.planner.prediction import Prediction
from nanotrain.planner.search import Search, layout_of
from nanotrain.planner.step_time import StepClock, StepTime
from nanotrain.quantities import count_of, describe_bytes, describe_count


def training_of(prediction: Prediction, tokens: float) -> dict[str, float]:
    """Days and GPU-hours of a training of so many tokens at the predicted speed."""
    world_size = prediction.scenario.world_size
    seconds = tokens / (prediction.time.tokens_per_s_per_gpu * world_size)
    return {"days": seconds / 86_400, "gpu_hours": seconds / 3600 * world_size}


def parts_of(time: StepTime) -> dict[str, float]:
    """Seconds of a step by what they are spent on, the exposed communication by group; they add up
    to the step.
    """
    exposed = {f"exposed {group}": seconds for group, seconds in time.exposed.items()}
    last = {name: getattr(time, name) for name in ("bubble", "optimizer", "host", "data")}
    return {"compute": time.compute, **exposed, **last}


def screen(
    prediction: Prediction, *, tokens: float | None = None, change: Prediction | None = None
) -> str:
    """One screen: layout, memory, step, throughput, what bounds the step, and the next best change.

    Args:
        prediction: memory and time of a scenario.
        tokens: tokens of the training; None for a screen without its cost.
        change: the next best change; None if there is none.
    """
    time, memory, scenario = prediction.time, prediction.memory, prediction.scenario
    where = f" on pipeline rank {memory.pp_rank}" if scenario.sizes["pp"] > 1 else ""
    left = f"{describe_bytes(abs(prediction.headroom))} {'are left' if prediction.headroom >= 0 else 'too much'}"
    parts, speed = parts_of(time), time.tokens_per_s_per_gpu
    bound = max(parts, key=lambda name: parts[name])
    lines = [
        f"{count_of(scenario.world_size, 'GPU')} {scenario.gpu.name}, engine {scenario.engine.name}",
        f"layout      {layout_text(prediction)}",
        f"memory      {describe_bytes(memory.reserved)} of {describe_bytes(scenario.gpu.memory_bytes)}{where}; {left}",
        *(f"  {kind:<22}{size:>12}" for kind, size in memory.rows().items()),
        f"step        {time.total:.3f} s, likely {time.likely[0]:.3f} to {time.likely[1]:.3f} s",
        *(
            f"  {name:<22}{s * 1e3:>9,.1f} ms{s / time.total:>7.1%}"
            for name, s in parts.items()
            if s > 5e-5
        ),
        f"throughput  {speed:,.0f} tokens/s per GPU, {describe_count(speed * scenario.world_size)} in all, "
        f"MFU {time.mfu:.1%}",
    ]
    if tokens:
        cost = "{days:,.1f} days, {gpu_hours:,.0f} GPU-hours".format(
            **training_of(prediction, tokens)
        )
        lines.append(f"training    {describe_count(tokens)} tokens: {cost}")
    lines.append(f"bound by    {bound}, {parts[bound] / time.total:.0%} of the step")
    better = "none of the single changes is faster"
    if change:
        total, flags = change.time.total, flags_of(change.scenario.config, scenario.config)
        better = f"{flags}: step {total:.3f} s ({total / time.total - 1:+.1%})"
    return "\n".join([*lines, f"next change {better}"])


def layout_text(prediction: Prediction) -> str:
    """The layout in words: "tp 8, pp 4 (interleaved, 2 virtual stages), dp 16, ...\""""
    scenario, sizes = prediction.scenario, prediction.scenario.sizes
    parallel, memory, train = (
        scenario.config.parallel,
        scenario.config.memory,
        scenario.config.train,
    )
    axes = [f"{axis} {sizes[axis]}" for axis in ("tp", "cp", "pp") if sizes[axis] > 1]
    if sizes["pp"] > 1:
        virtual = parallel.num_virtual_stages_per_pipeline_rank
        axes[-1] += (
            f" ({parallel.pipeline_schedule}{f', {virtual} virtual stages' if virtual > 1 else ''})"
        )
    axes.append(f"dp {sizes['dp']} {parallel.data_parallel_sharding_strategy}")
    if parallel.num_distributed_optimizer_instances > 1:
        axes[-1] += f" in {parallel.num_distributed_optimizer_instances} instances"
    if scenario.shape.moe:
        axes += [f"ep {sizes['ep']}", f"etp {sizes['etp']}"]
    batch = f"micro-batch {train.micro_batch_size}, {count_of(scenario.pipeline.num_microbatches, 'microbatch')}"
    recompute = " ".join([memory.recompute_granularity or "none", *memory.recomputed_modules])
    return ", ".join(
        [
            *axes,
            f"{batch} of a global batch of {train.global_batch_size:,}",
            f"recompute {recompute}",
        ]
    )


def flags_of(chosen: Config, config: Config) -> str:
    """The arguments that change the layout of a configuration to that of another, for the same
    global batch.
    """
    now = layout_of(config)
    changed = {name: value for name, value in layout_of(chosen).items() if value != now[name]}
    if config.train.global_batch_size is None and not config.train.step_batch_size_schedule:
        changed["global_batch_size"] = chosen.train.global_batch_size
    return " ".join(
        argument_of(name, value) if value != [] else f"{ENTRIES[name].key}=[]"
        for name, value in changed.items()
    )


def as_values(prediction: Prediction, *, tokens: float | None = None) -> dict[str, Any]:
    """A prediction as plain values: seconds, bytes; arguments as for `screen`."""
    time, memory, scenario = prediction.time, prediction.memory, prediction.scenario
    return {
        "gpu": scenario.gpu.name,
        "engine": scenario.engine.name,
        "world_size": scenario.world_size,
        "sizes": dict(scenario.sizes),
        "num_microbatches": scenario.pipeline.num_microbatches,
        "fits": prediction.headroom >= 0,
        "memory_bytes": {name: getattr(memory, name) for name in (*ROWS, "pp_rank", "total")}
        | {"capacity": scenario.gpu.memory_bytes},
        "step_s": {
            "total": time.total,
            "low": time.likely[0],
            "high": time.likely[1],
            **parts_of(time),
        },
        "tokens_per_s_per_gpu": time.tokens_per_s_per_gpu,
        "mfu": time.mfu,
        **(training_of(prediction, tokens) if tokens else {}),
    }


def search_text(result: Search, config: Config, *, command: str) -> str:
    """The fastest layouts, those that need less memory, and the command line of the fastest."""
    lines = [f"{result.num_formed:,} layouts, {result.num_timed:,} may fit", "", "fastest"]
    lines += [_found_line(found) for found in result.best]
    if len(result.frontier) > 1:
        lines += ["", "less memory, slower", *(_found_line(found) for found in result.frontier[1:])]
    return "\n".join(
        [*lines, "", f"{command} {flags_of(result.best[0].scenario.config, config)}".rstrip()]
    )


def _found_line(found: Prediction) -> str:
    time, size = found.time, describe_bytes(found.memory.reserved)
    speed = f"{time.total:>9.3f} s {time.tokens_per_s_per_gpu:>9,.0f} tokens/s per GPU  MFU {time.mfu:>5.1%}"
    return f"{speed}  {size:>9}  {layout_text(found)}"


def draw(prediction: Prediction, path: Path) -> None:
    """Draw the schedule of a step with the predicted times of its actions."""
    timeline = StepClock(prediction.scenario).timeline()
    drawn = 1 + max(span.action.microbatch for span in timeline.spans[0])
    title = f"{layout_text(prediction)}: {prediction.time.total:.3f} s per step"
    save_png(timeline, path, title=f"{title}; the first {count_of(drawn, 'microbatch')} alone")
