"""Configurations for tests, written as short as their fields' unique names allow."""

from typing import Any

from nanotrain.config.config import Config
from nanotrain.config.schema import config_from_dict, set_values


def config_of(**fields: object) -> Config:
    """A configuration from `name=value`, `moe_router_topk=2` for instance."""
    values: dict[str, Any] = {}
    set_values(values, fields)
    return config_from_dict(values)
