"""Whether Triton and inductor can compile on this machine, tried with a small kernel per process.

    runs_triton      whether Triton kernels can compute on a tensor
    triton_fault     why Triton kernels cannot run; torch's operators then compute the same
    inductor_fault   why torch.compile cannot generate code; functions then run eagerly

Both call a C compiler, for GPUs with the headers of Python (Python.h), which machines with a GPU
often lack.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

MAX_REASON = 200  # characters of an error; a failed command is listed with all its arguments


TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def runs_triton(x: Tensor) -> bool:
    """Whether Triton kernels, not torch's operators, compute on a tensor."""
    return x.is_cuda and x.dtype in TRITON_DTYPES and not triton_fault()


@cache
def triton_fault() -> str:
    """Why Triton cannot compile a kernel for the GPU; empty if it can."""
    if find_spec("triton") is None:  # CUDA builds of torch install it
        return "the package triton is not installed"
    from nanotrain.kernels import triton_softmax

    return compile_fault(lambda: triton_softmax.row_logsumexp(torch.ones(1, 2, device="cuda")))


@cache
def inductor_fault(device_type: str) -> str:
    """Why torch.compile cannot generate code for a type of device; empty if it can."""
    compiled = torch.compile(double)
    return compile_fault(lambda: compiled(torch.ones(2, device=device_type)))


def double(x: Tensor) -> Tensor:
    """The function that inductor compiles on trial."""
    return 2 * x


def compile_fault(run: Callable[[], Tensor]) -> str:
    """Compile and run a function; returns its error, empty if there is none."""
    try:
        run().tolist()
    except Exception as error:  # every step of a compiler has its own types of errors
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        first = lines[0] if lines else ""
        return f"{type(error).__name__}: {first}"[:MAX_REASON]
    return ""
