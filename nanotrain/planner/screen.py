"""What `nanotrain plan` prints: one screen, JSON, the picture of a step, and the table of a search."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nanotrain.config.config import Config
from nanotrain.config.option import flag_of
from nanotrain.config.schema import ENTRIES, value_of
from nanotrain.planner.prediction import Prediction
from nanotrain.planner.search import Found, Search, Values
from nanotrain.planner.step_time import StepTime
from nanotrain.quantities import count_of, describe_bytes, describe_count

KINDS = ("params", "grads", "optimizer", "activations", "buffers", "working", "overhead")  # of memory
# by the first letter of a span
COLORS = {"F": "#4c78a8", "B": "#f58518", "I": "#e45756", "W": "#72b7b2", "r": "#bab0ac"}
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "r": "gradient reduction"}
DAY_S = 86_400
MAX_RANKS = 16  # pipeline ranks of a picture


@dataclass(frozen=True)
class Training:
    """A training of a number of tokens at the predicted speed."""

    tokens: float  # tokens to train on
    days: float
    gpu_hours: float

    @classmethod
    def of(cls, prediction: Prediction, tokens: float) -> "Training":
        """The training of a prediction."""
        seconds = tokens / (prediction.time.tokens_per_s_per_gpu * prediction.scenario.world_size)
        return cls(tokens, seconds / DAY_S, seconds / 3600 * prediction.scenario.world_size)


def parts_of(time: StepTime) -> dict[str, float]:
    """Seconds of a step by what they are spent on, the exposed communication by group; they add up to the step."""
    exposed = {f"exposed {group}": seconds for group, seconds in time.exposed.items()}
    return {"compute": time.compute, **exposed, "bubble": time.bubble, "optimizer": time.optimizer} | {
        "host": time.host,
        "data": time.data,
    }


def screen(prediction: Prediction, *, training: Training | None = None, change: Found | None = None) -> str:
    """One screen: layout, memory, step, throughput, what bounds the step, and the next best change."""
    time, memory, scenario = prediction.time, prediction.memory, prediction.scenario
    lines = [
        f"{count_of(scenario.world_size, 'GPU')} {scenario.gpu.name}, engine {scenario.engine.name}",
        *_row("layout", layout_text(prediction)),
        *_row("memory", _memory_text(prediction)),
        *(f"  {kind:<22}{describe_bytes(getattr(memory, kind)):>12}" for kind in KINDS if getattr(memory, kind)),
        *_row("step", f"{time.total:.3f} s, likely {time.low:.3f} to {time.high:.3f} s"),
        *(_share(name, seconds, total=time.total) for name, seconds in parts_of(time).items() if seconds > 5e-5),
        *_row("throughput", _throughput_text(prediction)),
    ]
    if training:
        cost = (
            f"{describe_count(training.tokens)} tokens: {training.days:,.1f} days, {training.gpu_hours:,.0f} GPU-hours"
        )
        lines += _row("training", cost)
    bound, seconds = max(parts_of(time).items(), key=lambda item: item[1])
    lines += _row("bound by", f"{bound}, {seconds / time.total:.0%} of the step")
    lines += _row("next change", _change_text(change, prediction) if change else "none of the single changes is faster")
    return "\n".join(lines)


def layout_text(prediction: Prediction) -> str:
    """The layout in words: "tp 8, pp 4 (interleaved, 2 virtual stages), dp 16, ...\""""
    scenario, sizes = prediction.scenario, prediction.scenario.sizes
    parallel, memory, train = scenario.config.parallel, scenario.config.memory, scenario.config.train
    axes = [f"{axis} {sizes[axis]}" for axis in ("tp", "cp", "pp") if sizes[axis] > 1]
    if sizes["pp"] > 1:
        virtual = parallel.num_virtual_stages_per_pipeline_rank
        axes[-1] += f" ({parallel.pipeline_schedule}{f', {virtual} virtual stages' if virtual > 1 else ''})"
    axes.append(f"dp {sizes['dp']} {parallel.data_parallel_sharding_strategy}")
    if parallel.num_distributed_optimizer_instances > 1:
        axes[-1] += f" in {parallel.num_distributed_optimizer_instances} instances"
    if scenario.shape.moe:
        axes += [f"ep {sizes['ep']}", f"etp {sizes['etp']}"]
    batch = f"micro-batch {train.micro_batch_size}, {count_of(scenario.pipeline.num_microbatches, 'microbatch')}"
    recompute = " ".join([memory.recompute_granularity or "none", *memory.recomputed_modules])
    return ", ".join([*axes, f"{batch} of a global batch of {train.global_batch_size:,}", f"recompute {recompute}"])


def _row(name: str, text: str) -> list[str]:
    return [f"{name:<12}{text}"]


def _share(name: str, seconds: float, *, total: float) -> str:
    return f"  {name:<22}{seconds * 1e3:>9,.1f} ms{seconds / total:>7.1%}"


