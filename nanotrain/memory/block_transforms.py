"""Transforms of transformer blocks, in the one order in which they are applied.

    parameters in flat storage -> BLOCK_TRANSFORMS, first to last -> training

The first transform of the list is the innermost. Recomputation and offloading go before compilation, so that the
compiler sees them; forward hooks of a block (which wait for its parameters) run outside all of them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from nanotrain.config.config import Config


@dataclass(frozen=True)
class BlockTransform:
    """A change of the forward function of a block that keeps its values."""

    is_enabled: Callable[[Config], bool]  # whether a configuration enables it
    apply: Callable[[nn.Module], None]  # changes one block in place; parameter names must stay as they are


def compile_block(block: nn.Module) -> None:
    """Compile `block.forward` with torch.compile; the hooks of the block stay eager."""
    block.forward = torch.compile(block.forward)


BLOCK_TRANSFORMS: list[BlockTransform] = [
    BlockTransform(is_enabled=lambda config: config.train.torch_compile, apply=compile_block),
]


def transform_blocks(
    blocks: Iterable[nn.Module], config: Config, *, transforms: Sequence[BlockTransform] = BLOCK_TRANSFORMS
) -> None:
    """Apply the enabled transforms to every block, in the order of the list.

    Args:
        blocks: transformer blocks, their parameters in final storage.
        config: enables transforms.
        transforms: applied first to last.
    """
    enabled = [transform for transform in transforms if transform.is_enabled(config)]
    for block in blocks:
        for transform in enabled:
            transform.apply(block)
