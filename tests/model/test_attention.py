"""Attention: the rows that a tensor-parallel rank computes, and the scale of the scores."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nanotrain.model.attention import _rows
from nanotrain.spec.shape import ModelShape
from nanotrain.topology.groups import GroupSpec
from tests.model.building import LLAMA, build, random_batch


@pytest.mark.parametrize(("heads", "expected"), [(4, [(0, 8), (8, 16), (16, 24), (24, 32)]), (2, [(0, 8)] * 2)])
def test_ranks_compute_their_heads_or_share_one(heads: int, expected: list[tuple[int, int]]) -> None:
    for index, (start, stop) in enumerate(expected):
        tensor_parallel = SimpleNamespace(group=GroupSpec("tp", (0, 1, 2, 3), index))
        rows = _rows(ModelShape.of(LLAMA), heads, tensor_parallel=tensor_parallel)
        assert (rows.start, rows.stop) == (start, stop)


def test_the_scale_of_the_scores_is_that_of_the_width_by_default() -> None:
    tokens = random_batch().tokens
    plain, same, other = (build(replace(LLAMA, softmax_scale=scale)).logits(tokens) for scale in (None, 8**-0.5, 20.0))
    torch.testing.assert_close(plain, same)
    assert not torch.allclose(plain, other, atol=1e-3)
