"""Transforms of the transformer blocks of a stage, in the one order in which they are applied.

    blocks, parameters in flat storage -> BLOCK_TRANSFORMS, first to last -> the functions that a
    stage calls in order

The first transform of the list is the innermost. Recomputation of parts changes functions inside of
a block, compilation `forward` of a block, inside its hooks (which wait for its parameters).
Recomputation of whole blocks is around the hooks: a group of blocks gathers its parameters again.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nanotrain.config.config import Config
from nanotrain.config.parallel import RecomputeMethod
from nanotrain.memory.cuda_graphs import capture_parts
from nanotrain.memory.graph_parts import parts_of
from nanotrain.memory.offload import offloaded
from nanotrain.memory.recompute import Recompute
from nanotrain.memory.recompute_modules import recompute_modules
from nanotrain.quantities import count_of

# graphs of one function; torch runs it eagerly from the ninth on, and models may have more kinds of
# blocks
MAX_GRAPHS = 64
# hidden states and the context of the layers -> hidden states; or the block itself
BlockFunction = Callable[..., Any]


@dataclass(frozen=True)
class BlockTransform:
    """A change of the blocks of a stage that keeps their values."""

    is_enabled: Callable[[Config], bool]  # whether a configuration enables it
    # blocks -> functions that replace them, in order; parameter names must stay as they are
    apply: Callable[..., list[BlockFunction]]


def recompute_parts(
    blocks: Sequence[BlockFunction], *, config: Config, recompute: Recompute
) -> list[BlockFunction]:
    """Recompute the named modules of each block."""
    traces_attention = not attention_ends_graphs(config)
    for block in blocks:
        assert isinstance(block, nn.Module), "it comes first in the list"
        recompute_modules(
            block,
            config.memory.recomputed_modules,
            recompute=recompute,
            traces_attention=traces_attention,
        )
    return list(blocks)


def attention_ends_graphs(config: Config) -> bool:
    """Whether core attention runs outside of compiled graphs."""
    model = config.model
    return (
        config.parallel.context_parallel_size > 1
        or config.data.reset_attention_mask
        or any(model.window_layers)
        or model.has_score_options
        or config.optim.qk_clip
    )


def compile_blocks(
    blocks: Sequence[BlockFunction], *, config: Config, recompute: Recompute
) -> list[BlockFunction]:
    """Compile `forward` of each block with torch.compile; the hooks of the block stay eager."""
    # It advises a call for fp32 products in TF32, which would give up the precision that was asked
    # for.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores", category=UserWarning)
    from torch._dynamo import config as dynamo  # 1 to 5 s of CPU time, which only compiled runs pay
    from torch._inductor import config as inductor

    # Kernels that sum over rows and over columns may return sums of uninitialized memory, as
    # gradients of biases and norms (https://github.com/pytorch/pytorch/issues/190796, 193061).
    inductor.triton.mix_order_reduction = False
    # All blocks share their code, which has graphs for each kind of block, with and without
    # gradients, and each length.
    dynamo.recompile_limit = max(dynamo.recompile_limit, MAX_GRAPHS)
    for block in blocks:
        assert isinstance(block, nn.Module), "transforms that replace blocks come later in the list"
        for name in _compiled_functions(block, config):
            setattr(block, name, torch.compile(getattr(block, name)))
    # Blocks share their code. Where a graph of one kind ends early (experts, a window), it fits
    # other kinds too; if the graph used last comes first, a block may be recomputed by other graphs
    # than it was computed by, which torch.utils.checkpoint refuses
    # (https://github.com/pytorch/pytorch/issues/166926).
    eval_frame: Any = torch._C._dynamo.eval_frame  # torch declares the function from 2.15 on
    eval_frame._set_lru_cache(False)
    return list(blocks)


def _compiled_functions(block: nn.Module, config: Config) -> list[str]:
    """The functions of a block that are compiled: `forward`, or the links that graphs capture."""
    if config.train.cuda_graph_impl == "none":
        return ["forward"]
    return [part.path for part in parts_of(block, config.train.cuda_graph_scope) if part.is_link]


def graph_blocks(
    blocks: Sequence[BlockFunction], *, config: Config, recompute: Recompute
) -> list[BlockFunction]:
    """Capture parts of blocks as CUDA graphs, inside the hooks of the blocks."""
    modules = [block for block in blocks if isinstance(block, nn.Module)]
    train = config.train
    capture_parts(modules, train.cuda_graph_scope, num_eager=train.cuda_graph_warmup_steps)
    return list(blocks)


def offload_blocks(
    blocks: Sequence[BlockFunction], *, config: Config, recompute: Recompute
) -> list[BlockFunction]:
    """Offload the saved tensors of the first blocks."""
    modules = [
        block
        for block in blocks[: config.memory.cpu_offloading_num_layers]
        if isinstance(block, nn.Module)
    ]
    return [*offloaded(modules), *blocks[len(modules) :]]


def recompute_blocks(
    blocks: Sequence[BlockFunction], *, config: Config, recompute: Recompute
) -> list[BlockFunction]:
    """Recompute whole blocks: groups of N ("uniform"), or the first N one by one ("block")."""
    functions: list[BlockFunction] = []
    num_grouped = 0
    for group in recomputed_groups(config, len(blocks)):
        functions.append(recompute.checkpointed(_in_turn(blocks[group.start : group.stop])))
        num_grouped = group.stop
    return [*functions, *blocks[num_grouped:]]


def recomputed_groups(config: Config, num_blocks: int) -> list[range]:
    """The groups of blocks of a stage that full recomputation runs again together.

    >>> from nanotrain.config.config import MemoryConfig
    >>> config = Config(memory=MemoryConfig(recompute_method="uniform", recompute_num_layers=2))
    >>> recomputed_groups(config, 5)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    method, size = recompute_plan(config)
    if method == "block":
        return [range(i, i + 1) for i in range(min(size, num_blocks))]
    return [range(start, min(start + size, num_blocks)) for start in range(0, num_blocks, size)]


