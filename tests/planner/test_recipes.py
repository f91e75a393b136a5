"""Every shipped recipe fits on the GPUs that its first lines name, and hides its communication."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from nanotrain.config.compose import config_dir
from nanotrain.config.load import load
from nanotrain.planner.hardware import gpu_of
from nanotrain.planner.prediction import predict
from nanotrain.planner.scenario import scenario_of

SMALL = ("tiny", "tiny_moe")  # for the cores of any machine
OF_A_CHECKPOINT = ("sft",)  # its model is that of a checkpoint
MAX_EXPOSED = 0.2  # of a step
MACHINE = re.compile(r"on ([\d, or]+) GPUs of 80 GB")


def machines_of(path: Path) -> list[int]:
    """The numbers of GPUs that the comment above a recipe names."""
    found = MACHINE.search(path.read_text())
    assert found, f"{path.name} does not say its machine"
    return [int(number) for number in re.findall(r"\d+", found[1])]


RECIPES = {
    path.stem: machines_of(path)
    for path in sorted((config_dir() / "config").glob("*.yaml"))
    if path.stem not in {*SMALL, *OF_A_CHECKPOINT}
}
CASES = [
    (recipe, world_size) for recipe, world_sizes in RECIPES.items() for world_size in world_sizes
]


@pytest.mark.parametrize(("recipe", "world_size"), CASES)
def test_a_recipe_fits_and_hides_its_communication(recipe: str, world_size: int) -> None:
    config = load([f"+config={recipe}"], to_train=False).config
    prediction = predict(scenario_of(config, world_size, gpu=gpu_of("h100"), engine="nanotrain"))
    time = prediction.time
    assert prediction.headroom >= 0, f"{prediction.memory.reserved:,} bytes"
    assert sum(time.exposed.values()) < MAX_EXPOSED * time.total, time.exposed


def test_fine_tuning_of_8_billion_parameters_fits_on_8_gpus() -> None:
    (recipe,) = OF_A_CHECKPOINT
    config = replace(
        load([f"+config={recipe}"], to_train=False).config,
        model=load(["+config=qwen3_8b"], to_train=False).config.model,
    )
    prediction = predict(scenario_of(config, 8, gpu=gpu_of("h100"), engine="nanotrain"))
    assert prediction.headroom >= 0, f"{prediction.memory.reserved:,} bytes"


def test_a_recipe_starts_on_8_gpus_where_the_model_can() -> None:
    on_one_node = {recipe for recipe, world_sizes in RECIPES.items() if 8 in world_sizes}
    assert on_one_node == {"gpt2_124m", "llama1b", "llama7b", "llama3_8b", "qwen3_8b"}
