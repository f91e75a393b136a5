"""The Triton kernels of casts to fp8 in Triton's interpreter: the bits of torch's operators, and
fp64.

Run as tests/kernels/test_triton_softmax.py.
"""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.kernels import triton_swiglu
from nanotrain.kernels.fp8 import triton_cast
from nanotrain.kernels.fp8.layer import Fp8Layer, Fp8Options, Operand
from nanotrain.kernels.fp8.products import Scales
from nanotrain.kernels.fp8.quantize import (
    Cast,
    Forms,
    NormInput,
    Quantized,
    SwigluInput,
    block_amax,
    cast,
    inverse_scales,
)
from nanotrain.kernels.fp8.scaled_mm import is_swizzled, swizzle_32_4_4
from nanotrain.kernels.rms_norm import rms_factors
from nanotrain.precision.fp8 import FP8_FORMATS, RECIPES, Block
from tests.kernels.fp8.triton_interpreter import mend

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(autouse=True)
def mended(monkeypatch: pytest.MonkeyPatch) -> None:
    mend(monkeypatch)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (
        torch.randn(shape, generator=generator) * 10 ** torch.randn(shape, generator=generator)
    ).to(dtype)


def as_bytes(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def assert_same(
    found: Quantized | None, expected: Quantized | None, *, is_exact: bool = True
) -> None:
    """Equal values and scales, zeros behind the values; a rounded reciprocal moves few values to
    the next number.
    """
    assert found is not None and expected is not None
    rows, columns = expected.values.shape
    assert not found.values[:rows, columns:].float().any() and found.values.shape[1] % 16 == 0
    equal = as_bytes(found.values[:rows, :columns]) == as_bytes(expected.values)
    assert equal.all() if is_exact else equal.float().mean() > 0.99
    scales = expected.inverse_scales
    if is_swizzled(found.inverse_scales):
        scales = swizzle_32_4_4(scales).to(torch.float8_e8m0fnu)
    assert torch.equal(as_bytes(found.inverse_scales), as_bytes(scales))


def both(x: Tensor, block: Block, *, dtype: torch.dtype = E4M3) -> tuple[Forms, Forms]:
    """By the kernel and by torch's operators."""
    inverse = None
    if block == (None, None):
        inverse = inverse_scales(block_amax(x, block), dtype, power_of_two=False).view(1)
    how = Cast(block, dtype, power_of_two=inverse is None, columns=True)
    return triton_cast.cast(x, how, inverse=inverse)[0], cast(x, how, inverse=inverse)


@pytest.mark.parametrize("block", [(None, None), (1, None), (1, 128), (128, 128), (1, 32)])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((130, 200), torch.bfloat16), ((16, 48), torch.float32)]
)
def test_values_and_scales_are_those_of_torch(
    block: Block, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    for x in (draw(*shape, dtype=dtype), draw(*reversed(shape), dtype=dtype).t()):
        for found, expected in zip(*both(x, block), strict=True):
            assert_same(found, expected, is_exact=block != (None, None))
    found, expected = both(x, block, dtype=E5M2)
    assert_same(found[0], expected[0], is_exact=block != (None, None))


def test_two_programs_write_what_one_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(130, 200, dtype=torch.bfloat16)
    for block in ((None, None), (1, None), (128, 128)):
        forms = []
        for joins in (False, True):
            monkeypatch.setattr(triton_cast.Plan, "joins", lambda *_, joins=joins, **__: joins)
            forms.append(both(x, block)[0])
        for one, two in zip(*forms, strict=True):
            assert one is not None and two is not None
            assert torch.equal(as_bytes(one.values), as_bytes(two.values))
            assert torch.equal(one.inverse_scales, two.inverse_scales)


@pytest.mark.parametrize("block", [(None, None), (1, None), (1, 128), (128, 128)])
def test_every_value_is_within_the_rounding_of_fp64(block: Block) -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    for form, matrix in zip(both(x, block)[0], (x, x.t()), strict=True):
        assert form is not None
        rows, columns = matrix.shape
        values = (
            Quantized(form.values[:rows, :columns], form.inverse_scales, block)
            .dequantize()
            .double()
        )
        assert ((values - matrix).abs() <= 2.0**-4 * matrix.double().abs() + 1e-4).all()


def test_a_value_that_is_not_a_number_reaches_the_scale() -> None:
    for value in (float("nan"), float("inf")):
        x = draw(20, 140)
        x[3, 5] = value
        assert triton_cast.amaxes(x).item() == float("inf")
        for block in ((1, None), (1, 128), (128, 128)):
            (form, _), _ = both(x, block)
            assert form is not None and form.inverse_scales[3 // (block[0] or 1), 0].isnan()


def test_the_cast_of_delayed_scaling_measures_the_amax_and_reads_once() -> None:
    options = Fp8Options(RECIPES["delayed"], FP8_FORMATS["e4m3"], is_fused=True)
    layer, other, x = Fp8Layer(options), Fp8Layer(options), draw(20, 40)
    for each in (layer, other):
        each.update(torch.full((3, 1), 2.0))
    scales = Scales([layer, other], records=True)
    amax = scales.amax(x, Operand.INPUT)
    assert amax.item() == 0, "the scale follows from the history"
    scales.set({(i, Operand.INPUT): amax for i in range(2)})
    (form, _), _ = (
        scales.cast(x, Operand.INPUT),
        scales.cast(x, Operand.INPUT, rows=False, columns=True),
    )
    assert form is not None and form.inverse_scales.item() == pytest.approx(2 / 448)
    for each in (layer, other):
        assert each.step_amax is not None and each.step_amax[Operand.INPUT].item() == x.abs().max()
    scales = Scales([layer], records=True)
    scales.set({(0, Operand.GRAD): scales.amax(x, Operand.GRAD)})
    assert scales.cast(torch.full_like(x, torch.inf), Operand.GRAD)[0].inverse_scales.isnan()  # type: ignore[union-attr]
    layer.update(torch.zeros(3, 1))
    assert Scales([layer], records=True).amax(x, Operand.INPUT).item() == x.abs().max(), (
        "without an earlier amax"
    )


def test_rows_of_experts_have_scales_of_their_own_and_zeros_between() -> None:
    """What weight gradients sum over: tokens of an expert from a multiple of 128 on, with blocks of
    their own.
    """
    x, offs = draw(150, 48), torch.tensor([130, 130, 149], dtype=torch.int32)
    (rows, columns), _ = triton_cast.cast(x, Cast((1, 128), E4M3, True, columns=True), offs=offs)
    expected, _ = cast(x[:149], Cast((1, 128), E4M3, True))
    assert rows is not None and columns is not None and expected is not None
    assert torch.equal(as_bytes(rows.values[:149, :48]), as_bytes(expected.values))
    for tokens, place in ((slice(0, 130), 0), (slice(130, 149), 256)):
        _, part = cast(x[tokens], Cast((1, 128), E4M3, True, rows=False, columns=True))
        assert part is not None
        stop, blocks = (
            place + len(x[tokens]),
            slice(place // 128, place // 128 + part.inverse_scales.shape[1]),
        )
        assert torch.equal(as_bytes(columns.values[:, place:stop]), as_bytes(part.values))
        assert not columns.values[:, stop : -(-stop // 128) * 128].float().any()
        assert torch.equal(columns.inverse_scales[:, blocks], part.inverse_scales)
    assert triton_cast.amaxes(x, offs).tolist() == [
        x[:130].abs().max().item(),
        0.0,
        x[130:149].abs().max().item(),
    ]


@pytest.mark.parametrize("block", [(None, None), (1, None), (1, 128), (1, 32)])
def test_a_cast_computes_swiglu_with_the_bits_of_its_kernel(block: Block) -> None:
    """One matrix and experts, with amaxes of the products."""
    gate, up = draw(130, 144, dtype=torch.bfloat16), draw(144, 130, dtype=torch.bfloat16).t()
    x = SwigluInput(gate, up.contiguous())
    value = triton_swiglu.swiglu(*x)
    offs = torch.tensor([3, 130], dtype=torch.int32)
    how = Cast(block, E4M3, power_of_two=block != (None, None), columns=True)
    for ends, experts in ((None, 1), (offs, 2)):
        inverse = torch.full((experts,), 0.25) if block == (None, None) else None
        found, amax = triton_cast.cast(
            x, how, inverse=inverse, offs=ends, measures=inverse is not None
        )
        expected, amax_of_value = triton_cast.cast(
            value, how, inverse=inverse, offs=ends, measures=inverse is not None
        )
        for form, same in zip(found, expected, strict=True):
            assert form is not None and same is not None
            assert torch.equal(as_bytes(form.values)[:, :130], as_bytes(same.values)[:, :130])
        assert torch.equal(amax, amax_of_value)
        assert torch.equal(triton_cast.amaxes(x, ends), triton_cast.amaxes(value, ends))


@pytest.mark.parametrize("block", [(None, None), (1, None), (1, 128), (128, 128), (1, 32)])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_a_cast_computes_an_rms_norm_with_the_bits_of_both_steps(
    block: Block, weight_dtype: torch.dtype
) -> None:
    x = draw(144, 130, dtype=torch.bfloat16).t()
    weight = draw(144, dtype=weight_dtype)
    operand = NormInput(x, rms_factors(x, eps=1e-5), weight)
    value = F.rms_norm(x.float(), (144,), weight.float(), 1e-5).to(x.dtype)
    assert (operand.value() != value).float().mean() < 1e-3, "sums of squares in another order"
    value = operand.value()
    inverse = torch.full((1,), 0.25) if block == (None, None) else None
    how = Cast(block, E4M3, power_of_two=inverse is None, columns=True)
    measures = inverse is not None
    found, amax = triton_cast.cast(operand, how, inverse=inverse, measures=measures)
    expected, amax_of_value = triton_cast.cast(value, how, inverse=inverse, measures=measures)
    for form, same in zip(found, expected, strict=True):
        assert form is not None and same is not None
        rows, columns = x.shape if form is found.rows else x.t().shape
        bits, same_bits = as_bytes(form.values), as_bytes(same.values)
        assert torch.equal(bits[:rows, :columns], same_bits[:rows, :columns])
        assert not form.values[:, columns:].float().any(), "zeros, which may be negative"
        assert torch.equal(as_bytes(form.inverse_scales), as_bytes(same.inverse_scales))
    assert torch.equal(amax, amax_of_value)
    assert torch.equal(triton_cast.amaxes(operand), triton_cast.amaxes(value))
