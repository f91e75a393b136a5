"""Which number format each kind of tensor has: one table from the configuration's words to torch's dtypes."""

from dataclasses import dataclass

import torch

from nanotrain.config.config import PrecisionConfig

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """The number formats of a run.

    Attributes:
        params: parameters and activations.
        grads: gradient buffers and their reduction.
        main: the weights that the optimizer updates, and its moments.
    """

    params: torch.dtype
    grads: torch.dtype = torch.float32
    main: torch.dtype = torch.float32

    @classmethod
    def of(cls, config: PrecisionConfig) -> "Precision":
        """The formats that a precision section asks for."""
        return cls(params=TORCH_DTYPES[config.params_dtype.value])

    @property
    def has_own_main_weights(self) -> bool:
        """Whether the optimizer keeps weights of its own; fp32 parameters are their own main weights."""
        return self.params != self.main
