"""Block transforms run in the order of the list, where the configuration enables them."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import nn

from nanotrain.config.config import Config
from nanotrain.config.schema import config_from_dict, with_values
from nanotrain.memory.block_transforms import (
    BLOCK_TRANSFORMS,
    BlockTransform,
    compile_blocks,
    describe_activations,
    graph_blocks,
    offload_blocks,
    recompute_blocks,
    recompute_parts,
    transform_blocks,
)
from nanotrain.memory.recompute import Recompute


class Block(nn.Module):
    """A block with one parameter and a hook."""

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

    def apply(
        blocks: Sequence[Callable], *, config: Config, recompute: Recompute
    ) -> list[Callable]:
        def wrapped(block: Callable) -> Callable:
            return lambda x: calls.append(name) or block(x)

        return [wrapped(block) for block in blocks]

    return BlockTransform(is_enabled=lambda config: True, apply=apply)


def config_of(**memory: object) -> Config:
    return config_from_dict({"memory": memory})


def test_the_transforms_are_in_their_order_and_all_are_off_by_default():
    transforms = [
        recompute_parts,
        compile_blocks,
        graph_blocks,
        offload_blocks,
        recompute_blocks,
    ]
    assert [transform.apply for transform in BLOCK_TRANSFORMS] == transforms
    block = Block()
    assert transform_blocks([block], Config(), recompute=Recompute()) == [block]
    assert "forward" not in vars(block)


class Scaled(nn.Module):
    """A block of a kind of its own."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_ten_kinds_of_blocks_are_ten_graphs(monkeypatch):
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    blocks = compile_blocks(
        [Scaled(factor) for factor in range(10)], config=Config(), recompute=Recompute()
    )
    assert [float(block(torch.ones(()))) for block in blocks * 2] == [*range(10)] * 2
    assert len(compiled) == 10


def test_reductions_that_torch_gets_wrong_are_off():
    from torch._inductor import config as inductor

    with inductor.patch({"triton.mix_order_reduction": True}):
        compile_blocks([Block()], config=Config(), recompute=Recompute())
        assert inductor.triton.mix_order_reduction is False


def test_a_stage_without_blocks_is_left_as_it_is():
    for memory in (
        {"cpu_offloading": True, "cpu_offloading_num_layers": 1},
        {"recompute_granularity": "full"},
    ):
        assert transform_blocks([], config_of(**memory), recompute=Recompute()) == []


def test_flags_enable_them():
    compiled = with_values(Config(), {"train.torch_compile": True})
    full, selective = (config_of(recompute_granularity=name) for name in ("full", "selective"))
    graphed = with_values(Config(), {"train.cuda_graph_impl": "local"})
    configs = compiled, graphed, config_of(cpu_offloading=True), full, selective
    enabled = [[transform.is_enabled(c) for transform in BLOCK_TRANSFORMS] for c in configs]
    assert enabled == [[number == row for number in range(5)] for row in (1, 2, 3, 4, 0)]


def test_an_added_transform_runs_in_its_place_in_the_list():
    calls: list[str] = []
    transforms = [wrap("innermost", calls), *BLOCK_TRANSFORMS, wrap("outermost", calls)]
    block = Block()
    (function,) = transform_blocks([block], Config(), recompute=Recompute(), transforms=transforms)
    assert function(torch.tensor(3.0)).item() == 6.0
    assert calls == ["outermost", "innermost"]
    assert block.hook_calls == 1 and [name for name, _ in block.named_parameters()] == ["weight"]


@pytest.mark.parametrize(
    ("method", "size", "num_functions", "calls_after_backward"),
    [
        (None, None, 5, [2, 2, 2, 2, 2]),
        ("uniform", 2, 3, [2, 2, 2, 2, 2]),
        ("block", 2, 5, [2, 2, 1, 1, 1]),
    ],
)
def test_recomputed_blocks_run_again_in_the_backward(
    method, size, num_functions, calls_after_backward
):
    config = config_of(
        recompute_granularity="full", recompute_method=method, recompute_num_layers=size
    )
    blocks = [Block() for _ in range(5)]
    functions = transform_blocks(blocks, config, recompute=Recompute())
    assert len(functions) == num_functions
    hidden = torch.tensor(3.0)
    for function in functions:
        hidden = function(hidden)
    assert hidden.item() == 3 * 2**5 and [block.hook_calls for block in blocks] == [1] * 5
    hidden.backward()
    assert [block.hook_calls for block in blocks] == calls_after_backward
    assert [block.weight.grad.item() for block in blocks] == [3 * 2**4] * 5


def test_what_is_recomputed_is_described_with_its_defaults():
    full, both = (
        {"recompute_granularity": "full"},
        "--recompute-method and --recompute-num-layers unset",
    )
    assert (
        describe_activations(config_of(**full))
        == f"recompute full: uniform, groups of 1 layer ({both})"
    )
    block = describe_activations(config_of(**full, recompute_method="block"))
    assert (
        block
        == "recompute full: block, the first layer of each stage (--recompute-num-layers unset)"
    )
    complete = config_of(**full, recompute_method="uniform", recompute_num_layers=2)
    assert describe_activations(complete) == "recompute full: uniform, groups of 2 layers"
    assert (
        describe_activations(config_of(recompute_granularity="selective"))
        == "recompute selective: core_attn"
    )
    offload = describe_activations(config_of(cpu_offloading=True, cpu_offloading_num_layers=3))
    assert offload == "saved tensors of the first 3 layers of each stage in host memory"
    assert not describe_activations(Config())