def _memory_text(prediction: Prediction) -> str:
    memory = prediction.memory
    where = f" on pipeline rank {memory.pp_index}" if prediction.scenario.sizes["pp"] > 1 else ""
    left = (
        f"{describe_bytes(memory.headroom)} are left" if memory.fits else f"{describe_bytes(-memory.headroom)} too much"
    )
    return f"{describe_bytes(memory.reserved)} of {describe_bytes(memory.capacity)}{where}; {left}"


def _throughput_text(prediction: Prediction) -> str:
    time = prediction.time
    all_gpus = describe_count(time.tokens_per_s_per_gpu * prediction.scenario.world_size)
    return f"{time.tokens_per_s_per_gpu:,.0f} tokens/s per GPU, {all_gpus} in all, MFU {time.mfu:.1%}"


def _change_text(change: Found, prediction: Prediction) -> str:
    flags = flags_of(change.values, prediction.scenario.config)
    total = change.prediction.time.total
    return f"{flags}: step {total:.3f} s ({total / prediction.time.total - 1:+.1%})"


def flags_of(values: Values, config: Config) -> str:
    """The flags that change a configuration to these settings."""
    return " ".join(
        _flag(name, value) for name, value in values.items() if value_of(config, ENTRIES[name].key) != value
    )


def _flag(name: str, value: Any) -> str:
    flag = flag_of(name)
    if isinstance(value, bool):
        return flag if value else flag.replace("--", "--no-", 1)
    if isinstance(value, list):
        return f"{flag} {' '.join(value)}" if value else f"{ENTRIES[name].key}=[]"
    return f"{flag} {'null' if value is None else value}"


def as_json(prediction: Prediction, *, training: Training | None = None) -> dict[str, Any]:
    """A prediction as plain values: seconds, bytes."""
    time, memory, scenario = prediction.time, prediction.memory, prediction.scenario
    return {
        "gpu": scenario.gpu.name,
        "engine": scenario.engine.name,
        "world_size": scenario.world_size,
        "sizes": dict(scenario.sizes),
        "num_microbatches": scenario.pipeline.num_microbatches,
        "fits": memory.fits,
        "memory_bytes": {field.name: getattr(memory, field.name) for field in fields(memory)} | {"total": memory.total},
        "step_s": {"total": time.total, "low": time.low, "high": time.high, **parts_of(time)},
        "tokens_per_s_per_gpu": time.tokens_per_s_per_gpu,
        "mfu": time.mfu,
        **({"days": training.days, "gpu_hours": training.gpu_hours} if training else {}),
    }


def search_text(result: Search, config: Config, *, command: str) -> str:
    """The fastest layouts, those that need less memory, and the command line of the fastest."""
    lines = [f"{result.num_formed:,} layouts, {result.num_timed:,} may fit", "", "fastest"]
    lines += [_found_line(found) for found in result.best]
    if len(result.frontier) > 1:
        lines += ["", "less memory, slower", *(_found_line(found) for found in result.frontier[1:])]
    return "\n".join([*lines, "", f"{command} {flags_of(result.best[0].values, config)}".rstrip()])


def _found_line(found: Found) -> str:
    time, memory = found.prediction.time, found.prediction.memory
    speed = f"{time.total:>9.3f} s {time.tokens_per_s_per_gpu:>9,.0f} tokens/s per GPU  MFU {time.mfu:>5.1%}"
    return f"{speed}  {describe_bytes(memory.reserved):>9}  {layout_text(found.prediction)}"


def draw(prediction: Prediction, path: Path) -> None:
    """Draw the timeline of one step: a row per pipeline rank, and one for its communication of data parallelism."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = prediction.time.spans[:MAX_RANKS]
    rows = [
        (f"pp {rank} {stream}", list(_bars(spans, stream)))
        for rank, spans in enumerate(ranks)
        for stream in _streams(spans)
    ]
    figure = Figure(figsize=(14, 1.2 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for row, (_, bars) in enumerate(rows):
        for kind in {kind for _, kind in bars}:
            axes.broken_barh([bar for bar, each in bars if each == kind], (row - 0.4, 0.8), color=COLORS[kind])
    kinds = sorted({kind for _, bars in rows for _, kind in bars}, key=list(NAMES).index)
    handles = [Patch(color=COLORS[kind], label=NAMES[kind]) for kind in kinds]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=len(kinds), frameon=False)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(f"{layout_text(prediction)}: {prediction.time.total:.3f} s per step", fontsize=9)
    figure.savefig(path, dpi=120)


def _streams(spans: Iterable[Any]) -> list[str]:
    return sorted({span.stream for span in spans}, key=lambda stream: stream != "compute")


def _bars(spans: Iterable[Any], stream: str) -> Iterator[tuple[tuple[float, float], str]]:
    for span in spans:
        if span.stream == stream:
            yield (span.start * 1e3, (span.end - span.start) * 1e3), span.name[0]
