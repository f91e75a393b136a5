"""SDPA against the formula; the mask of segments."""

import pytest
import torch

from nanotrain.parallel.cp.sdpa import attend, full_mask


@pytest.mark.parametrize("value_head_dim", [5, 8, 11])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_attend_is_softmax_of_the_causal_scores(groups: int, value_head_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 10, 6, 8, generator=generator)
    key, value = (torch.randn(2, 10, groups, head_dim, generator=generator) for head_dim in (8, value_head_dim))
    out = attend(query, key=key, value=value, mask=None)
    for head in range(6):
        group = head // (6 // groups)
        scores = query[:, :, head] @ key[:, :, group].mT / 8**0.5
        scores = scores.masked_fill(torch.ones(10, 10).triu(1).bool(), float("-inf"))
        torch.testing.assert_close(out[:, :, head], scores.softmax(-1) @ value[:, :, group])


def test_the_mask_is_causal_and_ends_at_borders() -> None:
    ids = torch.tensor([[0, 0, 1, 1, 1]], dtype=torch.int32)
    mask = full_mask(ids, length=ids.shape[1], device=ids.device, window=None)
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert mask.shape == (1, 1, 5, 5)
    assert mask[0, 0].int().tolist() == expected


def test_a_window_ends_before_the_query_and_at_borders() -> None:
    ids = torch.tensor([[0, 0, 1, 1, 1]], dtype=torch.int32)
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert full_mask(None, length=ids.shape[1], device=ids.device, window=1)[0, 0].int().tolist() == expected
    expected[2] = [0, 0, 1, 0, 0]
    assert full_mask(ids, length=ids.shape[1], device=ids.device, window=1)[0, 0].int().tolist() == expected
    assert full_mask(None, length=ids.shape[1], device=ids.device, window=0)[0, 0].equal(torch.eye(5, dtype=torch.bool))
