"""cuDNN's operator for chunks: when it is taken, its arguments, and merged results against fp64."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanotrain.attention import chunk_kernels
from nanotrain.attention.chunk_kernels import FUSED, AttentionChunk, AttentionResult, fused_ops
from nanotrain.attention.chunks import (
    EAGER,
    accumulate_dtype,
    chunk_backward,
    chunk_forward,
    merge_log_sum_exp,
)
from nanotrain.comm.recorder import Recorder

B, N, G, Q, D, DV = 2, 4, 2, 6, 24, 16


def chunk_on_meta(
    *,
    dims: tuple[int, int] = (192, 128),
    queries: int = 64,
    keys: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> AttentionChunk:
    def empty(heads: int, length: int, dim: int) -> Tensor:
        return torch.empty(1, heads, length, dim, dtype=dtype, device="meta")

    query, key = empty(8, queries, dims[0]), empty(2, keys, dims[0])
    return AttentionChunk(query, key, empty(2, keys, dims[1]), None, False, scale=0.1)


@pytest.mark.parametrize(
    ("options", "capability", "cudnn", "name"),
    [
        ({}, (9, 0), 91501, "cudnn"),
        ({}, (10, 0), 92300, "cudnn"),
        ({}, (9, 0), 91500, "flash"),  # torch does not prefer it either
        ({}, (8, 0), 92300, "flash"),
        ({}, (12, 0), 92300, "flash"),
        ({"dims": (128, 128)}, (9, 0), 91501, "cudnn"),
        ({"dims": (100, 100)}, (9, 0), 91501, "flash"),
        ({"dims": (192, 192)}, (10, 0), 92300, "flash"),
        ({"queries": 1}, (9, 0), 91501, "flash"),
        ({"keys": 1}, (9, 0), 91501, "flash"),
        ({"dims": (224, 224)}, (8, 9), 91501, None),
        ({"dims": (512, 512)}, (9, 0), 91501, None),
        ({"dtype": torch.float32}, (9, 0), 91501, None),
    ],
)
def test_the_operator_of_a_chunk_by_card(
    options: dict[str, Any],
    capability: tuple[int, int],
    cudnn: int,
    name: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunk_kernels, "compute_capability", lambda device: capability)
    monkeypatch.setattr(chunk_kernels, "cudnn_version", lambda: cudnn)
    assert fused_ops(chunk_on_meta(**options)) is (None if name is None else FUSED[name])


def test_deterministic_algorithms_leave_cudnn_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_kernels, "cudnn_version", lambda: 91501)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert fused_ops(chunk_on_meta()) is FUSED["flash"]


def test_heads_of_mla_reach_cudnn_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device has cuDNN's operator, with the shapes of its outputs."""
    monkeypatch.setattr(chunk_kernels, "cudnn_version", lambda: 91501)
    chunk = chunk_on_meta()
    with Recorder() as recorder:
        result = chunk_forward(chunk)
    out_bytes = 8 * 64 * (128 * 2 + 4)
    assert recorder.allocated < out_bytes + 64, "output and log-sum-exp, and no padded value"
    assert result.out.shape == (1, 8, 64, 128) and result.lse.shape == (1, 8, 64)
    gradients = chunk_backward(chunk, result, grad=torch.empty_like(result.out))
    assert gradients.query.shape == chunk.query.shape
    assert gradients.value.shape == chunk.value.shape


def named(operator: Any, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Arguments by their names in torch's schema."""
    names = [argument.name for argument in operator.default._schema.arguments]
    return dict(zip(names, args, strict=False)) | options


class StandIn:
    """cuDNN's operators by EAGER, with the shapes and names of torch's schema."""

    def __init__(self) -> None:
        self.forward_op = torch.ops.aten._scaled_dot_product_cudnn_attention
        self.backward_op = torch.ops.aten._scaled_dot_product_cudnn_attention_backward

    def forward(self, *args: Any, **options: Any) -> tuple[Any, ...]:
        call = named(self.forward_op, args, options)
        assert call["compute_log_sumexp"] and call["attn_bias"] is None and call["dropout_p"] == 0
        result = EAGER.forward(self.chunk(call))
        return result.out, result.lse.float()[..., None]

    def backward(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        call = named(self.backward_op, args, options)
        assert call["logsumexp"].shape == (B, N, Q, 1) and call["out"].is_contiguous()
        assert (call["max_q"], call["max_k"]) == (Q, call["key"].shape[2])
        assert call["attn_bias"] is None and call["dropout_p"] == 0.0
        merged = AttentionResult(call["out"], call["logsumexp"][..., 0])
        gradients = EAGER.backward(self.chunk(call), merged, grad=call["grad_out"])
        key, value = (x.unflatten(1, (G, -1)).sum(2) for x in (gradients.key, gradients.value))
        return gradients.query, key, value

    def chunk(self, call: dict[str, Any]) -> AttentionChunk:
        key, value = (call[name].repeat_interleave(N // G, 1) for name in ("key", "value"))
        return AttentionChunk(
            call["query"], key, value, None, call["is_causal"], scale=call["scale"]
        )


class TorchWith:
    """torch with other operators of aten."""

    def __init__(self, aten: SimpleNamespace) -> None:
        self.ops = SimpleNamespace(aten=aten)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def test_merged_chunks_of_cudnn_are_attention_to_all_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in = StandIn()
    operators = SimpleNamespace(
        _scaled_dot_product_cudnn_attention=stand_in.forward,
        _scaled_dot_product_cudnn_attention_backward=stand_in.backward,
    )
    monkeypatch.setattr(chunk_kernels, "torch", TorchWith(operators))
    monkeypatch.setattr("nanotrain.attention.chunks.fused_ops", lambda chunk: FUSED["cudnn"])
    torch.manual_seed(0)
    query = torch.randn(B, N, Q, D)
    key, value = torch.randn(B, G, 2 * Q, D), torch.randn(B, G, 2 * Q, DV)
    grad = torch.randn(B, N, Q, DV)
    # the second half of the keys is causal, as the local keys of ring attention
    earlier = AttentionChunk(query, key[:, :, :Q], value[:, :, :Q], None, False, scale=0.2)
    local = AttentionChunk(query, key[:, :, Q:], value[:, :, Q:], None, True, scale=0.2)
    total = chunk_forward(local)
    assert total.out.dtype == accumulate_dtype(query)
    merge_log_sum_exp(total, chunk_forward(earlier))
    parts = [chunk_backward(chunk, total, grad=grad) for chunk in (earlier, local)]

    wide = [x.double().requires_grad_() for x in (query, key, value)]
    repeated = [x.repeat_interleave(N // G, 1) for x in wide[1:]]
    scores = wide[0] @ repeated[0].mT * 0.2
    hidden = torch.ones(Q, 2 * Q, dtype=torch.bool).triu(Q + 1)
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ repeated[1]
    expected.backward(grad.double())
    torch.testing.assert_close(total.out.double(), expected, rtol=1e-5, atol=1e-5)
    found = [parts[0].query + parts[1].query]
    found += [
        torch.cat([parts[0].key, parts[1].key], 2),
        torch.cat([parts[0].value, parts[1].value], 2),
    ]
    for actual, reference in zip(found, wide, strict=True):
        assert reference.grad is not None
        torch.testing.assert_close(actual.double(), reference.grad, rtol=1e-4, atol=1e-5)
