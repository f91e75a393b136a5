"""Attention on a CUDA device: merged chunks, and values that are narrower than keys, against the
eager form.
"""

import pytest
import torch

from nanotrain.attention.backends import BACKENDS
from nanotrain.attention.chunk_kernels import (
    FUSED,
    AttentionChunk,
    AttentionOps,
    AttentionResult,
    fused_ops,
)
from nanotrain.attention.chunks import EAGER, merge_log_sum_exp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FUSED_CUDA = FUSED["flash"]


def distance(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    return ((tensor.float() - expected.float()).abs().max() / expected.float().abs().max()).item()


def in_two_chunks(
    ops: AttentionOps, full: AttentionChunk, grad: torch.Tensor
) -> list[torch.Tensor]:
    """Output and gradients of the second half of causal queries, whose first half of keys is merged
    last.
    """
    half = full.query.shape[2] // 2
    first, second = slice(0, half), slice(half, None)

    def chunk(keys: slice, is_causal: bool) -> AttentionChunk:
        query, key, value = full.query[:, :, second], full.key[:, :, keys], full.value[:, :, keys]
        return AttentionChunk(query, key, value, None, is_causal, full.scale)

    result = ops.forward(chunk(second, True))
    total = AttentionResult(result.out.float(), result.lse.clone())
    merge_log_sum_exp(total, ops.forward(chunk(first, False)))
    merged = AttentionResult(total.out.to(full.query.dtype), total.lse)
    gradients = ops.backward(chunk(first, False), merged, grad=grad)
    return [merged.out, gradients.query, gradients.key, gradients.value]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_fused_operator_on_cuda_equals_the_eager_form(head_dim: int) -> None:
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(2, 4, 256, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    grad = torch.randn(2, 4, 128, head_dim, device="cuda", dtype=torch.bfloat16)
    full = AttentionChunk(query, key, value, None, True, scale=head_dim**-0.5)
    fused, eager = (in_two_chunks(ops, full, grad) for ops in (FUSED_CUDA, EAGER))
    assert max(distance(one, other) for one, other in zip(fused, eager, strict=True)) < 2e-2


@pytest.mark.parametrize("dims", [(128, 128), (192, 128)])
def test_cudnn_equals_the_eager_form_without_padding(dims: tuple[int, int]) -> None:
    torch.manual_seed(0)
    shapes = ((2, 4, 256, dims[0]), (2, 4, 256, dims[0]), (2, 4, 256, dims[1]))
    query, key, value = (torch.randn(shape, device="cuda").bfloat16() for shape in shapes)
    full = AttentionChunk(query, key, value, None, True, scale=dims[0] ** -0.5)
    if fused_ops(full) is not FUSED["cudnn"]:
        pytest.skip("needs compute capability 9.0 or 10.x with cuDNN 9.15.1")
    grad = torch.randn(2, 4, 128, dims[1], device="cuda", dtype=torch.bfloat16)
    fused, eager = (in_two_chunks(ops, full, grad) for ops in (FUSED["cudnn"], EAGER))
    assert max(distance(one, other) for one, other in zip(fused, eager, strict=True)) < 2e-2


@pytest.mark.parametrize("keys", [256, 512], ids=["all", "later queries"])
def test_flash_attention_to_values_narrower_than_keys_equals_fp64(keys: int) -> None:
    torch.manual_seed(1)
    shapes = ((2, 256, 4, 96), (2, keys, 4, 96), (2, keys, 4, 64))
    inputs = [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in shapes]
    query, key, value = (x.detach().double().transpose(1, 2).requires_grad_() for x in inputs)
    hidden = torch.ones(256, keys, dtype=torch.bool, device="cuda").triu(keys - 255)
    expected = (query @ key.mT * 96**-0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ value
    grad = torch.randn(2, 256, 4, 64, device="cuda").bfloat16()
    kernel = BACKENDS["sdpa flash"].kernel(True)
    found = kernel.attend(inputs[0], key=inputs[1], value=inputs[2])
    found.backward(grad)
    expected.backward(grad.double().transpose(1, 2))
    pairs = [
        (found, expected),
        *((x.grad, y.grad) for x, y in zip(inputs, (query, key, value), strict=True)),
    ]
    assert max(distance(one, other.transpose(1, 2)) for one, other in pairs) < 2e-2
