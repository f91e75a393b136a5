"""Block transforms run in the order of the list, where the configuration enables them."""

from dataclasses import replace

import torch
from torch import nn

from nanotrain.config.config import Config
from nanotrain.memory.block_transforms import BLOCK_TRANSFORMS, BlockTransform, compile_block, transform_blocks


class Block(nn.Module):
    """A block with one parameter and a hook that must stay outside of what transforms replace."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.hook_calls = 0
        self.register_forward_pre_hook(self._count)

    def _count(self, *_: object) -> None:
        self.hook_calls += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def wrap(name: str, calls: list[str]) -> BlockTransform:
    """A transform that notes when its wrapper is entered."""

    def apply(block: nn.Module) -> None:
        inner = block.forward

        def forward(*args: object) -> object:
            calls.append(name)
            return inner(*args)

        block.forward = forward

    return BlockTransform(is_enabled=lambda config: True, apply=apply)


def test_compile_is_in_the_list_and_off_by_default() -> None:
    assert [transform.apply for transform in BLOCK_TRANSFORMS] == [compile_block]
    block = Block()
    transform_blocks([block], Config())
    assert "forward" not in vars(block)


def test_the_flag_of_compile_enables_it() -> None:
    (transform,) = BLOCK_TRANSFORMS
    config = Config()
    assert not transform.is_enabled(config)
    assert transform.is_enabled(replace(config, train=replace(config.train, torch_compile=True)))


def test_an_added_transform_runs_in_its_place_in_the_list() -> None:
    calls: list[str] = []
    transforms = [wrap("recompute", calls), *BLOCK_TRANSFORMS, wrap("outermost", calls)]
    block = Block()
    transform_blocks([block], Config(), transforms=transforms)
    assert block(torch.tensor(3.0)).item() == 6.0
    assert calls == ["outermost", "recompute"], "the first of the list is the innermost"
    assert block.hook_calls == 1 and [name for name, _ in block.named_parameters()] == ["weight"]
