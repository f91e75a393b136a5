"""The operators of one microbatch on the meta device, which computes nothing: their FLOPs and
bytes, by class.

OperatorCount   counts every operator that runs inside it
on_meta         lets fused operators run there, each counted as one
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from nanotrain.attention import sdpa
from nanotrain.kernels import linear, permute, triton_swiglu
from nanotrain.model import activations, ends
from nanotrain.parallel.tp import loss as vocabulary_loss

# Operators that allocate or look at a tensor and touch none of its memory.
FREE = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "_unsafe_view",
    "lift_fresh",
    "new_empty_strided",
}
WRITES_ONLY = {
    "fill_",
    "zero_",
    "zeros",
    "ones",
    "full",
    "arange",
    "zeros_like",
    "ones_like",
    "full_like",
    "new_zeros",
}
LOOK_UPS = {"embedding", "gather", "index", "index_select"}
SCATTERS = {"scatter_add_", "index_add_", "index_put_"}  # touch of their target what is scattered


class Budget(Protocol):
    """Where operators are counted."""

    def add(
        self,
        name: str,
        *,
        flops: float = 0.0,
        num_bytes: float = 0.0,
        launches: int = 1,
        times: int = 1,
    ) -> None:
        """Count an operator that runs `times` times."""


class OperatorCount(TorchDispatchMode):
    """Adds every operator to a budget, `times` times."""

    def __init__(self, budget: Budget, *, times: int, share: float = 1.0) -> None:
        super().__init__()
        self._budget, self._times, self._share = budget, times, share
        self.in_loss = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        # torch 2.11 has no meta form of products of 16 bit that are written in fp32
        out = kwargs["out"] if func._overloadname == "dtype_out" else func(*args, **kwargs)
        if func.is_view or name in FREE:
            return out
        flops = _product_flops(func, args, out)
        if flops is not None:
            self.add(
                "fp8 GEMM" if name.startswith("fp8") else "GEMM",
                flops=flops,
                num_bytes=_bytes(name, args, out),
            )
        else:
            self.add("loss" if self.in_loss else "elementwise", num_bytes=_bytes(name, args, out))
        return out

    def add(
        self, name: str, *, flops: float = 0.0, num_bytes: float = 0.0, launches: int = 1
    ) -> None:
        """Count one operator of a microbatch, of which this rank computes its share."""
        share = self._share
        self._budget.add(
            name,
            flops=flops * share,
            num_bytes=num_bytes * share,
            launches=launches,
            times=self._times,
        )


def _product_flops(func: Any, args: Sequence[Any], out: Any) -> int | None:
    """FLOPs of a matrix product; None for any other operator."""
    name = func.overloadpacket.__name__
    # [T, K], [E, K, N] -> [T, N], or [M, T], [T, N] -> [E, M, N]: every token once
    if name == "_grouped_mm":
        return 2 * args[0].numel() * args[1].shape[-1]
    # values and scales of both; gradients of experts have three dims
    if name in ("fp8_mm", "fp8_grouped_mm"):
        a, _, b, *_ = args[0]
        return 2 * a.numel() * (len(b) if name == "fp8_mm" or out.dim() == 3 else out.shape[1])
    counted = flop_registry.get(torch.ops.aten.addmm if name == "addmm_" else func.overloadpacket)
    if counted is None:
        return None
    # not the dtype of the output
    flops: int = counted(*(args[:3] if name.startswith("addmm") else args), out_val=out)
    return flops


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def _bytes(name: str, args: Sequence[Any], out: Any) -> int:
    """Bytes that an operator reads and writes; each tensor once per direction."""
    written = sum(tensor.nbytes for tensor in _tensors(out))
    if name in WRITES_ONLY:
        return written
    if name in LOOK_UPS:
        return 2 * written
    if name == "fp8_amax" and args[1][1] is not None:  # the scale follows from the history
        return 0
    if name in SCATTERS:
        return 2 * sum(tensor.nbytes for tensor in _tensors(list(args[1:])))
    sources = args[1:] if name == "copy_" else args
    return written + sum(tensor.nbytes for tensor in _tensors(list(sources)))


class _Kernel(torch.autograd.Function):
    """One operator forward and one backward; the output has the shape of the work."""

    @staticmethod
    def forward(ctx: Any, count: "OperatorCount", work: "_Work", *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.count, ctx.work = count, work
        count.add(work.name, flops=work.flops, num_bytes=work.forward_bytes)
        return inputs[0].new_empty(work.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        work = ctx.work
        # Attention: five products instead of two, as the scores are computed again.
        ctx.count.add(
            work.name,
            flops=2.5 * work.flops,
            num_bytes=work.backward_bytes,
            launches=work.backward_launches,
        )
        return None, None, *(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


@dataclass(frozen=True)
class _Work:
    """What one fused operator does, in one microbatch."""

    name: str
    shape: Sequence[int]  # of its output
    forward_bytes: float
    backward_bytes: float
    flops: float = 0.0  # forward
    backward_launches: int = 1


class FusedOperators:
    """Stand-ins for fused operators of the model on a GPU, which run on the meta device.

    Args:
        count: counter of the operators.
    """

    def __init__(self, count: OperatorCount) -> None:
        self._count = count

    def _run(self, work: _Work, *inputs: Tensor) -> Tensor:
        output: Tensor = _Kernel.apply(self._count, work, *inputs)
        return output

    def attend(self, query: Tensor, *, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        """Causal attention without scores in memory."""
        batch, length, heads, width = query.shape
        # Half of the pairs, a product for the scores and one for the values: 2 FLOPs per
        # multiplication and addition.
        flops = batch * heads * length**2 * (width + value.shape[3])
        shape = (batch, length, heads, value.shape[3])
        num_bytes = query.nbytes + key.nbytes + value.nbytes + math.prod(shape) * query.itemsize
        return self._run(
            _Work("attention", shape, num_bytes, 2 * num_bytes, flops), query, key, value
        )

    def torch_rms_norm(
        self, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        """torch's RMSNorm of CUDA: one operator forward, backward one for the input and one for a
        weight.
        """
        inputs = (x,) if weight is None else (x, weight)
        work = _Work(
            "elementwise", x.shape, 2 * x.nbytes, 5 * x.nbytes, backward_launches=len(inputs)
        )
        return self._run(work, *inputs)

    def permute_form(self) -> permute.PermuteForm:
        """The kernels of triton_permute.py: every row read and written once."""

        def of_shape(rows: int, like: Tensor, *read: Tensor) -> Tensor:
            out = like.new_empty(rows, like.shape[1])
            self._count.add(
                "elementwise", num_bytes=out.nbytes + sum(tensor.nbytes for tensor in read)
            )
            return out

        def spread(x: Tensor, order: Tensor, *, inverse: Tensor) -> Tensor:
            return of_shape(len(order), x, x, inverse)

        def combine(permuted: Tensor, inverse: Tensor, *, weights: Tensor | None) -> Tensor:
            return of_shape(len(inverse), permuted, permuted, inverse)

        def combine_backward(
            grad: Tensor, permuted: Tensor, **given: Tensor
        ) -> tuple[Tensor, Tensor]:
            rows = of_shape(
                len(permuted), permuted, permuted, grad, given["inverse"], given["weights"]
            )
            return rows, torch.empty_like(given["weights"])

        return permute.PermuteForm(spread, combine, combine_backward)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """The kernel of triton_swiglu.py."""
        self._count.add("elementwise", num_bytes=3 * gate.nbytes)
        return torch.empty_like(gate)

    def swiglu_backward(self, grad: Tensor, *, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Its backward."""
        self._count.add("elementwise", num_bytes=5 * gate.nbytes)
        return torch.empty_like(gate), torch.empty_like(up)

    def softmax_gradient(self, logits: Tensor, **given: Tensor | Any) -> tuple[Tensor, Tensor]:
        """One read for the log-sum-exp, then the gradient in place."""
        self._count.add("loss", num_bytes=logits.nbytes)
        logsumexp = given["combine"](logits.new_empty((logits.shape[0], 1), dtype=torch.float32))
        picked = (logits.gather(1, given["column"]).float() - logsumexp) * given["local_mask"]
        self._count.add("loss", num_bytes=2 * logits.nbytes)
        return picked[:, 0], logits


