"""Relative errors of fp8 products by recipe, in the emulation: `python benchmarks/fp8_error.py`.

Each number is |computed - exact| / |exact| in the Frobenius norm, exact being the product in fp64.
Values are normal; with an outlier, the first value of the inputs and of the gradients is 100,000.
The first row and column of each product, which contain it, are left out.

    T 512 tokens   I 1024 inputs   O 512 outputs
"""

import torch
from torch import Tensor, nn

from nanotrain.kernels.fp8.layer import Fp8Layer, Fp8Options
from nanotrain.kernels.fp8.nvfp4_products import select_linears
from nanotrain.kernels.linear import Linear
from nanotrain.precision.fp8 import FORMATS, RECIPES

TOKENS, INPUTS, OUTPUTS = 512, 1024, 512
OUTLIER = 1e5


def draw(*shape: int, has_outlier: bool, generator: torch.Generator) -> Tensor:
    """Normal values."""
    x = torch.randn(shape, generator=generator)
    if has_outlier:
        x[0, 0] = OUTLIER
    return x


def errors(options: Fp8Options, *, has_outlier: bool) -> list[float]:
    """Relative errors of fprop, dgrad and wgrad."""
    generator = torch.Generator().manual_seed(0)
    weight = draw(OUTPUTS, INPUTS, has_outlier=False, generator=generator)
    x = draw(TOKENS, INPUTS, has_outlier=has_outlier, generator=generator)
    grad = draw(TOKENS, OUTPUTS, has_outlier=has_outlier, generator=generator)
    products = select_linears(options)(
        [Linear(nn.Parameter(weight), None, fp8=Fp8Layer(options))], records=False
    )
    with torch.no_grad():
        computed = [*products.fprop(x), products.dgrad([grad]), *products.wgrad([grad], x)]
    wide_x, wide_weight, wide_grad = x.double(), weight.double(), grad.double()
    exact = [wide_x @ wide_weight.t(), wide_grad @ wide_weight, wide_grad.t() @ wide_x]
    inner = [(a.double()[1:, 1:], b[1:, 1:]) for a, b in zip(computed, exact, strict=True)]
    return [((a - b).norm() / b.norm()).item() for a, b in inner]


def main() -> None:
    """Print one row of a Markdown table per recipe and format."""
    print("| recipe | format | fprop | dgrad | wgrad | with an outlier: fprop | dgrad | wgrad |")
    print("|---|---|---|---|---|---|---|---|")
    for recipe, row in RECIPES.items():
        for name in row.formats:
            options = Fp8Options(row, FORMATS[name])
            numbers = [
                value for flag in (False, True) for value in errors(options, has_outlier=flag)
            ]
            cells = " | ".join(f"{100 * value:.1f} %" for value in numbers)
            print(f"| {recipe} | {name} | {cells} |")


if __name__ == "__main__":
    main()
