"""Functions that stay out of compiled graphs, because they communicate or because their shapes vary."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def eager(function: F) -> F:
    """Run a function eagerly inside compiled code: a graph ends before it and the next one starts after it.

    `torch.compiler.disable` as a decorator imports torch._dynamo when the module is imported: 1.3 to 5 s of CPU time
    per process, even if nothing is compiled. This decorator calls it only while a graph is being compiled.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
