"""Dtypes: their table, and the precision policy.

TORCH_DTYPES        torch dtype by name in configurations; DTYPE_NAMES: the inverse
SAFETENSORS_NAMES   name in safetensors headers, by name in configurations
as_fp32             a tensor in at least fp32
Precision           the dtypes of parameters, gradients, main params, optimizer state
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanotrain.config.config import PrecisionConfig

TORCH_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
SAFETENSORS_NAMES = {
    "fp64": "F64",
    "fp32": "F32",
    "fp16": "F16",
    "bf16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def torch_name(name: str) -> str:
    """Name of a dtype in torch and in Hugging Face's config.json.

    >>> torch_name("bf16")
    'bfloat16'
    """
    return str(TORCH_DTYPES[name]).removeprefix("torch.")


def as_fp32(x: Tensor) -> Tensor:
    """At least fp32; fp64 stays."""
    if x.itemsize >= 4:
        return x
    return x.float()


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run."""

    params: torch.dtype  # model params and activations
    grads: torch.dtype = torch.float32  # gradient buffers: accumulation and reduction
    main: torch.dtype = torch.float32  # main params, which the optimizer updates
    main_grads: torch.dtype = torch.float32  # reduced gradients, which the optimizer reads
    exp_avg: torch.dtype = torch.float32  # first moments and momentum buffers
    exp_avg_sq: torch.dtype = torch.float32  # second moments

    @classmethod
    def of(cls, config: PrecisionConfig) -> "Precision":
        """The dtypes of a `precision` config section."""
        params = TORCH_DTYPES[config.params_dtype]
        grads = torch.float32 if config.accumulates_grads_in_fp32 else params
        main_grads = TORCH_DTYPES[config.main_grads_dtype]
        if config.invariant:
            grads = main_grads = torch.float64
        return cls(
            params=params,
            grads=grads,
            main_grads=main_grads,
            main=TORCH_DTYPES[config.main_params_dtype],
            exp_avg=TORCH_DTYPES[config.exp_avg_dtype],
            exp_avg_sq=TORCH_DTYPES[config.exp_avg_sq_dtype],
        )

    @property
    def has_separate_main_params(self) -> bool:
        """Whether main params are stored separately from model params, in another dtype."""
        return self.params != self.main

    @property
    def sums_exactly(self) -> bool:
        """Whether gradients are multiples of a grid whose sums are exact (`--invariant`)."""
        return self.grads is torch.float64

    def state_dtype(self, name: str) -> torch.dtype:
        """The dtype in which a state tensor of an update rule is stored."""
        return self.exp_avg_sq if name == "exp_avg_sq" else self.exp_avg
