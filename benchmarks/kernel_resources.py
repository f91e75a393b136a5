"""Resources of the Triton kernels as compiled: `python benchmarks/kernel_resources.py`.

No GPU is needed: Triton brings the assembler and the disassembler of CUDA. A row per launch of
kernel_launches.py and compute capability: registers, spills, shared memory, programs that share a
multiprocessor, and the widths of global loads, stores and asynchronous copies.

    python benchmarks/kernel_resources.py --capabilities 90 100 --only "cast .*bf16"
    python benchmarks/kernel_resources.py --rates      # what casts can move on an H100, by count
    PYTHONPATH=.venv/triton-3.6 python benchmarks/kernel_resources.py     # another Triton
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # where it is run as a file
from benchmarks.kernel_launches import LAUNCHES, TOKENS, WIDTH, Launch

REGISTERS = 65_536  # of a multiprocessor, on every card since Kepler
MAX_WARPS = {80: 64, 89: 48, 90: 64, 100: 64, 120: 48}  # that share a multiprocessor
# KiB of shared memory: of a multiprocessor, and the most of one program
SHARED_KIB = {80: (164, 163), 89: (100, 99), 90: (228, 227), 100: (228, 227), 120: (100, 99)}
ACCESS = re.compile(r"\b(ld|st)\.global(?:\.[a-zA-Z:0-9_]+)*?(?:\.v(\d))?\.[bufs](\d+)\b")
ASYNC_COPY = re.compile(
    r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (0x[0-9a-f]+|\d+)"
)
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4}\*/\s", re.MULTILINE)
DEFINITION = re.compile(r"(%[\w#]+)(?::\d+)? = ([\w.]+) ([^:]*)(.*)")


RATED = r"^cast \w+ (input|grad|grad_t) bf16$"
TILE = 128  # rows and columns of a program of a cast
CUBIN = "kernel.cubin"
# An H100 SXM by its data sheet
MULTIPROCESSORS = 132
GB_PER_S = 3350
CLOCK_GHZ = 1.755
SCHEDULERS = 4  # instructions of warps per clock of a multiprocessor
LATENCY_US = 0.8  # of a read or write under load; assumed


@dataclass(frozen=True)
class Resources:
    """A compiled kernel."""

    launch: str
    kernel: str
    capability: int
    warps: int
    registers: int  # per thread
    spilled: int  # bytes of registers per thread that lie in memory
    shared: int  # bytes of shared memory
    accesses: dict[str, int]  # global loads, stores and asynchronous copies per width in bytes
    pendings: list[int]  # products that may be unfinished where a loop waits for tensor cores
    early_adds: int  # additions between the start of a product and the wait for it
    narrow_offsets: int  # offsets with a product of two variables in 32 bits
    grid: int  # programs of the launch
    instructions: int = 0  # of a thread, with --rates

    @property
    def programs(self) -> int:
        """Programs that share a multiprocessor."""
        threads = 32 * self.warps
        allocated = -(-self.registers // 8) * 8 * threads
        per_program = 1 + -(-self.shared // 1024)  # CUDA takes 1 KiB per program
        by_memory = SHARED_KIB[self.capability][0] // per_program
        by_warps = MAX_WARPS[self.capability] // self.warps
        return min(REGISTERS // allocated, by_memory, by_warps, 32)

    @property
    def narrowest(self) -> int:
        """The bytes of the narrowest global access."""
        return min(int(access.split()[1]) for access in self.accesses)


class Card:
    """What a launch asks of a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(capability: int) -> Iterator[list[tuple[str, int, Any]]]:
    """Compile kernels that are launched for a card instead of running them.

    Yields the name, the number of programs and the binary of each.
    """
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    run = JITFunction.run
    active = driver._active
    compiled: list[tuple[str, int, Any]] = []

    def compile_only(kernel: Any, *args: Any, grid: Any, **options: Any) -> None:
        options["warmup"] = True
        kernel.device_caches.clear()  # they keep the card of the first launch
        binary = run(kernel, *args, grid=grid, **options)
        compiled.append((kernel.fn.__name__, math.prod(grid), binary))

    JITFunction.run = compile_only
    driver._active = Card(capability)
    try:
        yield compiled
    finally:
        JITFunction.run = run
        driver._active = active


