"""Configurations for tests, written as short as their fields' unique names allow."""

from nanotrain.config.config import Config
from nanotrain.config.schema import ENTRIES, config_from_dict


def config_of(**keys: object) -> Config:
    """A configuration from `field=value` or `section__field=value`."""
    values: dict[str, dict[str, object]] = {}
    for key, value in keys.items():
        name = key.split("__")[-1]
        values.setdefault(ENTRIES[name].section, {})[name] = value
    return config_from_dict(values)
