"""Attention in blocks of scores is softmax attention, as exact as torch's in 16 bits."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.attention import causal_attention, sdpa
from nanotrain.attention.causal_attention import attend, computes
from nanotrain.kernels import onednn

pytestmark = pytest.mark.skipif(onednn._OPERATOR is None, reason="this build of torch has no oneDNN")


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def by_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
    heads = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)


def results(function, tensors: list[Tensor], grad: Tensor, *, dtype: torch.dtype) -> list[Tensor]:
    """The output and the gradients."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]


# batch, length, query heads, key/value heads, head dim, value head dim
@pytest.mark.parametrize("sizes", [(2, 192, 2, 2, 16, 16), (1, 200, 6, 2, 24, 8), (1, 64, 4, 1, 32, 32)], ids=str)
def test_results_are_as_close_to_fp64_as_those_of_torch(sizes: tuple[int, ...], monkeypatch) -> None:
    monkeypatch.setattr(causal_attention, "BLOCK_SCORES", 1)  # blocks of 64 queries, of 200 the last one has 8
    batch, length, num_heads, num_groups, head_dim, value_dim = sizes
    # as layers do, query, key and value are parts of one product
    joint = draw(batch, length, num_heads + num_groups, head_dim, seed=1)
    tensors = [*joint.split([num_heads, num_groups], dim=2), draw(batch, length, num_groups, value_dim, seed=2)]
    grad = draw(num_heads, length, batch, value_dim, seed=3).permute(2, 1, 0, 3)
    exact = results(by_torch, tensors, grad, dtype=torch.float64)
    ours = results(lambda q, k, v: attend(q, key=k, value=v), tensors, grad, dtype=torch.bfloat16)
    theirs = results(by_torch, tensors, grad, dtype=torch.bfloat16)
    for found, torchs, expected in zip(ours, theirs, exact, strict=True):
        assert found.dtype == torch.bfloat16 and found.shape == expected.shape
        error, allowed = ((x.double() - expected).norm() / expected.norm() for x in (found, torchs))
        assert error < max(3e-3, 1.2 * allowed), (error, allowed)


def test_a_later_token_changes_no_earlier_result() -> None:
    query, key, value = (draw(1, 128, 2, 16, seed=seed) for seed in range(3))
    before = attend(query, key=key, value=value)
    key[:, 100:], value[:, 100:] = 7, -7
    after = attend(query, key=key, value=value)
    assert torch.equal(after[:, :100], before[:, :100]) and not torch.equal(after[:, 100:], before[:, 100:])


def test_only_query_key_and_value_are_saved() -> None:
    saved: list[Tensor] = []
    tensors = [draw(1, 64, 2, 8, seed=seed).requires_grad_() for seed in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        attend(tensors[0], key=tensors[1], value=tensors[2])
    assert {x.data_ptr() for x in saved} == {x.data_ptr() for x in tensors}


def test_two_threads_compute_the_same_bits_as_one(two_threads) -> None:
    tensors, grad = [draw(3, 128, size, 16, seed=size) for size in (4, 2, 2)], draw(3, 128, 4, 16, seed=1)

    def computed() -> list[Tensor]:
        return results(lambda q, k, v: attend(q, key=k, value=v), tensors, grad, dtype=torch.bfloat16)

    of_two = computed()
    torch.set_num_threads(1)
    assert all(map(torch.equal, of_two, computed()))


def test_it_computes_bf16_of_some_sizes_on_one_or_two_threads(monkeypatch) -> None:
    monkeypatch.setattr(onednn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)

    def called(length: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        query = torch.zeros(1, length, 2, 8, dtype=dtype)
        return computes(query, query[:, :, :1])

    assert [called(length) for length in (192, 256, 320, 330, 512, 576)] == [False, True, True, False, True, False]
    assert not called(256, torch.float32)
    query = draw(1, 256, 2, 8, seed=0)
    assert not computes(query, query[:, :128])
    assert "_CausalAttention" in str(sdpa.attend(query.requires_grad_(), key=query, value=query).grad_fn)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert not called(256)  # one head, which two threads cannot divide
    assert computes(query, query)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert not computes(query.repeat(2, 1, 1, 1), query.repeat(2, 1, 1, 1))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert not called(256)
