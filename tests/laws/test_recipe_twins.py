"""Law L1 for recipes with several kinds of layers: shrunk as `nanotrain parity` does, they train as
on one rank.
"""

import pytest

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.config.load import load
from nanotrain.parity.check import Record, compare, record_steps
from nanotrain.parity.shrink import on_one_rank, shrink
from nanotrain.topology.topology import Topology
from tests.harness import run_ranks

RECIPES = ("kimi_linear_48b_a3b", "qwen3_5_27b", "qwen3_5_35b_a3b", "qwen3_next_80b_a3b")
TOLERANCE = 5e-5  # relative; lengths of queries and keys near 0 amplify rounding


def record(ctx: ParallelContext, configs: list[Config]) -> list[Record]:
    """What this rank sees of every configuration, one after the other."""
    world = ctx.topology.world_size
    contexts = [ParallelContext.attach(Topology.of(config.parallel, world)) for config in configs]
    return [
        record_steps(context, config) for context, config in zip(contexts, configs, strict=True)
    ]


@pytest.fixture(scope="module")
def records() -> dict[str, tuple[Config, Record, list[Record]]]:
    """Of every recipe the small configuration, the record of one rank, and those of two."""
    small = [
        shrink(load([f"+config={name}"], to_train=False).config, 2, num_steps=2) for name in RECIPES
    ]
    [single] = run_ranks(1, record, [on_one_rank(config) for config in small])
    double = run_ranks(2, record, small)
    return {
        name: (small[i], single[i], [of_rank[i] for of_rank in double])
        for i, name in enumerate(RECIPES)
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_small_twin_trains_as_on_one_rank(
    recipe: str, records: dict[str, tuple[Config, Record, list[Record]]]
) -> None:
    config, single, double = records[recipe]
    assert {*config.model.mixers} == {
        *load([f"+config={recipe}"], to_train=False).config.model.mixers
    }
    report = compare(single, double, config=config, tolerance=TOLERANCE)
    assert report.holds, report.complaints
