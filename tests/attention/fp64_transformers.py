"""Modeling code of transformers that computes in fp64 what it computes in fp32."""

import importlib
from collections.abc import Callable
from functools import wraps
from types import ModuleType, SimpleNamespace

import pytest
import torch


def modeling_in_fp64(family: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The modeling file of a family, where fp32 is another name of fp64."""
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    names = {name: getattr(torch, name) for name in dir(torch)} | dict.fromkeys(
        ("float", "float32"), torch.float64
    )
    for module in (modeling, importlib.import_module("transformers.modeling_rope_utils")):
        monkeypatch.setattr(module, "torch", SimpleNamespace(**names))
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    if positions := getattr(modeling, "create_sinusoidal_positions", None):
        monkeypatch.setattr(modeling, "create_sinusoidal_positions", with_fp64_quotients(positions))
    return modeling


def with_fp64_quotients(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The function with fp64 as the dtype of quotients of whole numbers."""

    @wraps(function)
    def computed(*args: int) -> torch.Tensor:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return function(*args)
        finally:
            torch.set_default_dtype(before)

    return computed