def recompute_plan(config: Config) -> tuple[RecomputeMethod, int]:
    """The method of full recomputation and its number of blocks; unset, every block by itself."""
    memory = config.memory
    return memory.recompute_method or "uniform", memory.recompute_num_layers or 1


def describe_activations(config: Config) -> str:
    """Describe recomputation or offload, with defaults; "" if all activations are kept."""
    memory = config.memory
    if memory.cpu_offloading:
        layers = count_of(memory.cpu_offloading_num_layers, "layer")
        return f"saved tensors of the first {layers} of each stage in host memory"
    if memory.recompute_granularity != "full":
        modules = memory.recomputed_modules
        return f"recompute selective: {', '.join(modules)}" if modules else ""
    method, size = recompute_plan(config)
    layers = "layer" if size == 1 else f"{size} layers"
    blocks = f"groups of {count_of(size, 'layer')}"
    if method == "block":
        blocks = f"the first {layers} of each stage"
    flags = {
        "--recompute-method": memory.recompute_method,
        "--recompute-num-layers": memory.recompute_num_layers,
    }
    unset = " and ".join(flag for flag, value in flags.items() if value is None)
    suffix = f" ({unset} unset)" if unset else ""
    return f"recompute full: {method}, {blocks}{suffix}"


BLOCK_TRANSFORMS: list[BlockTransform] = [
    BlockTransform(
        is_enabled=lambda config: bool(config.memory.recomputed_modules), apply=recompute_parts
    ),
    BlockTransform(
        is_enabled=lambda config: bool(config.train.torch_compile), apply=compile_blocks
    ),
    BlockTransform(
        is_enabled=lambda config: config.train.cuda_graph_impl != "none", apply=graph_blocks
    ),
    BlockTransform(is_enabled=lambda config: config.memory.cpu_offloading, apply=offload_blocks),
    BlockTransform(
        is_enabled=lambda config: config.memory.recompute_granularity == "full",
        apply=recompute_blocks,
    ),
]

# of multi-token prediction
MTP_TRANSFORMS = [
    transform
    for transform in BLOCK_TRANSFORMS
    if transform.apply not in (graph_blocks, offload_blocks)
]


def transform_blocks(
    blocks: Iterable[nn.Module],
    config: Config,
    *,
    recompute: Recompute,
    transforms: Sequence[BlockTransform] = BLOCK_TRANSFORMS,
) -> list[BlockFunction]:
    """Apply the enabled transforms, in the order of the list.

    Args:
        blocks: transformer blocks of one stage, their parameters in final storage.
        config: enables transforms.
        recompute: recomputation of the stage.
        transforms: applied first to last.

    Returns:
        the functions that the stage calls, one after another.
    """
    functions: list[BlockFunction] = list(blocks)
    for transform in transforms:
        if transform.is_enabled(config):
            functions = transform.apply(functions, config=config, recompute=recompute)
    return functions


def _in_turn(functions: Sequence[BlockFunction]) -> BlockFunction:
    """One function that passes its first argument through several."""

    def run(hidden: Any, *args: Any) -> Any:
        for function in functions:
            hidden = function(hidden, *args)
        return hidden

    return run
