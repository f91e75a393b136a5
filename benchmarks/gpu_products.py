"""Matrix products and casts for gpu_kernels.py: dense layers and experts, in bf16 and fp8."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from gpu_measure import Machine, Measurement, relative_error
from torch import Tensor

from nanotrain.kernels.fp8 import quantize, scaled_mm
from nanotrain.kernels.fp8.quantize import Cast, Quantized
from nanotrain.kernels.linear import write_wgrad
from nanotrain.precision.fp8 import WEIGHT_DTYPE, Recipe


def dense_products(machine: Machine) -> Iterator[Measurement]:
    """Products of a dense layer in bf16, forward and into fp32 gradients."""
    rows, hidden = machine.tokens, machine.hidden
    x = machine.tensor(rows, hidden)
    weight = machine.tensor(4 * hidden, hidden)
    grad = machine.tensor(rows, 4 * hidden)
    flops = 2 * rows * hidden * 4 * hidden
    out = torch.zeros(4 * hidden, hidden, device=machine.device)

    def wgrad_error() -> float:
        total = torch.ones_like(out)
        write_wgrad(grad, x, out=total, adds=True)
        return relative_error(total, 1 + grad.double().t() @ x.double())

    yield Measurement(
        "product bf16",
        lambda: x @ weight.t(),
        flops=flops,
        error=lambda: relative_error(x @ weight.t(), x.double() @ weight.double().t()),
    )
    yield Measurement(
        "wgrad bf16, written in fp32", lambda: write_wgrad(grad, x, out=out), flops=flops
    )
    yield Measurement(
        "wgrad bf16, added in fp32",
        lambda: write_wgrad(grad, x, out=out, adds=True),
        flops=flops,
        error=wgrad_error,
        bound=machine.wgrad_bound,
    )


def _scale_of(x: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor | None:
    """[1] inverse scale of a tensor, where a recipe scales whole tensors."""
    if not recipe.is_per_tensor:
        return None
    return quantize.inverse_scales(x.abs().amax().float().view(1), dtype, power_of_two=False)


def _form_error(found: Quantized | None, expected: Quantized | None) -> float:
    """The relative error of fp8 values; the kernel pads rows and columns to whole blocks."""
    assert found is not None, "both forms are cast"
    assert expected is not None, "both forms are cast"
    rows, columns = expected.values.shape
    values = found.values[:rows, :columns]
    return relative_error(values.float(), expected.values.float())


def fp8_casts(machine: Machine) -> Iterator[Measurement]:
    """Casts to fp8 of activations and weights, plain and transposed: 4 bytes per element."""
    from nanotrain.kernels.fp8 import triton_cast

    operands = {
        "activations": machine.tensor(machine.tokens, machine.hidden),
        "weights": machine.tensor(4 * machine.hidden, machine.hidden),
    }
    for name, recipe in machine.recipes.items():
        for what, x in operands.items():
            block = recipe.weight_block if what == "weights" else recipe.block
            how = Cast(block, WEIGHT_DTYPE, power_of_two=recipe.power_of_two, columns=True)
            inverse = _scale_of(x, recipe, WEIGHT_DTYPE)

            def run(x: Tensor = x, how: Cast = how, inverse: Tensor | None = inverse) -> object:
                return triton_cast.cast(x, how, inverse=inverse)

            def error(x: Tensor = x, how: Cast = how, inverse: Tensor | None = inverse) -> float:
                found, _ = triton_cast.cast(x, how, inverse=inverse)
                expected = quantize.cast(x, how, inverse=inverse)
                rows = _form_error(found.rows, expected.rows)
                return max(rows, _form_error(found.columns, expected.columns))

            moved = 4 * x.numel()
            yield Measurement(
                f"cast to fp8, {name}, {what}",
                run,
                moved_bytes=moved,
                error=error,
                bound=machine.cast_bound,
            )


def fp8_products(machine: Machine) -> Iterator[Measurement]:
    """torch's product of fp8 matrices, by recipe."""
    rows, hidden = machine.tokens, machine.hidden
    x = machine.tensor(rows, hidden)
    weight = machine.tensor(4 * hidden, hidden)
    reference = x.float() @ weight.float().t()
    for name, recipe in machine.recipes.items():
        a = _cast_rows(x, recipe, recipe.block)
        b = _cast_rows(weight, recipe, recipe.weight_block)

        def run(a: Quantized = a, b: Quantized = b) -> Tensor:
            return scaled_mm.scaled_mm(a, b, dtype=torch.bfloat16)

        yield Measurement(
            f"product fp8, {name}",
            run,
            flops=2 * rows * hidden * 4 * hidden,
            error=lambda run=run: relative_error(run(), reference),
            bound=machine.fp8_bound,
        )


def _cast_rows(x: Tensor, recipe: Recipe, block: tuple[int | None, int | None]) -> Quantized:
    """x in fp8, not transposed."""
    from nanotrain.kernels.fp8 import triton_cast

    how = Cast(block, WEIGHT_DTYPE, power_of_two=recipe.power_of_two)
    forms, _ = triton_cast.cast(x, how, inverse=_scale_of(x, recipe, WEIGHT_DTYPE))
    return forms.get()


