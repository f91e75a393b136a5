"""Every Triton kernel compiles for Ampere, Hopper and Blackwell, with the arguments that its
function passes.

Needs no GPU: Triton brings the assembler. Run with `pip install nanotrain[triton]` and without
`TRITON_INTERPRET`.
"""

import os

import pytest
import torch

from nanotrain.kernels import triton_permute, triton_softmax, triton_swiglu
from nanotrain.kernels.fp8 import triton_cast, triton_grouped
from nanotrain.kernels.fp8.quantize import Cast
from nanotrain.kernels.permute import plan_permutation
from nanotrain.precision.fp8 import Block

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles nothing with TRITON_INTERPRET=1", allow_module_level=True)
triton = pytest.importorskip("triton")


class Card:
    """What a launch asks a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self._target = pytest.importorskip("triton.backends.compiler").GPUTarget(
            "cuda", capability, 32
        )

    def get_current_target(self):
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path, request) -> set[str]:
    """The names of the kernels that a card was given; none of them runs."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    run, names = JITFunction.run, set()

    def compile_only(kernel, *args, grid, **options):
        options["warmup"] = True
        kernel.device_caches.clear()  # it keeps the card of the first launch
        binary = run(kernel, *args, grid=grid, **options)
        assert len(binary.asm["cubin"]) > 0
        names.add(kernel.fn.__name__)

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", Card(request.param))
    return names


@pytest.mark.filterwarnings("ignore")  # of Triton, about its own defaults
@pytest.mark.parametrize("compiled", [80, 90, 100], indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_kernel_compiles(compiled: set[str], dtype: torch.dtype) -> None:
    logits, column = torch.randn(5, 1000).to(dtype), torch.zeros(5, 1, dtype=torch.int64)
    lse = triton_softmax.row_logsumexp(logits)
    ones = torch.ones(5, 1)
    triton_softmax.softmax_gradient_(
        logits, logsumexp=lse, column=column, local_mask=ones, scale=ones
    )
    plan, rows = plan_permutation(torch.tensor([[0, 1], [1, 2]]), 3), torch.randn(4, 1000).to(dtype)
    triton_permute.spread(rows[:2], plan.order, inverse=plan.inverse)
    triton_permute.combine(rows, plan.inverse, weights=None)
    given = {"order": plan.order, "inverse": plan.inverse, "weights": torch.ones(2, 2)}
    triton_permute.combine_backward(rows[:2], rows, **given)
    triton_swiglu.swiglu_backward(rows, gate=rows, up=triton_swiglu.swiglu(rows, rows))
    kernels = {**vars(triton_softmax), **vars(triton_permute), **vars(triton_swiglu)}
    assert compiled == {
        name for name, value in kernels.items() if isinstance(value, triton.JITFunction)
    }


E4M3 = torch.float8_e4m3fn
# blocks of the recipes that a card has: torch multiplies tiles of 128 on Hopper, MX on Blackwell
FP8_BLOCKS = [(90, (None, None)), (90, (1, None)), (90, (1, 128)), (90, (128, 128)), (100, (1, 32))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("compiled", "block"), FP8_BLOCKS, indirect=["compiled"])
def test_casts_to_fp8_compile(compiled: set[str], block: Block) -> None:
    x, inverse = torch.randn(64, 256).bfloat16(), torch.ones(1) if block == (None, None) else None
    how = Cast(block, torch.float8_e4m3fn, power_of_two=inverse is None, columns=True)
    triton_cast.cast(x, how, inverse=inverse, measures=inverse is not None)
    assert compiled == ({"_cast"} if block != (1, None) else {"_cast", "_amax"})


PRODUCTS = [(90, (None, None), torch.float8_e5m2), (90, (1, 128), E4M3), (100, (1, 32), E4M3)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("compiled", "block", "dtype"), PRODUCTS, indirect=["compiled"])
@pytest.mark.parametrize("sums", [False, True])
def test_products_of_experts_compile(
    compiled: set[str], block: Block, dtype: torch.dtype, sums: bool
) -> None:
    offs, is_mx = torch.tensor([128, 256], dtype=torch.int32), block == (1, 32)
    blocks = [
        size or 0 for size in (*block, *((128, 128) if block == (1, 128) and not sums else block))
    ]
    scales = (
        torch.ones(2, 1)
        if block == (None, None)
        else torch.ones(256, 8, dtype=torch.uint8 if is_mx else None)
    )
    operands = [
        torch.empty(256, 256, dtype=dtype),
        scales,
        torch.empty(256, 256, dtype=E4M3),
        scales,
        offs,
    ]
    out = torch.empty(2, 256, 256) if sums else torch.empty(256, 128).bfloat16()
    triton_grouped.write_grouped_mm(operands, blocks, out=out, adds=sums)
    assert compiled == {"_multiply"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [80], indirect=True)
def test_a_card_without_fp8_has_no_casts(compiled: set[str]) -> None:
    with pytest.raises(Exception, match="fp8e4nv not supported"):
        triton_cast.cast(
            torch.randn(64, 256), Cast((128, 128), torch.float8_e4m3fn, power_of_two=True)
        )
    assert not compiled
