"""`Parameters`: the declared parameters of a module and its submodules, by relative name."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from nanotrain.precision.dtypes import TORCH_DTYPES
from nanotrain.spec.params import LocalParam


class Parameters:
    """Named parameters from which a module takes its own.

    Args:
        parameters: by name relative to the module ("attention.query.weight").
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters

    @classmethod
    def on_meta(cls, params: Sequence[LocalParam]) -> "Parameters":
        """The local shard of each parameter, without storage."""
        return cls({local.spec.name: _meta_parameter(local) for local in params})

    def __getitem__(self, name: str) -> nn.Parameter:
        """A parameter; KeyError where it is not declared."""
        return self._parameters[name]

    def get(self, name: str) -> nn.Parameter | None:
        """A parameter, or None where it is not declared."""
        return self._parameters.get(name)

    def linear(self, name: str) -> tuple[nn.Parameter, nn.Parameter | None]:
        """Weight and bias of a linear layer; no bias where none is declared."""
        return self[f"{name}.weight"], self.get(f"{name}.bias")

    def submodule(self, name: str) -> "Parameters":
        """The parameters of a submodule, named relative to it; empty where none is declared."""
        prefix = f"{name}."
        return Parameters({key[len(prefix) :]: p for key, p in self._parameters.items() if key.startswith(prefix)})

    def __len__(self) -> int:
        return len(self._parameters)


def _meta_parameter(local: LocalParam) -> nn.Parameter:
    return nn.Parameter(torch.empty(local.box.shape, dtype=TORCH_DTYPES[local.spec.dtype], device="meta"))
