"""SDPA against the formula."""

import pytest
import torch

from nanotrain.parallel.cp.sdpa import attend


@pytest.mark.parametrize("value_head_dim", [5, 8, 11])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_attend_is_softmax_of_the_causal_scores(groups: int, value_head_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 10, 6, 8, generator=generator)
    key, value = (torch.randn(2, 10, groups, head_dim, generator=generator) for head_dim in (8, value_head_dim))
    out = attend(query, key=key, value=value)
    for head in range(6):
        group = head // (6 // groups)
        scores = query[:, :, head] @ key[:, :, group].mT / 8**0.5
        scores = scores.masked_fill(torch.ones(10, 10).triu(1).bool(), float("-inf"))
        torch.testing.assert_close(out[:, :, head], scores.softmax(-1) @ value[:, :, group])
