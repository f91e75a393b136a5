"""Values of torch's operators on a fake GPU: each CUDA kernel is replaced by the CPU's, over the
same memory.

Views and allocation stay those of torch, as does what it checks before a kernel.
"""

import functools
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tests.fake_cuda import attention, scaled
from tests.fake_cuda.memory import on_cpu, overwrite, to_device

# Beginnings of operators that stay as they are: they make or view tensors, or read one number.
KEPT = (
    "empty", "as_strided", "view", "_reshape_alias", "set_", "resize_", "record_stream", "_pin", "is_pinned",
    "is_set_to", "_fused_sdp_choice", "_local_scalar_dense", "unfold", "_assert_async", "_dim", "_copy_from", "_debug",
)  # fmt: skip
# Beginnings of those without values here, which end the run.
REFUSED = (
    "linalg", "_linalg", "lu_", "_lu", "_fft", "cudnn", "_cudnn", "miopen", "_thnn", "_sparse", "sparse", "_nested",
    "_to_sparse", "_coalesce", "_transform_bias", "_flash", "_efficient", "_scaled", "_triton",
)  # fmt: skip
# Those of the same beginnings that have a kernel, and those whose kernel torch does not register as
# one of CUDA's
REPLACED = ("linalg_vector_norm", "copy_")
UNREGISTERED = ("aten::copy_", "aten::ldexp.Tensor", "aten::ldexp.out", "aten::ldexp_")

LOWER_RIGHT = 2  # `custom_mask_type` of causal attention that is aligned to the last key

LIBRARY = torch.library.Library("aten", "IMPL")  # its kernels last as long as it does


