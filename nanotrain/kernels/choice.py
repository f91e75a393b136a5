"""Which implementation of a fused operation runs: a Triton kernel, or the same in torch's operators.

    operation                       torch form                    Triton kernel
    softmax gradient of the loss    vocabulary_softmax.py         triton_kernels.py
    SwiGLU                          swiglu.py                     triton_kernels.py
    RMSNorm, of a residual sum too  rms_norm.py                   triton_rms_norm.py
    RoPE                            rotary.py                     triton_rotary.py
    other residual additions        one addition                  none

Blocks are compiled on GPUs. Inside a graph torch's operators run, because the compiler fuses elementwise ones itself.
The kernels run outside of graphs: in the loss, and in blocks that are not compiled. The second residual sum of a block
would be fused with the norm of the next block, which may be another FSDP unit, graph or pipeline stage.

The modules of the kernels import Triton, so they are imported inside of the functions that call them: on a CPU never.
"""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # that the Triton kernels compute from, in fp32


def kernel_for(device_type: str, dtype: torch.dtype, *, has_triton: bool) -> str:
    """The implementation for tensors of a device and dtype: "triton" or "torch".

    >>> kernel_for("cuda", torch.bfloat16, has_triton=True), kernel_for("cuda", torch.float64, has_triton=True)
    ('triton', 'torch')
    """
    return "triton" if device_type == "cuda" and dtype in DTYPES and has_triton else "torch"


def uses_triton(tensor: Tensor) -> bool:
    """Whether Triton kernels run on this tensor; inside of a compiled graph the compiler fuses torch's operators."""
    if torch.compiler.is_compiling():
        return False
    return kernel_for(tensor.device.type, tensor.dtype, has_triton=_has_triton()) == "triton"


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None  # CUDA builds of torch install it
