"""Whether blocks are compiled with torch.compile, and where their graphs end. Pure.

with_compile     the configuration with `torch_compile` set: unset means on for CUDA, off on CPU
graph_breaks     the parts of this configuration's blocks that run outside of graphs
"""

from collections.abc import Callable
from dataclasses import replace

from nanotrain.config.config import Config
from nanotrain.config.parallel import DISCARDED_MODULES, ParallelConfig
from nanotrain.parallel.pp.actions import ActionKind, PipelineShape
from nanotrain.parallel.pp.schedules import build_schedule

# where graphs end -> whether they do in a configuration; docs/gpu.md counts them for three layouts
BREAKS: dict[str, Callable[[Config], object]] = {
    "linear layers with tensor parallelism, fp8 or deferred weight gradients (parallel/tp/layers.py)": lambda config: (
        config.parallel.tensor_model_parallel_size > 1
        or config.precision.fp8 is not None
        or _defers_wgrad(config.parallel)
    ),
    "collectives of sequence parallelism (comm/autograd.py)": lambda config: (
        config.parallel.tensor_model_parallel_size > 1 and config.parallel.sequence_parallel
    ),
    "attention with context parallelism, segments, a window, sinks, soft-capped scores or dropout (parallel/cp)": (
        lambda config: _has_special_attention(config)
    ),
    "the routed experts (model/moe.py)": lambda config: config.model.moe is not None,
    "recomputed modules (memory/recompute.py)": lambda config: config.memory.recomputed_modules,
}
# settings that compiled blocks do not support; together with an explicit --torch-compile they are errors (config/rules)
UNSUPPORTED: dict[str, Callable[[Config], object]] = {
    "--cpu-offloading": lambda config: config.memory.cpu_offloading,
    "--recompute-modules": lambda config: DISCARDED_MODULES.intersection(config.memory.recomputed_modules),
    "--debug-nan": lambda config: config.train.debug_nan,
}


def with_compile(config: Config, device_type: str) -> Config:
    """The configuration with `torch_compile` set; an explicit value stays.

    Args:
        config: validated configuration.
        device_type: device type of the rank, "cpu" or "cuda".
    """
    if config.train.torch_compile is not None:
        return config
    compiles = device_type == "cuda" and not _unsupported(config)
    return replace(config, train=replace(config.train, torch_compile=compiles))


def graph_breaks(config: Config) -> list[str]:
    """Where the graphs of this configuration's blocks end, with the files; empty where a block is one graph."""
    return [where for where, is_there in BREAKS.items() if is_there(config)]


def describe_compile(config: Config, device_type: str) -> str:
    """One sentence for the log: whether blocks are compiled, why, and where graphs end."""
    resolved, unsupported = with_compile(config, device_type), _unsupported(config)
    if not resolved.train.torch_compile:
        why = (
            "--no-torch-compile" if config.train.torch_compile is False else f"{device_type}, --torch-compile is unset"
        )
        return f"off ({', '.join(unsupported) or why})"
    why = "--torch-compile" if config.train.torch_compile else "unset on a GPU; --no-torch-compile turns it off"
    breaks = graph_breaks(config)
    return f"every block ({why})" + (f"; graphs end at {'; '.join(breaks)}" if breaks else "; one graph each")


def _has_special_attention(config: Config) -> bool:
    """Whether core attention is more than torch's plain causal attention."""
    model = config.model
    return (
        config.parallel.context_parallel_size > 1
        or config.data.reset_attention_mask
        or model.window_size is not None
        or model.softmax_type != "vanilla"
        or model.attn_logit_softcapping is not None
        or model.attention_dropout > 0
        or config.optim.qk_clip
    )


def _defers_wgrad(parallel: ParallelConfig) -> bool:
    """Whether the pipeline schedule has W actions."""
    pp, virtual = parallel.pipeline_model_parallel_size, parallel.num_virtual_stages_per_pipeline_rank
    schedule = build_schedule(parallel.pipeline_schedule, PipelineShape(pp, virtual, pp))
    return any(action.kind is ActionKind.backward_weight for action in schedule)


def _unsupported(config: Config) -> list[str]:
    return [flag for flag, is_set in UNSUPPORTED.items() if is_set(config)]
