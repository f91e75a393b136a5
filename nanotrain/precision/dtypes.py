"""The table of dtypes: name in configurations and manifests, torch dtype, name in safetensors headers."""

import torch

_ROWS = (
    ("fp64", torch.float64, "F64"),
    ("fp32", torch.float32, "F32"),
    ("fp16", torch.float16, "F16"),
    ("bf16", torch.bfloat16, "BF16"),
    ("int64", torch.int64, "I64"),
    ("int32", torch.int32, "I32"),
    ("int16", torch.int16, "I16"),
    ("int8", torch.int8, "I8"),
    ("uint8", torch.uint8, "U8"),
    ("bool", torch.bool, "BOOL"),
)
TORCH_DTYPES = {name: dtype for name, dtype, _ in _ROWS}
DTYPE_NAMES = {dtype: name for name, dtype, _ in _ROWS}
SAFETENSORS_NAMES = {name: safetensors for name, _, safetensors in _ROWS}


def torch_name(name: str) -> str:
    """Name of a dtype in torch and in Hugging Face's config.json.

    >>> torch_name("bf16")
    'bfloat16'
    """
    return str(TORCH_DTYPES[name]).removeprefix("torch.")
