"""The Triton kernel of experts' weight gradients: against fp64 in Triton's interpreter, and its
compiled code.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from nanotrain.kernels import grouped
from nanotrain.kernels.grouped import GroupedMM
from tests.kernels.test_grouped import COUNTS, FilledView

triton = pytest.importorskip("triton")
from nanotrain.kernels import triton_grouped_wgrad  # noqa: E402

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OUTPUTS, INPUTS = 24, 40
WIDE = {"ld.global.v4.b32", "st.global.v4.b32"}  # 16 bytes per thread


def by_expert(grad, x, counts):
    """[E, O, I] in fp64."""
    products = []
    start = 0
    for count in counts:
        tokens = slice(start, start + count)
        products.append(grad[tokens].double().t() @ x[tokens].double())
        start += count
    return torch.stack(products)


@pytest.mark.skipif(not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("has_grads", [False, True])
@pytest.mark.parametrize("counts", [COUNTS[1], [70, 0, 33, 64]])
def test_gradients_are_added_in_fp32_to_those_of_earlier_microbatches(
    counts, has_grads, monkeypatch
):
    # Tiles that do not divide the sizes, in several bands. In fp16: the interpreter multiplies the
    # bits of bf16 as integers.
    for name, size in {"TILE_ROWS": 16, "TILE_COLUMNS": 32, "TILE_TOKENS": 32, "BAND": 1}.items():
        monkeypatch.setattr(triton_grouped_wgrad, name, size)
    generator = torch.Generator().manual_seed(len(counts))
    rows = sum(counts) + 3  # tokens of no expert at the end
    grad = torch.randn(rows, OUTPUTS, generator=generator).half()
    x = torch.randn(rows, INPUTS, generator=generator).half()
    grad[sum(counts) :] = torch.nan
    offs = torch.tensor(counts).cumsum(0).int()
    before = torch.randn(len(counts), OUTPUTS, INPUTS, generator=generator)
    view = FilledView(before.clone() if has_grads else before * torch.nan, has_grads)
    monkeypatch.setattr(grouped, "has_wgrad_kernel", lambda _: True)
    assert GroupedMM().accumulate_wgrad(grad, x, offs=offs, view=view)
    expected = by_expert(grad, x, counts)
    if has_grads:
        expected += before.double()
    # products of fp16 are exact in fp32, so only the sums round
    torch.testing.assert_close(view.buffer.double(), expected, rtol=1e-6, atol=1e-5)


def test_only_16_bit_tokens_have_the_kernel():
    for dtype, expected in [(torch.bfloat16, True), (torch.float16, True), (torch.float32, False)]:
        assert grouped.has_wgrad_kernel(torch.empty(1, device="meta", dtype=dtype)) == expected
    assert not grouped.has_wgrad_kernel(torch.empty(1, dtype=torch.bfloat16)), "CPUs loop"


def compiled(capability):
    """The kernel that adds, for a card, with sizes that are multiples of 16."""
    backend = pytest.importorskip("triton.backends.compiler")
    module = triton_grouped_wgrad
    types = ["*bf16", "*bf16", "*i32", "*fp32", "i32", "i32"]
    constants = {"adds": True, "band": module.BAND, "tile_rows": module.TILE_ROWS}
    constants |= {"tile_columns": module.TILE_COLUMNS, "tile_tokens": module.TILE_TOKENS}
    signature = dict(zip(module._grouped_wgrad.arg_names, types, strict=False))
    source = triton.compiler.ASTSource(
        module._grouped_wgrad,
        signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(index,): [["tt.divisibility", 16]] for index in range(len(types))},
    )
    return triton.compile(
        source,
        target=backend.GPUTarget("cuda", capability, 32),
        options={"num_warps": module.WARPS, "num_stages": module.STAGES},
    )


def assembler_report(ptx, capability):
    """Registers and spills of a kernel, by Triton's own assembler."""
    name = "ptxas-blackwell" if capability >= 100 else "ptxas"
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    if not (folder / name).exists():
        pytest.skip(f"this Triton brings no {name}")
    arch = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    command = [folder / name, "-v", f"--gpu-name={arch}", "-", "-o", os.devnull]
    return subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr


@pytest.mark.skipif(IS_INTERPRETED, reason="compiles nothing with TRITON_INTERPRET=1")
@pytest.mark.filterwarnings("ignore")  # of Triton, about its own defaults
@pytest.mark.parametrize(
    ("capability", "product"), [(80, "mma.sync"), (90, "wgmma"), (100, "tcgen05.mma")]
)
def test_compiled_code_has_wide_accesses_and_no_spills(capability, product, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    binary = compiled(capability)
    ptx = binary.asm["ptx"]
    assert product in ptx
    scalar_loads = re.findall(r"ld\.global\.b\d+", ptx)
    assert scalar_loads == ["ld.global.b32"] * 2, "the start and the end of the expert alone"
    assert set(re.findall(r"(?:ld|st)\.global\.v\S+", ptx)) <= WIDE
    assert "cp.async.cg.shared.global" in ptx, "operands are copied 16 bytes at a time, ahead"
    report = assembler_report(ptx, capability)
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    assert binary.metadata.shared <= (100_000 if capability == 80 else 232_448)
