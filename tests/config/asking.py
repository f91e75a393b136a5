"""Configurations for tests, written as short as their fields' unique names allow."""

from nanotrain.config.config import Config
from nanotrain.config.schema import ENTRIES, config_from_dict, nest


def config_of(**fields: object) -> Config:
    """A configuration from `name=value`, `moe_router_topk=2` for instance."""
    return config_from_dict(nest({ENTRIES[name].key: value for name, value in fields.items()}))