def install() -> None:
    """Replace the kernels of every CUDA operator of aten; for the life of the process."""
    warnings.filterwarnings("ignore", message="(?s).*[Oo]verrid")
    for name in [*torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"), *UNREGISTERED]:
        namespace, _, operator = name.partition("::")
        base, _, overload = operator.partition(".")
        if namespace != "aten" or (
            base not in REPLACED and base not in SPECIAL and base.startswith(KEPT)
        ):
            continue
        original = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if original is None or (base in SPECIAL and overload):
            continue
        LIBRARY.impl(
            operator,
            functools.partial(_kernel(base, overload), original),
            "CUDA",
            allow_override=True,
        )


def _kernel(base: str, overload: str) -> Callable[..., Any]:
    """What runs in place of the kernel of an operator."""
    if base in SPECIAL:
        return _run_special
    if base not in REPLACED and base.startswith(REFUSED):
        return _refuse
    return _by_dtype if overload.startswith("dtype") else _run


def _refuse(operator: Any, *_: Any, **__: Any) -> Any:
    raise RuntimeError(f"{operator} has no values on a fake GPU")


def _run(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on the CPU: inputs and outputs that are written lie in the device's memory."""
    device, originals, aliases = None, {}, []

    def as_cpu(x: Any) -> Any:
        nonlocal device
        if isinstance(x, Tensor):
            aliases.append(alias := on_cpu(x) if x.is_cuda else x)
            originals[id(alias)] = x
            device = device or (x.device if x.is_cuda else None)
            return alias
        if isinstance(x, torch.device):
            return torch.device("cpu")
        return None if isinstance(x, torch.Generator) else x

    def as_cuda(y: Any) -> Any:
        if not isinstance(y, Tensor):
            return y
        if (original := originals.get(id(y))) is None:
            return to_device(y, device or torch.device("cuda", torch.cuda.current_device()))
        if original.shape != y.shape:  # `out=` of another size
            overwrite(original.resize_(y.shape), y.contiguous())
        return original

    cpu_args, cpu_kwargs = tree_map(as_cpu, args), tree_map(as_cpu, kwargs)
    parameters = zip(cpu_args, operator._schema.arguments, strict=False)
    if any(
        isinstance(value, int | float) and "Tensor" in str(parameter.type)
        for value, parameter in parameters
    ):
        # a number in place of a tensor: another overload on the way here
        operator = operator.overloadpacket
    return tree_map(as_cuda, operator(*cpu_args, **cpu_kwargs))


def _by_dtype(operator: Any, *args: Any, **kwargs: Any) -> Tensor:
    """`mm`, `bmm`, `addmm` or `baddbmm` with `out_dtype`, which CPUs lack."""
    (dtype,) = (x for x in args if isinstance(x, torch.dtype))
    tensors = [x for x in args if isinstance(x, Tensor)]
    product, out = getattr(torch, operator.__name__.split(".")[0]), kwargs.pop("out", None)
    result = product(*(on_cpu(x).to(dtype) for x in tensors), **kwargs)
    if out is None:
        return to_device(result, tensors[0].device)
    on_cpu(out).copy_(result)
    return out


def _run_special(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the function in `SPECIAL`, with the arguments by their names in the schema."""
    parameters = operator._schema.arguments
    given = {parameter.name: parameter.default_value for parameter in parameters}
    given |= {parameter.name: value for parameter, value in zip(parameters, args, strict=False)}
    return SPECIAL[operator.__name__.split(".")[0]](SimpleNamespace(**given | kwargs))


def _softmax(name: str, given: SimpleNamespace) -> Tensor:
    """`_softmax` and `_log_softmax` of 16-bit inputs in fp32, which CPUs lack."""
    x = given.self
    result = getattr(torch.ops.aten, name)(on_cpu(x).float(), given.dim, False)
    return to_device(result if given.half_to_float else result.to(x.dtype), x.device)


def _rms_norm(given: SimpleNamespace) -> tuple[Tensor, Tensor]:
    x, weight = given.input, given.weight
    wide, eps = on_cpu(x).float(), torch.finfo(x.dtype).eps if given.eps is None else given.eps
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    out = wide * rstd * (1 if weight is None else on_cpu(weight).float())
    return to_device(out.to(x.dtype), x.device), to_device(rstd, x.device)


def _rms_norm_backward(given: SimpleNamespace) -> tuple[Tensor, Tensor | None]:
    x, weight = given.input, given.weight
    grad, inverse = on_cpu(given.grad_out).float(), on_cpu(given.rstd).float()
    normed, scaled = (
        on_cpu(x).float() * inverse,
        grad * (1 if weight is None else on_cpu(weight).float()),
    )
    grad_x = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    grad_weight = None
    if weight is not None:
        grad_weight = to_device((grad * normed).flatten(0, -2).sum(0).to(weight.dtype), x.device)
    return to_device(grad_x.to(x.dtype), x.device), grad_weight


def _options(given: SimpleNamespace) -> attention.Options:
    assert not given.dropout_p, "no dropout of attention on a fake GPU; set --attention-dropout 0"
    window = (getattr(given, "window_size_left", None), getattr(given, "window_size_right", None))
    is_causal = (
        given.is_causal if hasattr(given, "is_causal") else given.custom_mask_type == LOWER_RIGHT
    )
    return attention.Options(given.scale or given.query.shape[-1] ** -0.5, is_causal, window)


def _empty(like: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def _sdpa(given: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """Output [B, N, S, D] and log-sum-exp [B, N, S]."""
    assert getattr(given, "attn_bias", None) is None, "a mask on a fake GPU"
    q, k, v = (x.transpose(1, 2) for x in (given.query, given.key, given.value))
    out, lse = attention.flash((q, k, v), (None, None), _options(given))
    return out.transpose(1, 2), lse


def _sdpa_flash(given: SimpleNamespace) -> tuple[Any, ...]:
    q, random = (
        given.query,
        (_empty(given.query, torch.uint64, 2), _empty(given.query, torch.uint64, 0)),
    )
    return *_sdpa(given), None, None, q.shape[2], given.key.shape[2], *random, _empty(q, q.dtype, 0)


def _sdpa_cudnn(given: SimpleNamespace) -> tuple[Any, ...]:
    """The log-sum-exp is [B, N, S, 1]."""
    out, lse, *others = _sdpa_flash(given)
    return out, lse[..., None], *others


def _sdpa_cudnn_backward(given: SimpleNamespace) -> tuple[Tensor, ...]:
    given.logsumexp = given.logsumexp.squeeze(-1)
    return _sdpa_backward(given)


def _sdpa_efficient(given: SimpleNamespace) -> tuple[Any, ...]:
    return *_sdpa(given), _empty(given.query, torch.int64), _empty(given.query, torch.int64)


def _sdpa_backward(given: SimpleNamespace) -> tuple[Tensor, ...]:
    grad = given.grad_out if hasattr(given, "grad_out") else given.grad_out_
    grad, q, k, v, out = (
        x.transpose(1, 2) for x in (grad, given.query, given.key, given.value, given.out)
    )
    grads = attention.flash_backward(
        grad, (q, k, v), (out, given.logsumexp), (None, None), _options(given)
    )
    return tuple(x.transpose(1, 2) for x in grads)


def _sdpa_efficient_backward(given: SimpleNamespace) -> tuple[Tensor | None, ...]:
    return *_sdpa_backward(given), None


def _efficient(given: SimpleNamespace) -> tuple[Any, ...]:
    assert given.bias is None and given.custom_mask_type in (0, LOWER_RIGHT), "a mask on a fake GPU"
    inputs, bounds = (given.query, given.key, given.value), (given.cu_seqlens_q, given.cu_seqlens_k)
    random = (_empty(given.query, torch.int64), _empty(given.query, torch.int64))
    return (
        *attention.flash(inputs, bounds, _options(given)),
        *random,
        given.query.shape[1],
        given.key.shape[1],
    )


def _efficient_backward(given: SimpleNamespace) -> tuple[Tensor | None, ...]:
    inputs, bounds = (given.query, given.key, given.value), (given.cu_seqlens_q, given.cu_seqlens_k)
    grads = attention.flash_backward(
        given.grad_out_, inputs, (given.out, given.logsumexp), bounds, _options(given)
    )
    return *grads, None


def _flash(given: SimpleNamespace) -> tuple[Tensor, ...]:
    inputs, bounds = (given.query, given.key, given.value), (given.cum_seq_q, given.cum_seq_k)
    q, random = (
        given.query,
        (_empty(given.query, torch.uint64, 2), _empty(given.query, torch.uint64, 0)),
    )
    return *attention.flash(inputs, bounds, _options(given)), *random, _empty(q, q.dtype, 0)


def _flash_backward(given: SimpleNamespace) -> tuple[Tensor, ...]:
    inputs, bounds = (given.query, given.key, given.value), (given.cum_seq_q, given.cum_seq_k)
    return attention.flash_backward(
        given.grad_out, inputs, (given.out, given.logsumexp), bounds, _options(given)
    )


# operators that CPUs lack or have in another form: functions of their arguments by name
SPECIAL: dict[str, Callable[[SimpleNamespace], Any]] = {
    "_softmax": functools.partial(_softmax, "_softmax"),
    "_log_softmax": functools.partial(_softmax, "_log_softmax"),
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "_scaled_dot_product_flash_attention": _sdpa_flash,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
    "_scaled_dot_product_cudnn_attention": _sdpa_cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _sdpa_cudnn_backward,
    "_scaled_dot_product_efficient_attention": _sdpa_efficient,
    "_scaled_dot_product_efficient_attention_backward": _sdpa_efficient_backward,
    "_efficient_attention_forward": _efficient,
    "_efficient_attention_backward": _efficient_backward,
    "_flash_attention_forward": _flash,
    "_flash_attention_backward": _flash_backward,
    "_scaled_mm_v2": scaled.scaled_mm,
    "_scaled_grouped_mm_v2": scaled.scaled_grouped_mm,
}