def compile_launches(
    capability: int, launches: Sequence[Launch], *, disassembles: bool = False
) -> list[Resources]:
    """The kernels of the launches that a card runs."""
    found = []
    with compiling(capability) as compiled, tempfile.TemporaryDirectory() as folder:
        for launch in launches:
            if not launch.runs_on(capability):
                continue
            compiled.clear()
            launch.run()
            missing = launch.kernels - {kernel for kernel, _, _ in compiled}
            assert not missing, f"{launch.name} launches no {sorted(missing)}"
            for kernel, grid, binary in compiled:
                row = _measure(binary, capability, Path(folder))
                row = replace(row, launch=launch.name, kernel=kernel, grid=grid)
                if disassembles:
                    text = _run_cuobjdump("-sass", Path(folder))
                    row = replace(row, instructions=len(INSTRUCTION.findall(text)))
                found.append(row)
    return found


def _measure(binary: Any, capability: int, folder: Path) -> Resources:
    """The resources of a compiled kernel, from its PTX, its cubin and Triton's first IR."""
    (folder / CUBIN).write_bytes(binary.asm["cubin"])
    usage = USAGE.search(_run_cuobjdump("-res-usage", folder))
    assert usage is not None, "cuobjdump prints registers, stack and local memory"
    registers, stack, local = map(int, usage.groups())
    ptx = binary.asm["ptx"]
    return Resources(
        launch="",
        kernel="",
        capability=capability,
        warps=binary.metadata.num_warps,
        registers=registers,
        spilled=stack + local,
        shared=binary.metadata.shared,
        accesses=count_accesses(ptx),
        pendings=[int(n) for n in re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", ptx)],
        early_adds=count_early_adds(ptx),
        narrow_offsets=count_narrow_offsets(binary.asm["ttir"]),
        grid=0,
    )


def _run_cuobjdump(option: str, folder: Path) -> str:
    """What CUDA's disassembler, which Triton brings, says of the cubin in a folder."""
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [str(program), option, str(folder / CUBIN)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def count_accesses(ptx: str) -> dict[str, int]:
    """Global accesses of a thread in PTX: "load 16", "store 4", "copy 16" (asynchronous) -> number.

    >>> count_accesses("ld.global.v4.b32 {%r1}; st.global.b8 [%rd1], %rs1;")
    {'load 16': 1, 'store 1': 1}
    """
    counts: Counter[str] = Counter()
    for kind, lanes, bits in ACCESS.findall(ptx):
        name = "load" if kind == "ld" else "store"
        counts[f"{name} {int(lanes or 1) * int(bits) // 8}"] += 1
    for width in ASYNC_COPY.findall(ptx):
        counts[f"copy {int(width, 0)}"] += 1
    return dict(sorted(counts.items()))


def count_early_adds(ptx: str) -> int:
    """Additions in fp32 between the start of products on tensor cores and the wait for them."""
    early = 0
    is_running = False
    for line in ptx.splitlines():
        if "wgmma.mma_async" in line:
            is_running = True
        elif "wgmma.wait_group" in line:
            is_running = False
        elif is_running and re.search(r"\b(add|fma)\.(rn\.)?f32\b", line):
            early += 1
    return early


def count_narrow_offsets(ttir: str) -> int:
    """Offsets of pointers with a product of two variables in 32 bits, which overflows.

    >>> count_narrow_offsets("%2 = arith.muli %a, %b : i32\\n%3 = tt.addptr %p, %2 : !tt.ptr<f32>")
    1
    """
    definitions = {}
    offsets = []
    for line in ttir.splitlines():
        match = DEFINITION.search(line)
        if match is None:
            continue
        name, operator, operands, types = match.groups()
        names = re.findall(r"%[\w#]+", operands)
        definitions[name] = (operator, names, types)
        if operator == "tt.addptr":
            offsets.append(names[1])
    return sum(_is_narrow(offset, definitions) for offset in offsets)


# operators that hand on a number, or the parts of a sum
FORWARDING = {
    "arith.extsi", "arith.addi", "arith.subi", "tt.splat", "tt.broadcast", "tt.expand_dims",
    "tt.reshape", "ttg.convert_layout",
}  # fmt: skip


def _is_narrow(name: str, definitions: dict[str, tuple[str, list[str], str]]) -> bool:
    operator, operands, types = definitions.get(name, ("", [], ""))
    if operator == "arith.muli":
        are_constant = [_is_constant(operand, definitions) for operand in operands]
        return "i64" not in types and not any(are_constant)
    if operator in FORWARDING:
        return any(_is_narrow(operand, definitions) for operand in operands)
    return False


def _is_constant(name: str, definitions: dict[str, tuple[str, list[str], str]]) -> bool:
    operator, operands, _ = definitions.get(name, ("", [], ""))
    if operator in ("tt.splat", "tt.broadcast", "tt.expand_dims"):
        return _is_constant(operands[0], definitions)
    return operator == "arith.constant"


def show_table(rows: Sequence[Resources], show: Callable[[str], None]) -> None:
    """Print a row per kernel."""
    show("| launch | kernel | sm | registers | spilled | shared KiB | programs | accesses |")
    show("|---|---|---:|---:|---:|---:|---:|---|")
    for row in rows:
        accesses = ", ".join(f"{count} x {name}" for name, count in row.accesses.items())
        show(
            f"| {row.launch} | {row.kernel} | {row.capability} | {row.registers} | {row.spilled} "
            f"| {row.shared / 1024:.0f} | {row.programs} | {accesses} |"
        )


def expected_rate(row: Resources, num_bytes: int) -> float:
    """GB/s of a dense cast on an H100, of bytes that are read once and written once.

    A program reads, computes and writes, one after the other. Programs of a multiprocessor overlap,
    down to the time of the memory or of the instructions. Of a program per form half of the
    instructions run.
    """
    tiles = TOKENS // TILE * (WIDTH // TILE)
    instructions = row.instructions * tiles / row.grid
    issue_us = instructions * row.warps / SCHEDULERS / CLOCK_GHZ / 1e3
    per_program = num_bytes / row.grid
    transfer_us = per_program / (GB_PER_S / MULTIPROCESSORS) / 1e3
    alone_us = 2 * LATENCY_US + issue_us + transfer_us
    busy_us = max(transfer_us, issue_us, alone_us / row.programs)
    return per_program * MULTIPROCESSORS / busy_us / 1e3


def show_rates(rows: Sequence[Resources], show: Callable[[str], None]) -> None:
    """Print what dense casts of bf16 can move."""
    show("| cast | bytes per value | registers | programs | instructions | GB/s, expected |")
    show(f"|---{5 * '|---:'}|")
    for row in rows:
        forms = 1 if row.launch.split()[2] in ("input", "grad_t") else 2
        num_bytes = TOKENS * WIDTH * (2 + forms)
        show(
            f"| {row.launch} | {2 + forms} | {row.registers} | {row.programs} "
            f"| {row.instructions} | {expected_rate(row, num_bytes):,.0f} |"
        )


def main(arguments: Sequence[str] | None = None, show: Callable[[str], None] = print) -> None:
    """Compile and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--capabilities", type=int, nargs="+", default=[90, 100])
    parser.add_argument("--only", default="", help="regular expression of launches")
    parser.add_argument(
        "--typical", action="store_true", help="launches of the test suite, each for one card"
    )
    parser.add_argument("--json", action="store_true", help="one object per kernel and line")
    parser.add_argument("--rates", action="store_true", help="dense casts of bf16 on an H100")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # of Triton, about its own defaults
    only = RATED if given.rates else given.only
    launches = [launch for launch in LAUNCHES if re.search(only, launch.name)]
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("TRITON_CACHE_DIR", cache)
        rows = []
        for capability in [90] if given.rates else given.capabilities:
            chosen = launches
            if given.typical:
                chosen = [each for each in launches if each.typical_on == capability]
            rows += compile_launches(capability, chosen, disassembles=given.rates)
    if given.rates:
        show_rates([row for row in rows if row.kernel == "_cast"], show)
    elif given.json:
        for row in rows:
            show(json.dumps(asdict(row)))
    else:
        show_table(rows, show)


if __name__ == "__main__":
    main()
