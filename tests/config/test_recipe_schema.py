"""configs/recipe.schema.json: made from the fields, true of every recipe, and strict."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from scripts.recipe_schema import recipe_schema, section_schema

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = sorted((CONFIGS / "config").glob("*.yaml"))
GROUPS = [
    path for name in ("model", "parallel", "precision") for path in (CONFIGS / name).iterdir()
]


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = recipe_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def test_the_file_is_made_from_the_fields() -> None:
    assert json.loads((CONFIGS / "recipe.schema.json").read_text()) == recipe_schema()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_names_the_schema_and_keeps_it(
    path: Path, validator: Draft202012Validator
) -> None:
    text = path.read_text()
    assert text.splitlines()[1] == "# yaml-language-server: $schema=../recipe.schema.json"
    assert not [error.message for error in validator.iter_errors(yaml.safe_load(text))]


@pytest.mark.parametrize("path", GROUPS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_group_keeps_the_schema_of_its_section(path: Path) -> None:
    schema = Draft202012Validator(section_schema(path.parent.name))
    values = yaml.safe_load(path.read_text())
    values.pop("defaults", None)
    assert not [error.message for error in schema.iter_errors(values)]


@pytest.mark.parametrize(
    ("recipe", "place"),
    [
        ({"modle": {}}, []),
        ({"model": {"hiden_size": 8}}, ["model"]),
        ({"model": {"hidden_size": "wide"}}, ["model", "hidden_size"]),
        ({"model": {"moe": {"num_experts": 1.5}}}, ["model", "moe", "num_experts"]),
        (
            {"parallel": {"data_parallel_sharding_strategy": "optimm"}},
            ["parallel", "data_parallel_sharding_strategy"],
        ),
        ({"optim": {"lr": "fast"}}, ["optim", "lr"]),
        ({"train": {"report": "perhaps"}}, ["train", "report"]),
    ],
)
def test_a_mistake_is_marked_where_it_is(
    recipe: dict[str, Any], place: list[str], validator: Draft202012Validator
) -> None:
    assert place in [list(error.path) for error in validator.iter_errors(recipe)]


@pytest.mark.parametrize(
    "recipe",
    [
        {"optim": {"lr": "1e-4", "min_lr": "${optim.lr}"}},
        {"data": {"data_path": ["0.5", "a", 0.5, "b"]}},
        {"model": {"num_query_groups": None}},
    ],
)
def test_what_recipes_may_write_is_taken(
    recipe: dict[str, Any], validator: Draft202012Validator
) -> None:
    assert not [error.message for error in validator.iter_errors(recipe)]
