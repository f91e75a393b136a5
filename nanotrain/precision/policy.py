"""Precision policy: the dtype of parameters, gradients and main params."""

from dataclasses import dataclass

import torch

from nanotrain.config.config import PrecisionConfig
from nanotrain.config.derive import accumulates_grads_in_fp32
from nanotrain.precision.dtypes import TORCH_DTYPES


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run."""

    params: torch.dtype  # model params and activations
    grads: torch.dtype = torch.float32  # gradient buffers, accumulation in them and their reduction
    main: torch.dtype = torch.float32  # main params, which the optimizer updates, and its moments
    main_grads: torch.dtype = torch.float32  # reduced gradients, which the optimizer reads

    @classmethod
    def of(cls, config: PrecisionConfig) -> "Precision":
        """The dtypes of a `precision` config section."""
        params = TORCH_DTYPES[config.params_dtype.value]
        return cls(
            params=params,
            grads=torch.float32 if accumulates_grads_in_fp32(config) else params,
            main_grads=TORCH_DTYPES[config.main_grads_dtype.value],
        )

    @property
    def has_separate_main_params(self) -> bool:
        """Whether main params are stored apart from model params; fp32 model params are their own main params."""
        return self.params != self.main
