"""Rows of a tensor of ours are found among those of a tensor of Megatron-LM."""

import torch

from nanotrain.interop.megatron.rows import RotaryPairs, Rows


def test_rows_of_a_group() -> None:
    rows = Rows(first=2, per_group=2, stride=5)
    assert list(rows.runs(0, 6)) == [(0, 2, 2, 1), (2, 4, 7, 1), (4, 6, 12, 1)]
    assert list(rows.runs(3, 3)) == []


def test_rotary_channels_are_stored_pair_by_pair() -> None:
    pairs = RotaryPairs(plain=3, rotary=4)
    ours = torch.arange(14.0)[:, None]
    theirs = pairs.to_pairs(ours)
    assert theirs[:7, 0].tolist() == [0, 1, 2, 3, 5, 4, 6]
    for start in range(14):
        for stop in range(start, 15):
            read = [theirs[run.first : run.last : run.step] for run in pairs.runs(start, stop)]
            assert torch.equal(torch.cat([ours[:0], *read]), ours[start:stop])
