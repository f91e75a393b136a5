"""Whether blocks are compiled with torch.compile, and where their graphs end. Pure.

with_compile     the configuration with `torch_compile` set: unset means on for CUDA, off on CPU
graph_breaks     the parts of this configuration's blocks that run outside of graphs
"""

from dataclasses import replace

from nanotrain.config.config import Config
from nanotrain.config.parallel import ParallelConfig
from nanotrain.config.rules.settings import Settings
from nanotrain.memory.block_transforms import attention_ends_graphs
from nanotrain.parallel.pp.actions import ActionKind, PipelineShape
from nanotrain.parallel.pp.schedules import build_schedule

# where graphs end; docs/gpu.md counts them for three layouts
DEFERRED = "linear layers with deferred weight gradients (parallel/tp/layers.py)"
FP8_WITH_TP = "linear layers in fp8 with tensor parallelism (parallel/tp/layers.py)"
NVFP4 = "linear layers in NVFP4 (kernels/fp8/nvfp4_products.py)"
SHARED_SCALES = "linear layers in fp8 with scales that ranks share (parallel/tp/layers.py)"
ATTENTION = (
    "attention with context parallelism, segments, a window, sinks, soft-capped scores or dropout "
    "(parallel/cp)"
)
EXPERTS = "the routed experts (model/moe.py)"
RECOMPUTED = "recomputed modules (memory/recompute.py)"
# recomputed modules that run between graphs; others are recomputed inside of them
EAGER_MODULES = {"core_attn", "mlp", "moe", "mla_up_proj"}


def with_compile(config: Config, device_type: str) -> Config:
    """The configuration with `torch_compile` set; an explicit value stays.

    Args:
        config: validated configuration.
        device_type: device type of the rank, "cpu" or "cuda".
    """
    if config.train.torch_compile is not None:
        return config
    compiles = device_type == "cuda" and not unsupported_flags(config)
    return replace(config, train=replace(config.train, torch_compile=compiles))


def unsupported_flags(config: Config) -> list[str]:
    """The settings that compiled blocks do not support.

    Together with an explicit --torch-compile they are errors (config/rules).
    """
    flags = []
    if config.memory.cpu_offloading:
        flags.append("--cpu-offloading")
    if config.train.debug_nan:
        flags.append("--debug-nan")
    if config.precision.invariant:
        flags.append("--invariant")
    if config.train.cuda_graph_impl != "none" and borrows_gradients(config.parallel):
        flags.append(f"--cuda-graph-impl {config.train.cuda_graph_impl}")
    return flags


def borrows_gradients(parallel: ParallelConfig) -> bool:
    """Whether gradient buckets borrow their memory, so that it is at another address every time."""
    return parallel.data_parallel_sharding_strategy == "optim_grads"


def graph_breaks(config: Config) -> list[str]:
    """Graph breaks in the blocks of this configuration, with the files.

    Empty where a block is one graph.
    """
    settings = Settings(config)
    breaks = []
    if defers_wgrad(config.parallel):
        breaks.append(DEFERRED)
    if settings.has_fp8 and settings.tp > 1:
        breaks.append(FP8_WITH_TP)
    elif settings.has_fp8 and settings.fp8.recipe == "nvfp4":
        breaks.append(NVFP4)
    if settings.has_fp8 and settings.cp > 1 and settings.fp8.recipe in ("tensorwise", "delayed"):
        breaks.append(SHARED_SCALES)
    if attention_ends_graphs(config):
        breaks.append(ATTENTION)
    if settings.has_experts:
        breaks.append(EXPERTS)
    if EAGER_MODULES.intersection(config.memory.recomputed_modules):
        breaks.append(RECOMPUTED)
    return breaks


def describe_compile(config: Config, device_type: str) -> str:
    """One sentence for the log: whether blocks are compiled, why, and where graphs end."""
    if not with_compile(config, device_type).train.torch_compile:
        unset = f"{device_type}, --torch-compile is unset"
        why = "--no-torch-compile" if config.train.torch_compile is False else unset
        return f"off ({', '.join(unsupported_flags(config)) or why})"
    unset = "unset on a GPU; --no-torch-compile turns it off"
    why = "--torch-compile" if config.train.torch_compile else unset
    breaks = graph_breaks(config)
    ends = f"graphs end at {'; '.join(breaks)}" if breaks else "one graph each"
    return f"every block ({why}); {ends}"


def defers_wgrad(parallel: ParallelConfig) -> bool:
    """Whether the pipeline schedule has W actions."""
    pp = parallel.pipeline_model_parallel_size
    virtual = parallel.num_virtual_stages_per_pipeline_rank
    schedule = build_schedule(parallel.pipeline_schedule, PipelineShape(pp, virtual, pp))
    return any(action.kind is ActionKind.backward_weight for action in schedule)
