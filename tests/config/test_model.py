"""The model section: the same objects under both modules, so no second definition can drift."""

from dataclasses import fields

from nanotrain.config import config, model


def test_config_reexports_the_model_section() -> None:
    assert all(getattr(config, name) is getattr(model, name) for name in config.__all__)
    assert {field.name for field in fields(config.Config)} >= {"model"}
