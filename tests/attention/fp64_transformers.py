"""Modeling code of transformers that computes in fp64 what it computes in fp32."""

import importlib
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
    return modeling
