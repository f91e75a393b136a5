"""`nanotrain parity --invariant` names the first tensor of a layout with other bits than one rank."""

from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from nanotrain.cli.main import main
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.config.load import load
from nanotrain.optim import invariant as optim
from nanotrain.parallel.tp import invariant as layers
from nanotrain.parity import bits
from nanotrain.parity.bit_comparison import BitComparison, Step, compare_steps
from nanotrain.parity.bits import record_bits, small_configs
from nanotrain.topology.topology import Topology
from tests.harness import run_ranks

MODEL = ("+config=tiny", "--invariant", "--num-query-groups", "4")
TP_CP = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--context-parallel-size", "2")
PP = ("--pipeline-model-parallel-size", "2", "--data-parallel-sharding-strategy", "optim")

RECOMPUTED = (*TP_CP, "--recompute-granularity", "full", "--recompute-method", "uniform")


def first_difference(reference: list[Step], records: list[list[Step]]) -> str:
    return compare_steps(reference, records).difference


def configs(*words: str, world: int) -> tuple[Config, Config]:
    """The small configuration of a layout, and that of one rank."""
    loaded = load((*MODEL, *words))
    return small_configs(loaded, world, num_steps=2)


def record(ctx: ParallelContext, config: Config) -> list[Step]:
    topology = Topology.of(config.parallel, ctx.topology.world_size)
    return record_bits(ParallelContext.attach(topology), config)


@cache
def of_one_rank(config: Config) -> list[Step]:
    (steps,) = run_ranks(1, record, config, shares=True)
    return steps


@pytest.mark.parametrize("words", [TP_CP, PP, RECOMPUTED])
def test_a_layout_has_the_bits_of_one_rank(words: tuple[str, ...]) -> None:
    small, single = configs(*words, world=4)
    reference = of_one_rank(single)
    assert {"layers.0", "layers.0.attention", "layers.1.mlp"} < set(reference[0].forward)
    assert reference[0].forward.keys() == reference[0].backward.keys()
    result = compare_steps(reference, run_ranks(4, record, small, shares=True))
    step = reference[0]
    num_tensors = 2 * len(step.forward) + 2 * len(step.weights) + 2  # loss and gradient norm
    assert result == BitComparison(2 * num_tensors, num_left_out=0, difference="")


def chain(parts: Any) -> Tensor:
    """The blocks one after another, not as a tree."""
    first, *others = parts
    total = first.float()
    for part in others:
        total = total + part
    return total


def in_fp32(scaled: Tensor, rows: Tensor, *, num_addends: int) -> Tensor:
    """A weight gradient whose blocks are added in fp32."""
    return torch.matmul(scaled.mT, rows).sum(1).double()


def plain_squares(values: Tensor) -> Tensor:
    """One number of fp32 sums per shard."""
    return torch.tensor([float(values.float().square().sum()), 0.0, 0.0, 0.0]).double()


class InOneLayer(bits._HiddenRecorder):
    """Adds the blocks of the MLP of layer 1 in another order."""

    def attach(self, stage: nn.Module) -> None:
        tree_sum = layers.tree_sum
        mlp = stage.get_submodule("layers.1.mlp")
        mlp.register_forward_pre_hook(lambda *_: setattr(layers, "tree_sum", chain))
        mlp.register_forward_hook(lambda *_: setattr(layers, "tree_sum", tree_sum))
        super().attach(stage)


PLANTS = {
    "order of a product": (bits, "_HiddenRecorder", InOneLayer, "output of layers.1.mlp:"),
    "order of a gradient": (layers, "weight_gradient", in_fp32, "gradient "),
    "order of squares": (optim, "square_bins", plain_squares, "gradient norm: "),
}


def record_planted(ctx: ParallelContext, config: Config, name: str) -> list[Step]:
    owner, attribute, value, _ = PLANTS[name]
    with patch.object(owner, attribute, value):
        return record(ctx, config)


@pytest.mark.parametrize("name", PLANTS)
def test_the_first_tensor_of_another_order_is_named(name: str) -> None:
    # a layout with tp keeps four heads: fewer blocks have one order only
    _, single = configs(*TP_CP, world=4)
    by_rank = run_ranks(1, record_planted, single, name, shares=True)
    difference = first_difference(of_one_rank(single), by_rank)
    assert difference.startswith(f"step 1, {PLANTS[name][3]}")
    assert "on rank 0" in difference


def test_a_position_of_a_rank_is_named() -> None:
    small, single = configs(*TP_CP, world=4)
    reference = of_one_rank(single)
    by_rank = run_ranks(4, record, small, shares=True)
    hidden = by_rank[3][1].backward["layers.0.attention"][0]
    hidden.values[1, 2, 5] += 1
    difference = first_difference(reference, by_rank)
    sample = int(hidden.samples[1])
    position = int(hidden.positions[2])
    assert difference.startswith("step 2, gradient of the output of layers.0.attention: 1 of ")
    assert " elements differ on rank 3, first " in difference
    assert difference.endswith(f" at sample {sample}, position {position}, channel 5")
    by_rank[2][0] = replace(by_rank[2][0], loss=0.5)
    assert first_difference(reference, by_rank).startswith("step 1, loss: 0.5 on rank 2 beside ")


def test_a_model_without_an_invariant_form_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parity", *MODEL, "--world-size", "2", "--add-head-bias"]
    assert main(words) == 2
    assert "add_head_bias" in capsys.readouterr().err
