"""A kernel alone on one GPU: its sizes, time, rate and error, as a row."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from gpu_rows import FAILED, LEFT_OUT, OK, WRONG, Row
from torch import Tensor

from nanotrain.precision.fp8 import FP8_RECIPES, Recipe

# Largest relative errors (norm of the difference over the norm of the reference).
SAME = 0.0
BF16 = 1e-2  # products and sums that are rounded to bf16 once
FP8 = 6e-2  # products of random values in fp8
INTERPRETED_FP8 = 0.15  # Triton's interpreter truncates where a card rounds


@dataclass(frozen=True)
class Machine:
    """Where the rows run.

    Attributes:
        device: "cuda", or "cpu" to see that the rows run.
        scale: what sizes are divided by.
    """

    device: str
    scale: int

    def tensor(self, *shape: int) -> Tensor:
        """Random bf16 values."""
        return torch.randn(*shape, device=self.device).bfloat16()

    @property
    def cast_bound(self) -> float:
        """Largest error of a cast to fp8: a card gives torch's values."""
        return SAME if self.device == "cuda" else INTERPRETED_FP8

    @property
    def fp8_bound(self) -> float:
        """Largest error of a product in fp8."""
        return FP8 if self.device == "cuda" else INTERPRETED_FP8

    @property
    def wgrad_bound(self) -> float:
        """Largest error of a product added in fp32, which a CPU rounds to bf16 first."""
        return 1e-4 if self.device == "cuda" else BF16

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        return 8192 // self.scale

    @property
    def hidden(self) -> int:
        """Hidden size."""
        return 4096 // self.scale

    @property
    def recipes(self) -> dict[str, Recipe]:
        """fp8 recipes that this card has; those of tensors are one."""
        here = torch.cuda.get_device_capability() if self.device == "cuda" else (9, 0)
        found = {}
        for name, recipe in FP8_RECIPES.items():
            is_late = recipe.last_capability is not None and here > recipe.last_capability
            if here >= recipe.capability and not is_late and not recipe.has_history:
                found[name] = recipe
        return found


@dataclass(frozen=True)
class Measurement:
    """A kernel to measure.

    Attributes:
        name: name of the row.
        run: launches it once.
        moved_bytes: bytes that it reads and writes; 0: the row has no GB/s.
        flops: floating-point operations; 0: the row has no TFLOP/s.
        error: relative error beside the reference.
        bound: largest error.
    """

    name: str
    run: Callable[[], object]
    moved_bytes: float = 0
    flops: float = 0
    error: Callable[[], float] | None = None
    bound: float = BF16


def relative_error(value: Tensor, reference: Tensor) -> float:
    """The norm of the difference over that of the reference; infinite where a value is NaN."""
    difference = (value.double() - reference.double()).norm()
    error = (difference / reference.double().norm().clamp(min=1e-30)).item()
    return error if error == error else float("inf")


def milliseconds(run: Callable[[], object], device: str) -> float:
    """The time of one run: the mean of ten on a GPU, after three others."""
    if device == "cpu":
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) * 1e3
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(10):
        run()
    end.record()
    torch.cuda.synchronize()
    return max(begin.elapsed_time(end) / 10, 1e-6)


def measure(measurement: Measurement, device: str) -> Row:
    """Check and time a kernel; an exception makes a row too."""
    try:
        error = None if measurement.error is None else measurement.error()
        time_ms = milliseconds(measurement.run, device)
    except Exception as fault:
        return failed(measurement.name, fault)
    figures = f"{time_ms:9.3f} ms"
    if measurement.moved_bytes:
        figures += f"  {measurement.moved_bytes / time_ms / 1e6:9,.0f} GB/s"
    if measurement.flops:
        figures += f"  {measurement.flops / time_ms / 1e9:9,.1f} TFLOP/s"
    if error is None:
        return Row(measurement.name, OK, figures)
    figures += f"  error {error:.1e} of {measurement.bound:.0e}"
    return Row(measurement.name, OK if error <= measurement.bound else WRONG, figures)


def failed(name: str, fault: Exception) -> Row:
    """The row of an exception: its type and first line; without Triton it is left out."""
    first = (str(fault).splitlines() or [""])[0][:150]
    lacks_triton = "triton" in first and find_spec("triton") is None
    state = LEFT_OUT if lacks_triton else FAILED
    return Row(name, state, f"{type(fault).__name__}: {first}")
