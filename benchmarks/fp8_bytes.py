"""Bytes per element that casts to fp8 move, by torch's operators and by kernels: `python
benchmarks/fp8_bytes.py`.

An operand [4096, 4096] in bf16 on the meta device, as it is and with its transposed form, amaxes
and scales included; in NVFP4 a gradient, with its random words.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # where a test loads this file by its path
from operator_count import OperatorCount

from nanotrain.kernels.fp8 import nvfp4, triton_nvfp4
from nanotrain.kernels.fp8.layer import Fp8Layer, Fp8Options, Operand
from nanotrain.kernels.fp8.nvfp4_mm import pack_matrix
from nanotrain.kernels.fp8.products import Scales
from nanotrain.kernels.fp8.quantize import ComputedInput, NormInput, SwigluInput
from nanotrain.kernels.fp8.rounding import ElementWords
from nanotrain.precision.fp8 import FP8_FORMATS, FP8_RECIPES, RECIPES

SIZE = 4096
SWIGLU_RECIPES = ("delayed", "blockwise", "mxfp8")  # those whose casts compute SwiGLU


class Total:
    """The bytes and operators of a count."""

    def __init__(self) -> None:
        self.num_bytes, self.launches = 0.0, 0

    def add(
        self, name: str, *, num_bytes: float = 0.0, launches: int = 1, times: int = 1, **_: float
    ) -> None:
        """Count an operator."""
        self.num_bytes, self.launches = self.num_bytes + num_bytes, self.launches + launches


def counted(recipe: str, *, is_fused: bool, columns: bool) -> Total:
    """One operand of a layer whose history has an amax."""
    options = replace(Fp8Options(FP8_RECIPES[recipe], FP8_FORMATS["e4m3"]), is_fused=is_fused)
    scales = Scales([Fp8Layer(options).to("meta")], records=True)
    x, total = torch.empty(SIZE, SIZE, dtype=torch.bfloat16, device="meta"), Total()
    with OperatorCount(total, times=1):
        if options.recipe.is_per_tensor:
            scales.set({(0, Operand.GRAD): scales.amax(x, Operand.GRAD)})
        scales.cast(x, Operand.GRAD, columns=columns)
    return total


def counted_nvfp4(*, is_fused: bool, columns: bool) -> Total:
    """A gradient in NVFP4; its transposed form is transformed."""
    casts = triton_nvfp4 if is_fused else nvfp4
    x, total = torch.empty(SIZE, SIZE, dtype=torch.bfloat16, device="meta"), Total()
    words = ElementWords(torch.empty(SIZE, dtype=torch.int64, device="meta"), 0)
    with OperatorCount(total, times=1):
        amax, amax_t = casts.tensor_amaxes(x)
        forms = [casts.cast_rows(x, amax, block=RECIPES["nvfp4"].block, words=words)]
        if columns:
            forms.append(casts.cast_columns(x, amax_t, words=words))
        for form in forms:
            if isinstance(form, nvfp4.Nvfp4):
                pack_matrix(form)
    return total


def count_joined(recipe: str, *, is_norm: bool) -> tuple[float, float]:
    """Bytes per value of an RMSNorm or a SwiGLU and its casts for fprop and wgrad.

    Separate, and in one cast; with a norm the factors per row are computed before, in one read.
    """
    options = replace(Fp8Options(FP8_RECIPES[recipe], FP8_FORMATS["e4m3"]), is_fused=True)
    value = torch.empty(SIZE, SIZE, dtype=torch.bfloat16, device="meta")
    operand: ComputedInput = SwigluInput(value, torch.empty_like(value))
    activation = 3 * value.element_size()  # a kernel reads gate and up, and writes their product
    before = 0
    if is_norm:
        factors = torch.empty(SIZE, 1, device="meta")
        operand = NormInput(value, factors, value[0])
        activation = 2 * value.element_size()  # a kernel keeps a row between its two reads
        before = value.element_size()
    separate = Total()
    joined = Total()
    with OperatorCount(separate, times=1):
        scales = _scaled(value, options)
        scales.cast(value, Operand.INPUT)
        scales.cast(value, Operand.INPUT, rows=False, columns=True)
    with OperatorCount(joined, times=1):
        _scaled(operand, options).cast(operand, Operand.INPUT, columns=True)
    return separate.num_bytes / SIZE**2 + activation, joined.num_bytes / SIZE**2 + before


def _scaled(x: torch.Tensor | ComputedInput, options: Fp8Options) -> Scales:
    """The scales of a layer whose history has an amax, for an input."""
    scales = Scales([Fp8Layer(options).to("meta")], records=True)
    if options.recipe.is_per_tensor:
        scales.set({(0, Operand.INPUT): scales.amax(x, Operand.INPUT)})
    return scales


def main(show: Callable[[str], None] = print) -> None:
    """Print a row per recipe."""
    show("| recipe | torch: one form | both | operators | kernels: one form | both | operators |")
    show(f"|---{6 * '|---:'}|")
    for recipe in RECIPES:
        cells = []
        for is_fused in (False, True):
            count = counted_nvfp4 if recipe == "nvfp4" else partial(counted, recipe)
            found = [count(is_fused=is_fused, columns=columns) for columns in (False, True)]
            cells += [f"{each.num_bytes / SIZE**2:.1f}" for each in found] + [
                str(found[1].launches)
            ]
        show(f"| {recipe} | {' | '.join(cells)} |")
    show("")
    show("| recipe | input | computed, then cast for fprop and wgrad | in one cast |")
    show("|---|---|---:|---:|")
    for recipe in FP8_RECIPES:
        for is_norm in (True, False):
            if is_norm or recipe in SWIGLU_RECIPES:
                separate, joined = count_joined(recipe, is_norm=is_norm)
                name = "norm" if is_norm else "SwiGLU"
                show(f"| {recipe} | {name} | {separate:.1f} | {joined:.1f} |")


if __name__ == "__main__":
    main()
