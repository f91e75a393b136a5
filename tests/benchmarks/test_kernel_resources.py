"""What casts can move, as the benchmark computes it from counted resources."""

from dataclasses import replace

import pytest

from benchmarks.kernel_resources import (
    GB_PER_S,
    MULTIPROCESSORS,
    Resources,
    expected_rate,
    show_rates,
    show_table,
)

# 8 tiles of 128 x 128, a program each: 48 KiB that are read and written
CAST = Resources(
    launch="cast blockwise input bf16",
    kernel="_cast",
    capability=90,
    warps=8,
    registers=200,
    spilled=0,
    shared=0,
    accesses={"load 16": 8, "store 16": 4},
    pendings=[],
    early_adds=0,
    narrow_offsets=0,
    grid=8,
)
NUM_BYTES = 8 * 48 * 1024


def test_a_program_alone_waits_for_its_reads_and_writes() -> None:
    assert CAST.programs == 1
    seconds = 2 * 0.8e-6 + 48 * 1024 / (GB_PER_S * 1e9 / MULTIPROCESSORS)
    expected = MULTIPROCESSORS * 48 * 1024 / seconds / 1e9
    assert expected_rate(CAST, NUM_BYTES) == pytest.approx(expected)


def test_programs_overlap_up_to_the_memory() -> None:
    shared = replace(CAST, registers=32)
    assert shared.programs == 8
    assert expected_rate(shared, NUM_BYTES) == pytest.approx(GB_PER_S)


def test_shared_memory_and_warps_limit_programs() -> None:
    assert replace(CAST, registers=32, shared=100 * 1024).programs == 2
    assert replace(CAST, registers=32, capability=89).programs == 6


def test_a_row_per_kernel_and_cast() -> None:
    lines: list[str] = []
    show_table([CAST], lines.append)
    show_rates([CAST], lines.append)
    assert "8 x load 16, 4 x store 16" in lines[2] and "| 3 | 200 | 1 | 0 |" in lines[-1]
