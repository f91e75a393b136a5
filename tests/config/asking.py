"""Configurations for tests, written as short as their fields' unique names allow."""

from nanotrain.config.config import Config
from nanotrain.config.rules.check import collect_errors
from nanotrain.config.rules.unused import reset_unused
from nanotrain.config.schema import ENTRIES, KEYS, config_from_dict, nest
from nanotrain.errors import ErrorCollector


def validate(config: Config, *, to_train: bool = False) -> None:
    """Check a configuration as if the command line had set every field; raises all errors in one."""
    errors = ErrorCollector()
    config, _ = reset_unused(config, explicit=frozenset(KEYS), errors=errors)
    collect_errors(config, to_train=to_train, errors=errors)
    errors.raise_errors()


def config_of(**fields: object) -> Config:
    """A configuration from `name=value`, `moe_router_topk=2` for instance."""
    return config_from_dict(nest({ENTRIES[name].key: value for name, value in fields.items()}))
