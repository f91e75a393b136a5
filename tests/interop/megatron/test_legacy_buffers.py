"""Parameters are found in the buffers of the distributed optimizer, and other buffers are refused.

That all layouts have the state of `torch_dist` is held by `test_import_run.py`.
"""

from typing import Any

import pytest
import torch

from nanotrain.interop.megatron.legacy_buffers import WORD, Buckets, add_buffers, positions
from nanotrain.interop.megatron.legacy_optimizer import RankState, parameters_of

SIZES = {WORD: (10, 3), "norm.weight": (7,), "mlp.experts.local_experts.0.fc1.weight": (9, 9)}
SIZES = {f"decoder.layers.0.{name}" if name != WORD else name: size for name, size in SIZES.items()}


def rank(*, has_ep: bool = False) -> RankState:
    chunk = {name: {"": torch.zeros(size)} for name, size in SIZES.items()}
    state = RankState([chunk])
    state.parameters += parameters_of(state.chunks, has_ep=has_ep, decays_norms=False)
    return state


@pytest.mark.parametrize(
    ("bucket_size", "shared", "starts"),
    [
        (None, None, [0, 128, 192]),  # each at a multiple of 64, from the last to the first
        (80, None, [0, 81, 145]),  # the first bucket ends with its only parameter
        (None, WORD, [0, 128, 192]),  # an embedding in a bucket behind padding
        (80, WORD, [0, 81, 145]),
        (1, None, [0, 81, 88]),
    ],
)
def test_positions(bucket_size: int | None, shared: str | None, starts: list[int]) -> None:
    found = positions(rank().parameters, bucket_size=bucket_size, shared=shared)
    members, first = zip(*found, strict=True)
    assert list(first) == starts
    assert [member.name for member in members] == list(reversed(SIZES))


def test_buckets_grow_with_the_ranks_that_reduce_gradients() -> None:
    arguments = {"overlap_grad_reduce": True, "data_parallel_size": 16, "context_parallel_size": 4}
    assert Buckets.from_arguments(arguments, pp=1, is_tied=False).size == 64_000_000
    few = arguments | {"context_parallel_size": 1}
    assert Buckets.from_arguments(few, pp=1, is_tied=False).size == 40_000_000


def buffers(numel: int) -> dict[str, torch.Tensor]:
    values = torch.arange(float(numel))
    return {"param": values, "exp_avg": values * 10, "exp_avg_sq": values * 100}


def test_main_parameters_and_moments_are_added() -> None:
    state = rank()
    content = {0: {"dtype": buffers(222)}, "buckets_coalesced": True}
    add_buffers(content, state, buckets=Buckets(None, has_shared_embedding=False), stage=0)
    word = state.chunks[0][WORD]
    expected = torch.arange(192.0, 222).view(10, 3)
    assert torch.equal(word["optimizer.state.fp32_param."], expected)
    assert torch.equal(word["optimizer.state.exp_avg_sq."], expected * 100)


def test_experts_have_buffers_of_their_own_with_expert_parallelism() -> None:
    state = rank(has_ep=True)
    own = Buckets(None, has_shared_embedding=False)
    # the buffers of dense weights are in the file of another rank
    add_buffers([None, {0: {"dtype": buffers(81)}}], state, buckets=own, stage=0)
    found = [name for name, tensors in state.chunks[0].items() if len(tensors) > 1]
    assert found == ["decoder.layers.0.mlp.experts.local_experts.0.fc1.weight"]


@pytest.mark.parametrize(
    "content",
    [
        3,
        {},
        {0: []},
        {0: {"a": buffers(222), "b": buffers(222)}},
        {0: {"dtype": {"param": torch.zeros(222)}}},
        {0: {"dtype": buffers(222) | {"exp_avg": torch.zeros(2, 111)}}},
        {0: {"dtype": buffers(222) | {"exp_avg": torch.zeros(221)}}},
        {0: {"dtype": buffers(221)}},
        {0: {"dtype": buffers(230)}},
        [None] * 3,
    ],
)
def test_other_buffers_are_an_error(content: Any) -> None:
    with pytest.raises(ValueError, match="buffer|distributed optimizer"):
        add_buffers(content, rank(), buckets=Buckets(None, has_shared_embedding=False), stage=0)


def test_buckets_end_where_the_arguments_say() -> None:
    assert Buckets.from_arguments({}, pp=2, is_tied=False) == Buckets(None, False)
    assert Buckets.from_arguments({"mtp_num_layers": 1}, pp=2, is_tied=False).has_shared_embedding
    overlapped = {"overlap_grad_reduce": True}
    assert Buckets.from_arguments(overlapped, pp=1, is_tied=True) == Buckets(40_000_000, False)
    many = overlapped | {"data_parallel_size": 64}
    assert Buckets.from_arguments(many, pp=1, is_tied=False).size == 64_000_000
    named = many | {"ddp_bucket_size": 500}
    assert Buckets.from_arguments(named, pp=1, is_tied=False).size == 500
    with pytest.raises(ValueError, match="ddp_num_buckets"):
        Buckets.from_arguments(overlapped | {"ddp_num_buckets": 3}, pp=1, is_tied=False)
