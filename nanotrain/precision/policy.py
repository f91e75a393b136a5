"""Precision policy: the dtype of parameters, gradients and main params."""

from dataclasses import dataclass

import torch

from nanotrain.config.config import PrecisionConfig
from nanotrain.precision.dtypes import TORCH_DTYPES


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run."""

    params: torch.dtype  # model params and activations
    grads: torch.dtype = torch.float32  # gradient buffers and their reduction
    main: torch.dtype = torch.float32  # main params, which the optimizer updates, and its moments

    @classmethod
    def of(cls, config: PrecisionConfig) -> "Precision":
        """The dtypes of a `precision` config section."""
        return cls(params=TORCH_DTYPES[config.params_dtype.value])

    @property
    def has_separate_main_params(self) -> bool:
        """Whether main params are stored apart from model params; fp32 model params are their own main params."""
        return self.params != self.main