@dataclass(frozen=True)
class ExpertCase:
    """Tokens of eight experts, two of which have none.

    T tokens   E experts   I, O sizes of the products
    """

    x: Tensor  # [T, I]
    weight: Tensor  # [E, O, I]
    grad: Tensor  # [T, O]
    counts: tuple[int, ...]
    offs: Tensor  # [E] int32

    @property
    def flops(self) -> int:
        """FLOPs of one product of all tokens."""
        return 2 * self.x.numel() * self.weight.shape[1]

    def outputs(self) -> Tensor:
        """[T, O] fp32."""
        parts = zip(self.x.split(self.counts), self.weight, strict=True)
        return torch.cat([tokens.float() @ matrix.float().t() for tokens, matrix in parts])

    def weight_gradients(self) -> Tensor:
        """[E, O, I] fp32."""
        parts = zip(self.grad.split(self.counts), self.x.split(self.counts), strict=True)
        return torch.stack([grad.float().t() @ tokens.float() for grad, tokens in parts])


def expert_case(machine: Machine) -> ExpertCase:
    """Experts with uneven numbers of tokens."""
    share = machine.tokens // 6
    uneven = [1, -1, 5, -5, 13, -13]
    counts = [share + extra for extra in uneven] + [0, 0]
    counts[5] += machine.tokens - sum(counts)
    hidden = machine.hidden
    return ExpertCase(
        x=machine.tensor(machine.tokens, hidden),
        weight=machine.tensor(8, hidden // 2, hidden),
        grad=machine.tensor(machine.tokens, hidden // 2),
        counts=tuple(counts),
        offs=torch.tensor(counts).cumsum(0).int().to(machine.device),
    )


def bf16_experts(machine: Machine) -> Iterator[Measurement]:
    """torch's grouped products in bf16."""
    if machine.device == "cpu":
        return  # torch has them in fp32 only
    case = expert_case(machine)

    def tokens() -> Tensor:
        return F.grouped_mm(case.x, case.weight.transpose(1, 2), offs=case.offs)

    def wgrads() -> Tensor:
        return F.grouped_mm(case.grad.t(), case.x, offs=case.offs)

    yield Measurement(
        "experts bf16, tokens, torch",
        tokens,
        flops=case.flops,
        error=lambda: relative_error(tokens(), case.outputs()),
    )
    yield Measurement(
        "experts bf16, weight gradient, torch",
        wgrads,
        flops=case.flops,
        error=lambda: relative_error(wgrads(), case.weight_gradients()),
    )


def fp8_experts(machine: Machine) -> Iterator[Measurement]:
    """Casts and products of experts in fp8, in the kernels of this package."""
    from nanotrain.kernels.fp8 import triton_cast, triton_grouped

    case = expert_case(machine)
    experts, outputs, inputs = case.weight.shape
    ends = torch.arange(outputs, experts * outputs + 1, outputs, device=machine.device).int()
    for name, recipe in machine.recipes.items():
        per_expert = recipe.is_per_tensor
        inverse = torch.full((experts,), 0.02, device=machine.device) if per_expert else None
        how = Cast(recipe.block, WEIGHT_DTYPE, power_of_two=recipe.power_of_two, columns=True)
        weight_how = Cast(
            recipe.weight_block, WEIGHT_DTYPE, power_of_two=recipe.power_of_two, columns=True
        )

        def cast_tokens(x: Tensor, how: Cast = how, inverse: Tensor | None = inverse):
            return triton_cast.cast(x, how, inverse=inverse, offs=case.offs)[0]

        x = cast_tokens(case.x)
        grad = cast_tokens(case.grad)
        weight, _ = triton_cast.cast(
            case.weight.flatten(0, 1), weight_how, inverse=inverse, offs=ends, is_stack=True
        )
        products, blocks = scaled_mm.pack_operands(x.get(), weight.get())
        sums, sum_blocks = scaled_mm.pack_operands(
            grad.get(transposed=True), x.get(transposed=True)
        )
        out = torch.empty(machine.tokens, outputs, device=machine.device, dtype=torch.bfloat16)
        total = torch.zeros(experts, outputs, inputs, device=machine.device)

        def multiply(operands=products, blocks=blocks, out=out) -> Tensor:
            triton_grouped.write_grouped_mm([*operands, case.offs], blocks, out=out, adds=False)
            return out

        yield Measurement(
            f"experts {name}, cast of tokens",
            lambda cast_tokens=cast_tokens: cast_tokens(case.x),
            moved_bytes=4 * case.x.numel(),
        )
        yield Measurement(
            f"experts {name}, tokens",
            multiply,
            flops=case.flops,
            error=lambda multiply=multiply: relative_error(multiply(), case.outputs()),
            bound=machine.fp8_bound,
        )
        add_up = partial(multiply, sums, sum_blocks, total)
        yield Measurement(
            f"experts {name}, weight gradient",
            add_up,
            flops=case.flops,
            error=lambda add_up=add_up: relative_error(add_up(), case.weight_gradients()),
            bound=machine.fp8_bound,
        )
