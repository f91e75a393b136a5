"""A training run: its entry point, inputs, plan, parts, step and loop; what happens around the steps is in `hooks/`.

It holds no model, storage or communication code: `build.py` assembles those of the packages below.

The package itself can be called, so that `from nanotrain import train` is the function `train_config` and
`nanotrain.train.step` still a module.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanotrain.config.config import Config
    from nanotrain.report.history import RunHistory


class _CallablePackage(ModuleType):
    """A module that can be called like a function."""

    def __call__(self, config: "Config") -> "RunHistory":
        """Train; see `nanotrain.train.__main__.train_config`."""
        from nanotrain.train.__main__ import train_config

        return train_config(config)


sys.modules[__name__].__class__ = _CallablePackage
