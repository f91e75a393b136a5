"""Recipes have the sizes of the published models."""

import pytest

from nanotrain.config.compose import config_dir
from nanotrain.config.config import DType
from nanotrain.config.count import num_parameters
from nanotrain.config.derive import global_batch_size
from nanotrain.config.load import load, load_config
from nanotrain.config.validate import validate_for_world

PUBLISHED = {
    "gpt2_124m": 124_439_808,
    "llama1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "llama70b": 68_976_648_192,
    "llama7b": 6_738_415_616,
    "qwen3_8b": 8_190_735_360,
}


def test_every_recipe_is_known_here():
    assert sorted(path.stem for path in (config_dir() / "config").glob("*.yaml")) == sorted([*PUBLISHED, "tiny"])


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_a_recipe_has_the_size_of_the_published_model(recipe):
    config = load_config([f"+config={recipe}"])
    assert num_parameters(config.model) == PUBLISHED[recipe]
    assert config.precision.params_dtype is DType.bf16
    validate_for_world(config, 8)


def test_a_recipe_says_only_what_differs():
    """Only a model names its whole shape, defaults or not; elsewhere a field set to its default says nothing."""
    for recipe in [*PUBLISHED, "tiny"]:
        loaded = load([f"+config={recipe}"])
        bare = load_config([])
        for key, origin in loaded.origins.items():
            section, name = key.split(".")
            if origin.endswith(".yaml") and section != "model":
                value, default = (getattr(getattr(c, section), name) for c in (loaded.config, bare))
                assert value != default, f"{key} in {origin} is the default {default!r}"


def test_the_quick_start_is_small_and_shared_by_any_small_world():
    config = load_config(["+config=tiny"])
    assert config.model.vocab_size is None, "the tokenizer of whatever data is read says it"
    for world in (1, 2, 3, 4, 6):
        validate_for_world(config, world)
        assert global_batch_size(config.train, world) == global_batch_size(config.train, 1)