@contextmanager
def on_meta(count: OperatorCount, *, has_triton: bool = True) -> Iterator[None]:
    """Let the model run on the meta device, its operators marked for the count.

    Args:
        count: counter of the operators.
        has_triton: count the Triton kernels of loss, permutations and SwiGLU, and products added in
            fp32, not their plain forms.
    """
    cross_entropy, fused = ends.vocab_parallel_cross_entropy, FusedOperators(count)

    def marked(*args: Any, **kwargs: Any) -> Tensor:
        count.in_loss = True
        try:
            return cross_entropy(*args, **kwargs)
        finally:
            count.in_loss = False

    with ExitStack() as stack:
        stack.enter_context(patch.object(sdpa, "attend", fused.attend))
        stack.enter_context(patch.object(F, "rms_norm", fused.torch_rms_norm))
        stack.enter_context(patch.object(linear, "adds_wider", lambda device_type: has_triton))
        stack.enter_context(patch.object(ends, "vocab_parallel_cross_entropy", marked))
        chunk_elements = {"meta": vocabulary_loss.CHUNK_ELEMENTS["cuda"]}
        stack.enter_context(patch.dict(vocabulary_loss.CHUNK_ELEMENTS, chunk_elements))
        if has_triton:
            stack.enter_context(
                patch.object(vocabulary_loss, "softmax_gradient", fused.softmax_gradient)
            )
            stack.enter_context(patch.object(permute, "form_of", lambda _: fused.permute_form()))
            stack.enter_context(patch.object(activations, "runs_triton", lambda _: True))
            for name in ("swiglu", "swiglu_backward"):
                stack.enter_context(patch.object(triton_swiglu, name, getattr(fused, name)))
        yield
