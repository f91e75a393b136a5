"""What Triton's interpreter lacks for fp8: conversions that round as GPUs do, and products of MX
blocks.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = {
    "fp8e4nv": E4M3,
    "fp8e5": E5M2,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}


def mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the interpreter both."""
    monkeypatch.setattr("triton.runtime.interpreter._convert_float", _convert)
    monkeypatch.setattr("triton.language.semantic.TritonSemantic.dot_scaled", _dot_scaled)


def _convert(value: Any, source: Any, target: Any, _: Any) -> Any:
    """By torch; the interpreter's own loses the carry of a mantissa that is rounded up."""
    found = torch.frombuffer(bytearray(value.tobytes()), dtype=DTYPES[source.name]).to(
        DTYPES[target.name]
    )
    return (
        found.view(torch.uint8)
        .numpy()
        .view(f"uint{target.primitive_bitwidth}")
        .reshape(np.shape(value))
    )


def _dot_scaled(_: Any, *given: Any) -> Any:
    """Scales are e8m0, one per 32 values of the summed dim, of both matrices by row of the
    product's factor.
    """
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    a, scale_a, _, b, scale_b, _, acc, *_ = given

    def decoded(x: Any, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(x.handle.data.view("uint8").copy()).view(dtype).float()

    factors = [
        decoded(scale, torch.float8_e8m0fnu).repeat_interleave(32, 1)
        for scale in (scale_a, scale_b)
    ]
    product = (decoded(a, E4M3) * factors[0]) @ (decoded(b, E4M3) * factors[1].t())
    return tl.tensor(TensorHandle(product.numpy() + acc.handle.data, tl.float32), acc.type)
