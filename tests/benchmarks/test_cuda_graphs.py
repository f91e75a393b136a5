"""docs/gpu.md has the planned steps of recipes with CUDA graphs."""

import re
from pathlib import Path

import pytest

from benchmarks.cuda_graphs import plan_of, ranks_of, recipe_config, refusal, with_graphs

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"


@pytest.mark.parametrize("name", ["gpt2_124m", "qwen3_30b_a3b"])
def test_the_page_has_the_planned_steps(name: str) -> None:
    recipe = recipe_config(name)
    graphed = with_graphs(recipe)
    world_size = ranks_of(name, recipe)
    before = plan_of(recipe, world_size, "h100")
    after = plan_of(graphed, world_size, "h100")
    row = f"| {name} | {world_size} | {before.seconds:.4g} | {after.seconds:.4g} "
    row += f"| {before.launches} | {after.launches} "
    row += f"| {before.num_bytes / 1e9:.1f} | {after.num_bytes / 1e9:.1f} |"
    assert row in PAGE.read_text()
    assert after.launches < before.launches and after.num_bytes > before.num_bytes
    assert refusal(graphed) == ""


def test_recipes_that_exclude_graphs_say_why() -> None:
    assert re.search("optim_grads_params", refusal(with_graphs(recipe_config("llama3_8b"))))
