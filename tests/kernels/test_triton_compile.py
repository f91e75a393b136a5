"""Every Triton kernel compiles for GPUs from Ampere to Blackwell, with two versions of Triton, and
keeps to bounds of registers, memory and access widths. benchmarks/kernel_launches.py has the
launches.

Needs no GPU: Triton brings the assembler. Run with `make peers`, which installs both versions, and
without `TRITON_INTERPRET`. The suite compiles typical launches for one card each with the pinned version;
`make kernels` compiles all launches for all cards with both.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles nothing with TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from benchmarks.kernel_launches import LAUNCHES, find_kernels
from benchmarks.kernel_resources import (
    SHARED_KIB,
    Resources,
    compiling,
    count_accesses,
    count_early_adds,
    count_narrow_offsets,
)
from nanotrain.kernels.fp8 import triton_cast
from nanotrain.kernels.fp8.quantize import Cast

ROOT = Path(__file__).parent.parent.parent
# that of torch 2.11, which `make peers` installs beside the pinned one
OLDER = Path(os.environ.get("OLDER_TRITON", Path(sys.prefix) / "triton-3.6"))
HAS_OLDER = pytest.mark.skipif(not OLDER.is_dir(), reason="without `make peers`")
VERSIONS = [  # each in one process, which compiles once
    pytest.param("pinned", marks=pytest.mark.xdist_group("pinned")),
    # takes as long again, and `make kernels` compiles more with it
    pytest.param(
        "older", marks=[HAS_OLDER, pytest.mark.xdist_group("older"), pytest.mark.more_layouts]
    ),
]

# Kernel -> programs that have to share a multiprocessor. A program of a kernel that moves data waits
# for its reads, computes, and waits for its writes: another one has to use the memory meanwhile.
# A product overlaps its reads with the tensor cores itself, and needs the registers for its sums.
MIN_PROGRAMS = {
    "_cast": 2,
    "_amax": 2,
    "_nvfp4_cast": 1,  # two, but one of weights in 16 x 16
    "_nvfp4_amaxes": 2,
    "_nvfp4_expert_cast": 1,  # as `_nvfp4_cast`
    "_nvfp4_expert_amaxes": 2,
    "_logsumexp": 4,
    "_softmax_gradient": 4,
    "_swiglu": 8,
    "_swiglu_backward": 8,
    "_spread": 8,
    "_combine": 8,
    "_combine_backward": 8,
    "_multiply": 1,
    "_grouped_wgrad": 1,
    "_prepare": 1,
    "_walk": 1,
    "_walk_back": 1,
    "_chunk_gradients": 1,
    "_system_gradients": 1,
    "_sum_back": 2,
}


# Bytes of a thread's registers that may lie in memory. For 12.0 the assembler puts up to 56 bytes of
# rowwise casts of experts there, to keep to the registers with which two programs run.
MAX_SPILLED = {120: 64}


@cache
def compiled(version: str, everything: bool) -> list[Resources]:
    """The kernels as a version of Triton compiles them, in a process of its own."""
    paths = [str(ROOT)] if version == "pinned" else [str(OLDER), str(ROOT)]
    command = [sys.executable, str(ROOT / "benchmarks/kernel_resources.py"), "--json"]
    command += ["--capabilities", "80", "89", "90", "100", "120"] if everything else ["--typical"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [Resources(**json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture(params=VERSIONS)
def kernels(request: pytest.FixtureRequest) -> list[Resources]:
    """All rows with `-m all_kernels`, otherwise typical ones."""
    return compiled(request.param, "all_kernels" in request.config.option.markexpr)


def test_every_kernel_has_a_launch_and_a_bound() -> None:
    names = {kernel.split(":")[1] for kernel in find_kernels()}
    assert names == set().union(*(launch.kernels for launch in LAUNCHES)), (
        "benchmarks/kernel_launches.py has a launch of every kernel"
    )
    assert names == set(MIN_PROGRAMS)
    assert names == set().union(*(launch.kernels for launch in LAUNCHES if launch.is_typical))


@pytest.mark.all_kernels
def test_kernels_move_wide_words_and_keep_values_in_registers(kernels: list[Resources]) -> None:
    assert {row.kernel for row in kernels} == set(MIN_PROGRAMS)
    for row in kernels:
        assert row.narrowest > 1, f"single bytes: {row}"
        assert row.spilled <= MAX_SPILLED.get(row.capability, 0), row
        assert row.shared <= SHARED_KIB[row.capability][1] * 1024, row
        assert row.programs >= MIN_PROGRAMS[row.kernel], row
        assert row.narrow_offsets == 0, f"an offset overflows from 2^31 values on: {row}"


@pytest.mark.all_kernels
def test_products_read_ahead_and_add_in_fp32_where_gradients_do(kernels: list[Resources]) -> None:
    """Tensor cores of Hopper add fp8 in 14 bits: gradients in parts of 128, as DeepSeek-V3."""
    products = [row for row in kernels if row.kernel == "_multiply"]
    assert {"fprop", "wgrad"} <= {row.launch.split()[0] for row in products}
    for row in products:
        widths = {access for access in row.accesses if access.startswith("copy")}
        if "nvfp4" in row.launch:  # a thread reads 8 scales of a tile
            widths -= {"copy 8"}
        assert widths == {"copy 16"}, row
        assert row.early_adds == 0, f"added before the tensor cores have finished: {row}"
        if row.capability == 90:
            name, *_, recipe, _ = row.launch.split()
            is_fast = name == "fprop" and recipe in ("tensorwise", "rowwise")
            assert row.pendings == ([1, 0] if is_fast else [0]), row


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with compiling(80):
        yield


def test_a_card_without_fp8_has_no_casts(ampere: None) -> None:
    with pytest.raises(Exception, match="fp8e4nv not supported"):
        triton_cast.cast(
            torch.randn(64, 256), Cast((128, 128), torch.float8_e4m3fn, power_of_two=True)
        )


def test_what_the_counts_find() -> None:
    ptx = """
        @%p1 ld.global.L1::evict_last.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
        ld.global.b8 { %rs1 }, [ %rd2 + 0 ];
        st.global.v2.b16 [ %rd3 + 0 ], { %rs1, %rs2 };
        cp.async.cg.shared.global [ %r5 + 0 ], [ %rd4 + 0 ], 0x10, 0x10;
        wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {%r1}, %rd5, %rd6, p, 1, 1;
        add.f32 %r7, %r7, %r1;
        wgmma.wait_group.sync.aligned 0;
        add.f32 %r7, %r7, %r1;
    """
    assert count_accesses(ptx) == {"copy 16": 1, "load 1": 1, "load 16": 1, "store 4": 1}
    assert count_early_adds(ptx) == 1
    wide = """
        %c128_i32 = arith.constant 128 : i32 loc(#loc)
        %1 = arith.muli %arg0, %arg1 : i32 loc(#loc)
        %2 = arith.muli %arg0, %c128_i32 : i32 loc(#loc)
        %3 = arith.extsi %OFFSET : i32 to i64 loc(#loc)
        %4 = tt.splat %3 : i64 -> tensor<128xi64> loc(#loc)
        %5 = tt.addptr %arg2, %4 : tensor<128x!tt.ptr<f8E5M2>>, tensor<128xi64> loc(#loc)
    """
    assert count_narrow_offsets(wide.replace("%OFFSET", "%1")) == 1
    assert count_narrow_offsets(wide.replace("%OFFSET", "%2")) == 0


def test_kernels_are_found_by_their_decorator() -> None:
    found = find_kernels()
    assert "kernels/fp8/triton_cast.py:_cast" in found
    assert not any(re.search(r":(locate|span|_store_tile)$", name) for name in found)
