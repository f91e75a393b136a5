"""Whether blocks are compiled with torch.compile, and where their graphs end. Pure.

with_compile     the configuration with `torch_compile` set: unset means on for CUDA, off on CPU
graph_breaks     the parts of this configuration's blocks that run outside of graphs
"""

from dataclasses import replace
from pathlib import Path

import yaml

from nanotrain.config.config import Config
from nanotrain.config.parallel import ParallelConfig
from nanotrain.config.rules.rule import holds
from nanotrain.config.rules.sizes import Values
from nanotrain.parallel.pp.actions import ActionKind, PipelineShape
from nanotrain.parallel.pp.schedules import build_schedule

TABLE: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
DEFERRED = "linear layers with deferred weight gradients (parallel/tp/layers.py)"


def with_compile(config: Config, device_type: str) -> Config:
    """The configuration with `torch_compile` set; an explicit value stays.

    Args:
        config: validated configuration.
        device_type: device type of the rank, "cpu" or "cuda".
    """
    if config.train.torch_compile is not None:
        return config
    compiles = device_type == "cuda" and not _rows(config, "unsupported")
    return replace(config, train=replace(config.train, torch_compile=compiles))


def graph_breaks(config: Config) -> list[str]:
    """Where the graphs of this configuration's blocks end, with the files; empty where a block is
    one graph.
    """
    return [*([DEFERRED] if _defers_wgrad(config.parallel) else []), *_rows(config, "breaks")]


def describe_compile(config: Config, device_type: str) -> str:
    """One sentence for the log: whether blocks are compiled, why, and where graphs end."""
    resolved, unsupported = with_compile(config, device_type), _rows(config, "unsupported")
    if not resolved.train.torch_compile:
        unset = f"{device_type}, --torch-compile is unset"
        why = "--no-torch-compile" if config.train.torch_compile is False else unset
        return f"off ({', '.join(unsupported) or why})"
    why = (
        "--torch-compile"
        if config.train.torch_compile
        else "unset on a GPU; --no-torch-compile turns it off"
    )
    breaks = graph_breaks(config)
    return f"every block ({why})" + (
        f"; graphs end at {'; '.join(breaks)}" if breaks else "; one graph each"
    )


def _defers_wgrad(parallel: ParallelConfig) -> bool:
    """Whether the pipeline schedule has W actions."""
    pp, virtual = (
        parallel.pipeline_model_parallel_size,
        parallel.num_virtual_stages_per_pipeline_rank,
    )
    schedule = build_schedule(parallel.pipeline_schedule, PipelineShape(pp, virtual, pp))
    return any(action.kind is ActionKind.backward_weight for action in schedule)


def _rows(config: Config, name: str) -> list[str]:
    """The rows of a table whose condition holds."""
    return [row for row, where in TABLE[name].items() if holds(Values(config), where)]
