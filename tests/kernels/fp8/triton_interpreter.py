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
MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NUMBERS = torch.cat([MAGNITUDES, -MAGNITUDES])  # by code of e2m1


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
    """Scales by row of both matrices: e8m0 per 32 values of the summed dim, e4m3 per 16 of e2m1."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    a, scale_a, form, b, scale_b, _, acc, *_ = given
    is_packed = form == "e2m1"

    def decoded(x: Any, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(x.handle.data.view("uint8").copy()).view(dtype).float()

    def values(x: Any) -> Tensor:
        """Rows of values, of a matrix with packed or single values per byte."""
        if not is_packed:
            return decoded(x, E4M3)
        codes = torch.from_numpy(x.handle.data.copy()).long()
        both = torch.stack([NUMBERS[codes & 15], NUMBERS[codes >> 4]], dim=-1)
        return both.flatten(1)

    unit, dtype = (16, E4M3) if is_packed else (32, torch.float8_e8m0fnu)
    factors = [decoded(scale, dtype).repeat_interleave(unit, 1) for scale in (scale_a, scale_b)]
    rows_b = values(tl.trans(b)) if is_packed else values(b).t()
    product = (values(a) * factors[0]) @ (rows_b * factors[1]).t()
    return tl.tensor(TensorHandle(product.numpy() + acc.handle.data, tl.float32), acc.type)
